"""Blend files: several datasets and how often each is drawn from.

`preprocess --split_by` writes one; `python -m data_prep.blend --datasets PREFIX... --output FILE` makes one of
datasets that exist:

weights_by: size              # how the weights came about; for the reader
datasets:
- name: Pile-CC
  train: pile.pile-cc.train             # prefix, relative to this file's folder
  validation: pile.pile-cc.validation   # may be left out, as `test`
  test: pile.pile-cc.test
  weight: 0.1811
"""

import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from data_prep import cli
from data_prep.errors import UserError
from data_prep.files import check_named, manifest_path, written_aside
from data_prep.manifest import load_manifest
from data_prep.strict_yaml import dump_yaml, load_yaml

WeightsBy = Literal["size", "pile", "temperature"]

_PILE_WEIGHTS = Path(__file__).parent / "pile_weights.yaml"


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

    @property
    def has_validation(self) -> bool:
        """Whether any dataset names validation data: these alone are then held out, and every dataset is trained
        on whole, so that a domain too small to have any does not lose documents by another rule."""
        return any(entry.validation for entry in self.entries)


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


@dataclass(frozen=True)
class Weighting:
    """How datasets are weighted.

    by: "size" by their tokens; "pile" as the Pile's paper weights its components (pile_weights.yaml), by name;
    "temperature" by tokens^(1 / temperature): 1 is by size, larger values lift the small ones.
    """

    by: WeightsBy = "size"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(f"--temperature {self.temperature}: give a number above 0")
        if self.temperature != 1 and self.by != "temperature":
            raise UserError("--temperature acts with --blend_weights temperature only")

    def weights(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """Weights that sum to 1 of datasets given by name and number of tokens.

        Raises UserError for a name that is none of the Pile's components, by "pile"."""
        if self.by == "pile":
            published = {_folded(name): weight for name, weight in pile_weights().items()}
            unknown = [name for name in tokens if _folded(name) not in published]
            if unknown:
                raise UserError(
                    f"--blend_weights pile: {unknown[0]!r} is no component of the Pile; weight by size or "
                    f"temperature, or name it as in {_PILE_WEIGHTS}"
                )
            raw = {name: published[_folded(name)] for name in tokens}
        else:
            raw = {name: count ** (1 / self.temperature) for name, count in tokens.items()}
        total = sum(raw.values())
        return {name: float(f"{weight / total:.6g}") for name, weight in raw.items()}


def pile_weights() -> dict[str, float]:
    """Percent of the training data that each component of the Pile makes up, as its paper says."""
    return {component["name"]: component["weight"] for component in load_yaml(_PILE_WEIGHTS)}


def _folded(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def save_blend(blend: Blend, path: Path) -> None:
    """Write a blend file, aside and renamed; prefixes become relative to its folder."""

    def relative(prefix: Path | None) -> str | None:
        return None if prefix is None else os.path.relpath(prefix, path.parent)

    datasets = []
    for entry in blend.entries:
        prefixes = {key: relative(getattr(entry, key)) for key in ("train", "validation", "test")}
        values = {"name": entry.name, **prefixes, "weight": entry.weight}
        datasets.append({key: value for key, value in values.items() if value is not None})
    with written_aside(path) as file:
        content = {"weights_by": blend.weights_by, "datasets": datasets}
        file.write(dump_yaml(content, allow_unicode=True).encode())


def blend_datasets(prefixes: Sequence[Path], weighting: Weighting) -> Blend:
    """A blend of datasets that exist.

    PREFIX.train brings PREFIX.validation and PREFIX.test along where they exist. An entry's name is the dataset's
    domain where it has but one, else its prefix. Raises UserError as load_manifest does.
    """
    tokens: dict[str, int] = {}
    found: list[tuple[str, Path, Path | None, Path | None]] = []
    for prefix in prefixes:
        manifest = load_manifest(prefix)
        name = next(iter(manifest.domains)) if len(manifest.domains) == 1 else prefix.name
        if name in tokens:
            raise UserError(f"--datasets {prefix}: a second dataset of {name}; a blend names each once")
        tokens[name] = manifest.tokens
        found.append((name, prefix, _beside(prefix, "validation"), _beside(prefix, "test")))
    weights = weighting.weights(tokens)
    return Blend(tuple(BlendEntry(*each, weights[each[0]]) for each in found), weighting.by)


def _beside(prefix: Path, split: str) -> Path | None:
    """PREFIX.validation beside PREFIX.train."""
    if prefix.suffix != ".train":
        return None
    other = prefix.with_suffix(f".{split}")
    return other if manifest_path(other).is_file() else None


def add_weighting_options(parser: cli.CommandParser) -> None:
    """--blend_weights and --temperature."""
    add = parser.add_argument
    add("--blend_weights", choices=get_args(WeightsBy), default="size", help="weights in the blend file")
    add("--temperature", type=float, default=1.0, help="weights are tokens^(1 / temperature)")


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.blend", "Write a blend file of existing datasets.")
    parser.add_argument("--datasets", nargs="+", type=Path, required=True, help="prefixes to train on")
    parser.add_argument("--output", type=Path, required=True, help="the .yaml to write")
    add_weighting_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        check_named(options.output, "--output")
        blend = blend_datasets(options.datasets, Weighting(options.blend_weights, options.temperature))
        save_blend(blend, options.output)
        for entry in blend.entries:
            print(f"{entry.weight:.4f}  {entry.name}: {entry.train}")

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
