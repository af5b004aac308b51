"""A study file and the runs that it stands for. Arithmetic over configurations: no torch.

A study is a grid: sizes × arms × seeds (× variants) in up to four experiments. Every run is a recipe, merged from
the study's `recipe`, its size, its arm, what tuning found and its variant, the later ones winning.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from data_prep.errors import UserError
from data_prep.strict_yaml import load_yaml
from leviathan_ds import recipe as recipes
from leviathan_ds.accounting import count_parameters, flops_per_token
from leviathan_ds.config import ModelConfig, Recipe
from leviathan_ds.scaling import Cluster, predict_step

ROOT = Path(__file__).parents[2]
Kind = Literal["learning_rate", "iso_body", "isoparametric", "ablation"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order in which they run: what is tuned is the others'
_NAME = r"[\w.+]+(-[\w.+]+)*"  # of arms, sizes and variants: run directories are called by them
TOLERANCE = 0.02  # of total parameters, between isoparametric arms
Tuned = Mapping[tuple[str, str], str]  # (arm, size) → the variant of `learning_rate` that was the best one


@dataclass(frozen=True)
class Experiment:
    """One grid of a study."""

    arms: tuple[str, ...]
    sizes: tuple[str, ...]
    seeds: tuple[int, ...] = (1,)
    """Of the initial weights. All runs read the same data in the same order, and the same validation samples."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    """Name → sections of a recipe that differ."""
    match_arm: str = "dense_untied"
    """isoparametric: layers are added until the total is this arm's of the same size."""
    tokens: int | None = None
    """Of each of its runs; None: the study's."""


def run_name(kind: Kind, arm: str, size: str, variant: str, seed: int) -> str:
    return f"{kind}/" + "-".join(filter(None, (arm, size, variant, f"s{seed}")))


@dataclass(frozen=True)
class Run:
    """One training run of a study."""

    kind: Kind
    arm: str
    size: str
    variant: str
    seed: int
    recipe: Recipe
    missing: str | None = None
    """Why it cannot start yet: its learning rate waits for the tuning runs."""

    @property
    def name(self) -> str:
        """Its path below the study's folder of runs."""
        return run_name(self.kind, self.arm, self.size, self.variant, self.seed)

    @property
    def tokens(self) -> int:
        training = self.recipe.training
        return training.train_steps * training.global_batch_size * self.recipe.data.sequence_length


@dataclass(frozen=True)
class Study:
    """A study file, checked."""

    name: str
    recipe: Mapping[str, Any]
    """Sections of a recipe that all runs share."""
    sizes: Mapping[str, Mapping[str, Any]]
    arms: Mapping[str, Mapping[str, Any]]
    experiments: Mapping[Kind, Experiment]
    tokens: int | None = None
    """Of each run; None: training.train_steps of its recipe."""
    ds_config: str = "ds_configs/zero1.json"
    world_size: int = 1
    """Ranks of each run."""
    cluster: Cluster = field(default_factory=Cluster)
    """What `predicted_s` assumes."""
    keep_checkpoints: tuple[str, ...] = ("iso_body",)
    """Experiments whose checkpoints stay after they were measured."""
    note: str = ""
    """What it asks, for the page of its results."""

    def runs(self, tuned: Tuned | None = None, pattern: str = "*") -> Iterator[Run]:
        """The runs whose names match, in the order in which they are to be trained."""
        for kind in KINDS:
            if kind not in self.experiments:
                continue
            grid = self.experiments[kind]
            for seed in grid.seeds:
                for size in grid.sizes:
                    for variant in grid.variants:
                        for arm in grid.arms:
                            if fnmatch.fnmatchcase(run_name(kind, arm, size, variant, seed), pattern):
                                yield self._run(kind, grid, arm, size, variant, seed, tuned or {})

    def matching(self, pattern: str, tuned: Tuned | None = None) -> list[Run]:
        """`runs`, of which there must be one. Raises UserError."""
        if not (found := list(self.runs(tuned, pattern))):
            raise UserError(f"no run of {self.name} matches {pattern!r}; `study.py plan` lists them")
        return found

    def _run(
        self, kind: Kind, grid: Experiment, arm: str, size: str, variant: str, seed: int, tuned: Tuned
    ) -> Run:
        found: Mapping[str, Any] = {}
        missing = None
        if kind != "learning_rate" and "learning_rate" in self.experiments:
            best = tuned.get((arm, self._tuned_size(size)))
            if best is None:
                missing = f"no learning rate of {arm} is tuned: not all tries are done, or all diverged"
            else:
                found = self.experiments["learning_rate"].variants[best]
        values = merged(self.recipe, self.sizes[size], self.arms[arm], found, grid.variants[variant])
        values.setdefault("training", {})["min_lr"] = 0.0
        recipe = _recipe(values, f"of {run_name(kind, arm, size, variant, seed)}")
        min_lr = round(recipe.training.lr / 10, 12)  # in all runs alike, whatever a recipe says
        recipe = replace(recipe, training=replace(recipe.training, min_lr=min_lr, seed=seed))
        if recipe.model.vocab_size is None:
            raise UserError("model.vocab_size is open; set it to the tokenizer's, sizes depend on it")
        tokens = grid.tokens or self.tokens
        if tokens is not None:
            steps = -(-tokens // (recipe.training.global_batch_size * recipe.data.sequence_length))
            try:
                recipe = replace(recipe, training=replace(recipe.training, train_steps=steps))
            except UserError as error:
                raise UserError(f"tokens = {tokens:,} make {steps:,} steps: {error}") from None
        if kind == "isoparametric":
            twin = _recipe(merged(self.recipe, self.sizes[size], self.arms[grid.match_arm]), f"of {size}")
            layers = layers_for(recipe.model, count_parameters(twin.model).total)
            recipe = replace(recipe, model=replace(recipe.model, num_layers=layers))
        return Run(kind, arm, size, variant, seed, recipe, missing)

    def _tuned_size(self, size: str) -> str:
        """The size whose tuning serves: its own, else the one nearest to it in the study's order."""
        order, tuned = list(self.sizes), self.experiments["learning_rate"].sizes
        return min(tuned, key=lambda each: abs(order.index(each) - order.index(size)))

    def predicted_s(self, run: Run) -> float:
        """Seconds of a run's steps on the study's cluster, by scaling.predict_step (docs/scaling.md)."""
        step = predict_step(run.recipe, 1, self.world_size, self.cluster)
        return step.total_s * run.recipe.training.train_steps


_RECIPES: dict[str, Recipe] = {}


def _recipe(values: dict[str, Any], origin: str) -> Recipe:
    """Once for equal values: each takes some 25 ms, and a study's runs are expanded again and again."""
    key = json.dumps(values)
    if key not in _RECIPES:
        _RECIPES[key] = recipes.from_values(values, origin)
    return _RECIPES[key]


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings in one, the later ones winning key by key."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                before = result.get(key)
                value = merged(before if isinstance(before, Mapping) else {}, value)
            result[key] = value
    return result


def layers_for(model: ModelConfig, total: int) -> int:
    """Layers with which a model's parameters come nearest to `total`.

    Raises UserError where no number of layers comes within TOLERANCE of it.
    """

    def parameters(layers: int) -> int:
        return count_parameters(replace(model, num_layers=layers)).total

    one = parameters(1)
    layers = max(1, 1 + round((total - one) / (parameters(2) - one)))
    if abs(parameters(layers) / total - 1) > TOLERANCE:
        raise UserError(
            f"no number of layers of width {model.hidden_size} brings {model.embedding} within {TOLERANCE:.0%} of "
            f"{total:,} parameters: {layers} layers have {parameters(layers):,}; change the width or the generator"
        )
    return layers


def load(path: Path) -> Study:
    """Read and check a study file, every run's recipe included. Raises UserError naming the file and the key."""
    expected = "expected keys such as recipe:, sizes:, arms: and experiments:"
    values = _values(path)
    if "base" in values:
        values = _upon_its_base(values, path)
        expected += "; experiments are not taken from a base"
    for key in ("recipe", "sizes", "arms", "experiments"):
        if not isinstance(values.get(key), dict) or not values[key]:
            raise UserError(f"study {path}: {key} is missing or no mapping; {expected}")
    sizes, arms = (_by_name(values.pop(key), path, key) for key in ("sizes", "arms"))
    experiments = {}
    for kind, grid in values.pop("experiments").items():
        if kind not in KINDS:
            raise UserError(f"study {path}: unknown experiment {kind}; known: {', '.join(KINDS)}")
        _known(grid, {each.name for each in fields(Experiment)}, path, f"experiments.{kind}.")
        experiments[kind] = _experiment(kind, grid, sizes, arms, path)
    _sections(values["recipe"], path, "recipe")
    cluster = values.pop("cluster", {})
    _known(cluster, {each.name for each in fields(Cluster)}, path, "cluster.")
    for key, value in cluster.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"study {path}: cluster.{key} must be a number above zero, got {value!r}")
    for key in ("tokens", "world_size"):
        _whole_number(values, key, path)
    for key in ("note", "ds_config"):
        if not isinstance(values.get(key, ""), str):
            raise UserError(f"study {path}: {key} must be text, got {values[key]!r}")
    if "keep_checkpoints" in values:  # of no others: a mistake here would cost checkpoints
        values["keep_checkpoints"] = _several(
            values["keep_checkpoints"], path, "keep_checkpoints", KINDS, may_be_empty=True
        )
    study = Study(
        name=path.stem, sizes=sizes, arms=arms, experiments=experiments, cluster=Cluster(**cluster), **values
    )
    try:
        names = [run.name for run in study.runs()]  # their recipes are checked, too
        _check_tries(study)
    except UserError as error:
        raise UserError(f"study {path}: {error}") from None
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"study {path}: two runs would be called {min(twice)}; rename an arm, a size or a variant")
    return study


def _values(path: Path) -> dict[str, Any]:
    try:
        values = load_yaml(path)
    except OSError as error:
        raise UserError(f"study {path}: {error.strerror}; see studies/ for the ones that ship") from None
    except ValueError as error:
        raise UserError(f"study {path}: {error}") from None
    _known(values, {each.name for each in fields(Study)} - {"name"} | {"base"}, path, "")
    for key in ("sizes", "arms"):
        if isinstance(values.get(key), dict):  # a name with nothing behind it changes nothing
            values[key] = {
                name: recipes.read_recipe_file(_from_here_or_the_project(sections))
                if isinstance(sections, str) and key == "sizes"
                else ({} if sections is None else sections)
                for name, sections in values[key].items()
            }
    return values


def _upon_its_base(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """A study's values over those of the study that it names, whose experiments and note are its own affair."""
    base = values.pop("base")
    if not isinstance(base, str) or not base:
        raise UserError(f"study {path}: base must be the path of a study file, got {base!r}")
    try:
        under = _values(_from_here_or_the_project(base))
        if "base" in under:
            raise UserError(f"{base} has a base itself; name a study without one")
        load(_from_here_or_the_project(base))  # that its own mistakes are not laid at this one's door
    except UserError as error:
        raise UserError(f"study {path}: base: {error}") from None
    return merged({key: value for key, value in under.items() if key not in ("experiments", "note")}, values)


def _check_tries(study: Study) -> None:
    """Whether what a try of the tuning sets suits the other experiments, whose budgets may be smaller.

    Now, and not when all of them are trained. Raises UserError.
    """
    if (tuning := study.experiments.get("learning_rate")) is None:
        return
    for kind, grid in study.experiments.items():
        if untuned := [arm for arm in grid.arms if arm not in tuning.arms]:
            raise UserError(
                f"experiments.{kind} has {untuned[0]}, of which learning_rate has no tries; add it to both"
            )
    for name in tuning.variants:
        best = {(arm, size): name for arm in tuning.arms for size in tuning.sizes}
        for kind, grid in study.experiments.items():
            arm, size, variant, seed = grid.arms[0], grid.sizes[0], next(iter(grid.variants)), grid.seeds[0]
            try:
                next(study.runs(best, run_name(kind, arm, size, variant, seed)))
            except UserError as error:
                raise UserError(f"experiments.learning_rate.variants.{name}: {error}") from None


def _experiment(
    kind: Kind, grid: dict[str, Any], sizes: Mapping[str, Any], arms: Mapping[str, Any], path: Path
) -> Experiment:
    place = f"experiments.{kind}"
    _whole_number(grid, "tokens", path, f"{place}.")
    checked: dict[str, Any] = {
        "arms": _several(grid.get("arms", list(arms)), path, f"{place}.arms", arms),
        "sizes": _several(grid.get("sizes", list(sizes)), path, f"{place}.sizes", sizes),
    }
    if "seeds" in grid:
        checked["seeds"] = _several(grid["seeds"], path, f"{place}.seeds")
        if not all(type(seed) is int and seed >= 0 for seed in checked["seeds"]):
            raise UserError(f"study {path}: {place}.seeds must be whole numbers, got {grid['seeds']!r}")
    if "variants" in grid:
        checked["variants"] = _by_name(grid["variants"], path, f"{place}.variants")
    experiment = Experiment(**(grid | checked))
    if kind == "isoparametric" or "match_arm" in grid:
        _several([experiment.match_arm], path, f"{place}.match_arm", arms)
    if kind == "learning_rate":
        for name, sections in experiment.variants.items():
            which = f"{place}.variants.{name}" if name else f"{place}.variants"
            if "lr" not in sections.get("training", {}):
                raise UserError(f"study {path}: {which} sets no training.lr, the rate to try")
            if others := set(sections) - {"training"}:
                raise UserError(f"study {path}: {which} sets {min(others)}; a try may set keys of training alone")
    return experiment


def _by_name(values: Any, path: Path, key: str) -> dict[str, dict[str, Any]]:
    """Name → sections of a recipe; a name with nothing behind it changes nothing."""
    if not isinstance(values, dict) or not values:
        raise UserError(f"study {path}: {key} must be a mapping of names to sections of a recipe, got {values!r}")
    for name in values:
        if not isinstance(name, str):
            raise UserError(f"study {path}: YAML reads {name!r} in {key} as no string; put the name in quotes")
        if not re.fullmatch(_NAME, name):
            raise UserError(
                f"study {path}: {key} has {name!r}, a part of a folder's name; use letters, digits, any of _ . + -"
            )
    return {name: _sections(sections or {}, path, f"{key}.{name}") for name, sections in values.items()}


def _sections(values: Any, path: Path, key: str) -> dict[str, Any]:
    if not isinstance(values, dict) or not all(isinstance(section, dict) for section in values.values()):
        raise UserError(f"study {path}: {key} must be a mapping of sections of a recipe, got {values!r}")
    return values


def _several(
    values: Any, path: Path, key: str, known: Collection[str] | None = None, may_be_empty: bool = False
) -> tuple[Any, ...]:
    """A list of different values, as a tuple; all of them known ones, where those are given."""
    if not isinstance(values, list) or not (values or may_be_empty):
        expected = "a list" if may_be_empty else "a list with something in it"
        raise UserError(f"study {path}: {key} must be {expected}, got {values!r}")
    for index, value in enumerate(values):
        if known is not None and value not in list(known):
            raise UserError(f"study {path}: {key} names {value!r}, not among {', '.join(map(repr, known))}")
        if value in values[:index]:
            raise UserError(f"study {path}: {key} has {value!r} twice")
    return tuple(values)


def _from_here_or_the_project(name: str) -> Path:
    """A recipe or study file that a study names: relative to this folder, else to the project's."""
    return next((path for path in (Path(name), ROOT / name) if path.is_file()), Path(name))


def _whole_number(values: Mapping[str, Any], key: str, path: Path, prefix: str = "") -> None:
    if key in values and not (isinstance(values[key], int) and values[key] > 0):
        raise UserError(f"study {path}: {prefix}{key} must be a whole number above zero, got {values[key]!r}")


def _known(values: Any, known: set[str], path: Path, prefix: str) -> None:
    if not isinstance(values, dict):
        place = prefix.rstrip(".") or "the file"
        raise UserError(
            f"study {path}: {place} must be a mapping with keys ({', '.join(sorted(known))}), got {values!r}"
        )
    for key in values:
        if key not in known:
            raise UserError(f"study {path}: unknown key {prefix}{key}; known: {', '.join(sorted(known))}")


def tokens_per_s(study: Study, run: Run) -> float:
    """As predicted, over all ranks."""
    return run.tokens / study.predicted_s(run)


def gflops_per_token(run: Run) -> float:
    return flops_per_token(run.recipe.model, run.recipe.data.sequence_length).total / 1e9
