"""Recipes: YAML files and command-line overrides into `config.Recipe`, and back.

A recipe file holds any part of the configuration; the command line wins over it (`--training.lr 3e-4`).
Every mistake is one UserError line that names the file or key and what would do.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from data_prep.errors import UserError
from data_prep.strict_yaml import dump_yaml, load_yaml
from leviathan_ds import config
from leviathan_ds.config import Recipe

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def build_parser(description: str) -> ArgumentParser:
    """A parser with one option for every field of the recipe, and --config for a recipe file."""
    # Without abbreviations: a mistyped option that begins a known one is a mistake, too.
    parser = ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", type=str, default=None, help="recipe file (YAML); options below win over it")
    for section in dataclasses.fields(Recipe):
        section_class = getattr(config, str(section.type))
        parser.add_argument(f"--{section.name}", type=section_class, default=section_class())
    return parser


def parse(parser: ArgumentParser, arguments: list[str], default_config: Path | None = None) -> tuple[Recipe, Any]:
    """Parse a command line into the recipe and the namespace with the parser's other options.

    Raises UserError with one line for every mistake.
    """
    try:
        path = _option(arguments, "--config")
        if path is None:
            path = default_config
        elif not path:
            raise UserError("--config is empty; is a shell variable in it unset?")
        if path is not None:
            parser.set_defaults(_flatten(_checked_values(Path(path))))
        namespace = parser.instantiate(parser.parse_args(arguments))
    except (ArgumentError, TypeError) as error:
        raise UserError(_one_line(str(error), arguments)) from None
    sections = {field.name: getattr(namespace, field.name) for field in dataclasses.fields(Recipe)}
    return Recipe(**sections), namespace


def _checked_values(path: Path) -> dict[str, Any]:
    values = read_recipe_file(path)
    _parsed(values, path)
    return values


def from_values(values: dict[str, Any], origin: Path | str) -> Recipe:
    """The recipe of nested values as a file holds them. Raises UserError naming `origin` and the key."""
    _check_keys(origin, values, Recipe, "")
    try:
        namespace = _parser_of_values().instantiate(_parsed(values, origin))
        return Recipe(**{field.name: getattr(namespace, field.name) for field in dataclasses.fields(Recipe)})
    except UserError as error:
        raise UserError(f"recipe {origin}: {error}") from None


def _parsed(values: dict[str, Any], origin: Path | str) -> Any:
    try:
        return _parser_of_values().parse_object(values)
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(f"recipe {origin}: {' '.join(str(error).split())}") from None


@cache
def _parser_of_values() -> ArgumentParser:
    return build_parser("recipe")


def read_recipe_file(path: Path) -> dict[str, Any]:
    """The mapping in a recipe file, its keys checked. Raises UserError with file, key and nearest known key."""
    try:
        values = load_yaml(path)
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror}; see recipes/ for the ones that ship") from None
    except ValueError as error:
        raise UserError(f"recipe {path}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe {path}: expected sections such as model: and training:")
    _check_keys(path, values, Recipe, "")
    wandb = values.get("run") or {}
    if wandb.get("wandb") is False:  # YAML 1.1 reads a bare `off` as false
        wandb["wandb"] = "off"
    return values


def _check_keys(path: Path | str, values: dict[str, Any], section: type, prefix: str) -> None:
    known = get_type_hints(section, dict(vars(config)))
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1, 0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"recipe {path}: unknown key {prefix}{key}; {hint}")
        if dataclasses.is_dataclass(known[key]):
            if not isinstance(value, dict):
                raise UserError(f"recipe {path}: {prefix}{key} must be a section with keys, got {value!r}")
            _check_keys(path, value, known[key], f"{prefix}{key}.")  # pyright: ignore[reportArgumentType]


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML that `read_recipe_file` reads back."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    return dump_yaml(plain(dataclasses.asdict(recipe)))


def load(path: Path) -> Recipe:
    """A recipe from its file alone. Raises UserError."""
    return from_values(read_recipe_file(path), path)


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Flat keys whose values differ, with both values."""
    left, right = _flatten(dataclasses.asdict(one)), _flatten(dataclasses.asdict(other))
    return {key: (left[key], right[key]) for key in left if left[key] != right[key]}


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _option(arguments: list[str], name: str) -> str | None:
    """The option's value as the parser will see it: the last one counts."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            value = arguments[index + 1]
        if argument.startswith(name + "="):
            value = argument.split("=", 1)[1]
    return value


def _one_line(message: str, arguments: list[str]) -> str:
    line = " ".join(message.split())
    if line.startswith("unrecognized arguments:"):
        unknown = next((word for word in line.split() if word.startswith("--")), "").lstrip("-").split("=")[0]
        known = _flatten(dataclasses.asdict(Recipe()))
        near = difflib.get_close_matches(unknown, known, 1, 0.5)
        line += f"; did you mean --{near[0]}?" if near else "; --help lists what there is"
    for expected, plainly in _EXPECTED.items():
        line = re.sub(expected, plainly, line)
    return line


# What jsonargparse calls a type, and what a reader does.
_EXPECTED = {
    r"Expected a <class 'tuple'>": "expected a list such as '[a, b]'",
    r"Expected a <class 'int'>": "expected a whole number",
    r"Expected a <class 'float'>": "expected a number",
    r"Expected a <class 'bool'>": "expected true or false",
    r"Expected a typing\.Literal\[([^]]*)\]": r"expected one of \1",
}
