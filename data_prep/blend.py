"""Blend files: several datasets and how often each is drawn from.

weights_by: size              # how the weights came about; for the reader
datasets:
- name: Pile-CC
  train: pile.pile-cc.train             # prefix, relative to this file's folder
  validation: pile.pile-cc.validation   # may be left out, as `test`
  test: pile.pile-cc.test
  weight: 0.1811
"""

import math
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.strict_yaml import load_yaml


@dataclass(frozen=True)
class BlendEntry:
    """One dataset of a blend: prefixes of its splits, and its weight, above 0 (weights need not sum to 1)."""

    name: str
    train: Path
    validation: Path | None
    test: Path | None
    weight: float


@dataclass(frozen=True)
class Blend:
    """A blend file's content. `weights_by` says how the weights came about, None where the file does not."""

    entries: tuple[BlendEntry, ...]
    weights_by: str | None = None


def load_blend(path: Path | str) -> Blend:
    """Read a blend file; its datasets are not looked at.

    Raises UserError naming file, entry and key: no such file, not YAML, an unknown or a missing key, a weight
    that is no number above 0, no dataset, a name or a training prefix that stands twice, validation or test
    data that some dataset trains on.
    """
    path = Path(path)
    try:
        values = load_yaml(path)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; python -m data_prep.preprocess --split_by writes one"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    _check_keys(values, {"weights_by", "datasets"}, str(path))
    if not isinstance(values.get("datasets"), list) or not values["datasets"]:
        raise UserError(f"{path}: datasets must be a list with an entry for each dataset")
    entries = tuple(_entry(path, number, each) for number, each in enumerate(values["datasets"], start=1))
    for key in ("name", "train"):
        counts = Counter(getattr(entry, key) for entry in entries)
        twice = [each for each, count in counts.items() if count > 1]
        if twice:
            raise UserError(f"{path}: the {key} {twice[0]} stands twice; join the entries and add their weights")
    trained_on = {entry.train for entry in entries}
    for entry in entries:
        for key in ("validation", "test"):
            if getattr(entry, key) in trained_on:
                raise UserError(f"{path}: {entry.name}: {key} {getattr(entry, key)} is trained on, too")
    return Blend(entries, values.get("weights_by"))


def _entry(path: Path, number: int, values: Any) -> BlendEntry:
    place = f"{path}: entry {number}"
    _check_keys(values, {field.name for field in fields(BlendEntry)}, place)
    for key in ("name", "train", "weight"):
        if values.get(key) is None:
            raise UserError(f"{place} has no {key}")
    place += f" ({values['name']})"
    for key in ("name", "train", "validation", "test"):
        if values.get(key) is not None and (not isinstance(values[key], str) or not values[key]):
            raise UserError(f"{place}: {key} must be text, got {values[key]!r}")
    weight = values["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise UserError(f"{place}: weight must be a number above 0, got {weight!r}")
    prefixes = {
        key: None if values.get(key) is None else path.parent / values[key]
        for key in ("train", "validation", "test")
    }
    return BlendEntry(name=values["name"], weight=float(weight), **prefixes)  # pyright: ignore[reportArgumentType]


def _check_keys(values: Any, known: set[str], place: str) -> None:
    if not isinstance(values, dict):
        raise UserError(f"{place}: expected keys such as {', '.join(sorted(known))}")
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise UserError(f"{place}: unknown key {unknown[0]}; known: {', '.join(sorted(known))}")
