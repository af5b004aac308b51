"""The user's own choice of documents: `--filter module:function` or `--filter path/to/file.py:function`.

The function is called as function(text, domain, record) with the whole record (a .txt file's has only the
text) and returns whether to keep the document. It runs in every worker, and must not depend on the order
of the calls.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from data_prep.errors import UserError

Filter = Callable[[str, str, dict[str, Any]], object]


@cache
def load_filter(name: str) -> Filter:
    """The function that `name` stands for.

    Raises UserError for a name of another form, a missing or failing module, and a missing function."""
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise UserError(f"--filter {name}: expected module:function or path.py:function")
    try:
        module = _file_module(name, module_name) if module_name.endswith(".py") else _module(module_name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--filter {name}: importing it failed: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"--filter {name}: {module_name} has no function {function_name!r}")
    return function


def _module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:  # as for python -m; a worker's path begins elsewhere
        sys.path.append(folder)
    return importlib.import_module(name)


def _file_module(name: str, path: str) -> ModuleType:
    if not Path(path).is_file():
        raise UserError(f"--filter {name}: {path}: no such file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keeps(name: str, place: object, text: str, domain: str, record: dict[str, Any]) -> bool:
    """Whether the filter `name` keeps a document. Raises UserError, with the place, when it fails."""
    try:
        return bool(load_filter(name)(text, domain, record))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--filter {name}: failed at {place}: {type(error).__name__}: {error}") from error
