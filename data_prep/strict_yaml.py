"""YAML that people write: a mapping whose keys stand once each, numbers as 1e-3."""

import re
from pathlib import Path
from typing import Any

import yaml


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML's loader would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that _UniqueKeyLoader would read as numbers."""


# YAML 1.1 reads 1e-3 as a string, for want of the point in 1.0e-3.
for each in (_UniqueKeyLoader, _Dumper):
    each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
    )


def load_yaml(path: Path) -> Any:
    """A file's content. Raises OSError, and ValueError with one line for what is no YAML or has a key twice."""
    try:
        return yaml.load(path.read_text(), _UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def dump_yaml(values: dict[str, Any], *, allow_unicode: bool = False) -> str:
    """Text that `load_yaml` reads back, keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode)
