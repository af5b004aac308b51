"""A run before it starts: everything that can be refused is refused here, in one process, in seconds.

No process group exists and no model is built until `prepare` has returned, and nothing is written but the index
cache beside the dataset.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.files import partial_path, written_aside
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import Recipe
from leviathan_ds.data.dataset import CheckedData, build_datasets, check_data, num_train_samples
from leviathan_ds.parallel import ds_config, hostfile

# Differences between a run's first recipe and today's that change neither weights (faults.*: after a healthy
# step) nor sample order.
_MAY_DIFFER = (
    "run.",
    "faults.",
    "evaluation.",
    "data.num_workers",
    "data.prefixes",
    "data.validation_prefixes",
    "data.blend",
    "data.index_cache",
    "parallel.",
    "training.micro_batch_size",
    "training.recompute",
    "training.compile",
    "training.loss_chunk_tokens",
)
# These change the weights; they are said at the start and noted in the run's recipe. The learning rate is a
# function of the step alone, so a resume may follow another one from there on.
_MAY_CHANGE = ("training.lr", "training.min_lr")

# What imported weights fix.
_IMPORTED = ("model.", "data.tokenizer_fingerprint")


@dataclass(frozen=True)
class Job:
    """A checked run. `resume_from` is its last complete checkpoint, None at the start.

    `prepare` has looked for that on every rank by itself, to refuse early; `going_on_from` settles it.
    """

    recipe: Recipe
    ds_config: dict[str, Any]
    run_dir: Path
    data: CheckedData
    train_dataset: Any
    validation_datasets: dict[str, Any]  # by domain
    resume_from: Path | None
    layout: dict[str, Any]  # what DeepSpeed's checkpoint files are tied to
    changes: tuple[str, ...] = ()  # keys of the run's recipe that are others from here on, with both values
    passed_over: tuple[str, ...] = ()  # newer checkpoints than resume_from that cannot be used, and why

    @property
    def first_step(self) -> int:
        """The step to go on from, 0 at the start."""
        return 0 if self.resume_from is None else run_directory.read_state(self.resume_from).step

    @property
    def resumes_same_layout(self) -> bool:
        """Whether the last checkpoint was written by this layout; any other is resharded."""
        return self.resume_from is not None and run_directory.read_state(self.resume_from).layout == self.layout

    @property
    def finished(self) -> bool:
        """Whether the last checkpoint is the recipe's last step."""
        return self.first_step >= self.recipe.training.train_steps

    @property
    def num_passes(self) -> int:
        """Micro-batches of a step on each rank."""
        return self.ds_config["gradient_accumulation_steps"]


def check_configuration(recipe: Recipe, ds_config_path: Path, world_size: int) -> dict[str, Any]:
    """Everything that can be refused before there is any data; returns DeepSpeed's configuration, filled.

    Raises UserError.
    """
    from leviathan_ds.parallel import engine

    hostfile.check_hostfile()
    if recipe.training.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise UserError(
            "training.compile needs a C++ compiler, and there is neither $CXX nor g++; install g++ or "
            "leave training.compile off"
        )
    if recipe.evaluation.tasks:
        from leviathan_ds.evaluation import harness

        harness.check_tasks(recipe.evaluation.tasks, recipe.evaluation.include_path)
    filled = ds_config.fill(ds_config.read(ds_config_path), recipe, world_size, ds_config_path)
    engine.check_values(filled, ds_config_path)
    return filled


def prepare(recipe: Recipe, ds_config_path: Path, run_dir: Path, world_size: int) -> Job:
    """Check recipe, DeepSpeed configuration, data and run directory against each other, and open the data.

    Raises UserError, one line that names the file or key and the way out.
    """
    filled = check_configuration(recipe, ds_config_path, world_size)
    samples = num_train_samples(recipe)
    data = check_data(recipe.data)
    recipe = _resolved(recipe, data)
    changes = check_run_dir(run_dir, recipe)
    layout = _layout(recipe, filled, world_size)
    resume_from = next(reversed(run_directory.complete_checkpoints(run_dir)), None)
    _check_suits(resume_from, data, layout)
    train, validation = build_datasets(recipe.data, data, samples)
    return Job(recipe, filled, run_dir, data, train, validation, resume_from, layout, changes)


def _resolved(recipe: Recipe, data: CheckedData) -> Recipe:
    """The recipe with what its data decide: vocabulary size and tokenizer. A resume holds the run to both."""
    fingerprint = data.manifests[0].tokenizer.fingerprint
    recipe = replace(recipe, data=replace(recipe.data, tokenizer_fingerprint=fingerprint))
    return recipe.with_vocabulary(data.vocab_size)


def going_on_from(job: Job, checkpoint: Path | None, passed_over: tuple[str, ...]) -> Job:
    """The job from the checkpoint that all ranks take. Raises UserError, like `prepare`, when it does not suit."""
    _check_suits(checkpoint, job.data, job.layout)
    return replace(job, resume_from=checkpoint, passed_over=passed_over)


def check_run_dir(run_dir: Path, recipe: Recipe) -> tuple[str, ...]:
    """What of a run's recipe changes from here on. Raises UserError where it must not, or this is no run.

    A run that holds nothing but imported weights is bound to their model and tokenizer alone.
    """
    path = run_dir / run_directory.RECIPE
    if not path.is_file():
        # A start that was killed while it looked for shared disks or wrote the recipe leaves no more than this.
        marks = (run_directory.LOCK, run_directory.STOP, run_directory.MET)
        ours = {*marks, partial_path(path).name, partial_path(run_dir / run_directory.MET).name}
        if run_dir.exists() and (
            not run_dir.is_dir()
            or any(f.name not in ours and not f.name.startswith(run_directory.PROBE) for f in run_dir.iterdir())
        ):
            raise UserError(f"{run_dir} exists and is not a run of this trainer; choose another --run_dir")
        above = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            problem = "cannot be written to" if above.is_dir() else "is no directory"
            raise UserError(f"--run_dir {run_dir}: {above} {problem}; choose another")
        return ()
    differing = {
        key: values
        for key, values in recipes.differences(recipes.load(path), recipe).items()
        if not key.startswith(_MAY_DIFFER)
    }
    if _holds_imported_weights(run_dir):
        differing = {key: values for key, values in differing.items() if key.startswith(_IMPORTED)}
    changed = {key: differing.pop(key) for key in _MAY_CHANGE if key in differing}
    if differing:
        told = ", ".join(f"{key} {there!r} there and {here!r} now" for key, (there, here) in differing.items())
        raise UserError(
            f"{run_dir} was started with another recipe: {told}; "
            "take another --run_dir, or the old values to resume"
        )
    return tuple(f"{key} was {there!r} and is {here!r}" for key, (there, here) in changed.items())


def _holds_imported_weights(run_dir: Path) -> bool:
    last = next(reversed(run_directory.complete_checkpoints(run_dir)), None)
    return last is not None and run_directory.read_state(last).weights_only


def _layout(recipe: Recipe, filled: dict[str, Any], world_size: int) -> dict[str, Any]:
    tensor_parallel = recipe.parallel.tensor_model_parallel_size
    return {
        "tensor_model_parallel_size": tensor_parallel,
        "data_parallel_size": world_size // tensor_parallel,
        "zero_stage": ds_config.zero_stage(filled),
        "sub_group_size": ds_config.zero3_sub_group_size(filled),
        "offload_optimizer": ds_config.offloads_optimizer(filled),
        "scattered_by": ds_config.scattered_by(filled),
        "precision": recipe.training.precision,
    }


def _check_suits(checkpoint: Path | None, data: CheckedData, layout: dict[str, Any]) -> None:
    if checkpoint is not None:
        _check_same_data(checkpoint, data)
        _check_layout(checkpoint, layout)


def _check_layout(checkpoint: Path, current: dict[str, Any]) -> None:
    """Refuse a change of layout that resharding cannot bridge. Raises UserError."""
    written = run_directory.read_state(checkpoint).layout
    differing = [
        f"{key} {written.get(key)} (now {here})" for key, here in current.items() if written.get(key) != here
    ]
    scattered_by = written.get("scattered_by") or current["scattered_by"]
    if differing and scattered_by:
        raise UserError(
            f"{checkpoint} was written with {', '.join(differing)}, and under zero_optimization.{scattered_by} "
            "DeepSpeed does not tell where a parameter's state lies; resume on the same layout, or take another "
            "--run_dir"
        )


def _check_same_data(checkpoint: Path, data: CheckedData) -> None:
    written = run_directory.read_state(checkpoint)
    if not written.weights_only and written.data_fingerprints != data.fingerprints:
        raise UserError(
            f"{checkpoint} was trained on other data: the content of {', '.join(map(str, data.prefixes))}, that "
            "of the validation, or the weights of data.blend have changed since; take another --run_dir, or the "
            "old datasets to resume"
        )


def write_run_dir(job: Job) -> None:
    """Create the run directory's description: recipe, DeepSpeed's configuration, tokenizer. Rank 0 only."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    # First: its presence makes the directory a run, and a start that is killed from here on can go on.
    recipe = job.run_dir / run_directory.RECIPE
    before = recipe.read_text().splitlines() if recipe.is_file() else []
    notes = [line for line in before if line.startswith("#")]
    notes += [f"# {change} from step {job.first_step}" for change in job.changes]
    run_directory.write_text(recipe, "".join(note + "\n" for note in notes) + recipes.to_yaml(job.recipe))
    run_directory.write_text(job.run_dir / run_directory.DS_CONFIG, json.dumps(job.ds_config, indent=2) + "\n")
    # Without a checkpoint the data may still be others than at the first start, and so may their tokenizer.
    if job.resume_from is None or run_directory.tokenizer_of(job.run_dir) is None:
        for name in run_directory.TOKENIZERS.values():
            (job.run_dir / name).unlink(missing_ok=True)
        with written_aside(job.run_dir / run_directory.TOKENIZERS[job.data.tokenizer_kind]) as file:
            file.write(job.data.tokenizer_path.read_bytes())
