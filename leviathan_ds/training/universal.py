"""A checkpoint without a layout: DeepSpeed's universal format, one file for each full tensor.

RUN/checkpoints/step_00000100/zero/PARAMETER/     fp32.pt  exp_avg.pt  exp_avg_sq.pt  step.pt

Training resumes from it on any layout (`reshard.py`), like from any other checkpoint; other tools read it too.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import constants as ds
from torch import Tensor

from data_prep.errors import UserError
from data_prep.files import check_named, partial_path
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.model.weights import full_weights, shard_file
from leviathan_ds.parallel import registry
from leviathan_ds.training import checkpoint_writer as writer
from leviathan_ds.training.whole_state import STATE_KEYS, UNIVERSAL, open_state

# What a run keeps beside its checkpoints, where it is there. Not its wandb id: the new run is another one, and two
# would write to one.
_DESCRIPTION = (
    run_directory.RECIPE,
    run_directory.DS_CONFIG,
    *run_directory.TOKENIZERS.values(),
    run_directory.STARTS,
    run_directory.METRICS,
    run_directory.FAULTS,
    run_directory.SUMMARY,
)


def convert(path: Path, output: Path) -> Path:
    """Write a new run directory that holds one checkpoint in the universal format; returns the checkpoint.

    Needs one process, no process group, and memory for the weights. Written aside and renamed. All checksums of
    the checkpoint are compared first: what is written gets checksums of its own.

    Args:
        path: a run (its last checkpoint) or one of its checkpoints.
        output: the run directory to write.

    Raises UserError when there is no good checkpoint or the output is there already.
    """
    check_named(output, "--output")
    if output.exists():
        raise UserError(f"--output {output} exists; choose another run directory")
    source = run_directory.find_checkpoint(path, run_directory.damage)
    state = run_directory.read_state(source)
    if state.layout.get("scattered_by"):
        raise UserError(
            f"{source} cannot be converted: under zero_optimization.{state.layout['scattered_by']} DeepSpeed does "
            "not tell where a parameter's state lies"
        )
    aside = partial_path(output)
    shutil.rmtree(aside, ignore_errors=True)  # of a conversion that was killed
    try:
        _write_run(source, state, aside)
        aside.rename(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return output / run_directory.CHECKPOINTS / source.name


def _write_run(source: Path, state: run_directory.TrainerState, run: Path) -> None:
    final = run / run_directory.CHECKPOINTS / source.name
    folder = writer.temporary_folder(final)
    folder.mkdir(parents=True)
    _write_states(source, folder / UNIVERSAL)
    weights = {name: weight.contiguous() for name, weight in full_weights(source)}
    written = {shard_file(0): writer.write_weights(folder / shard_file(0), weights)}
    for file in (source / run_directory.RECIPE, *source.glob("random_states_rank*.pt")):
        shutil.copyfile(file, folder / file.name)
    moved = dataclasses.replace(state, layout={"precision": state.layout["precision"]}, wandb_id=None)
    writer.commit(final, written, {run_directory.TRAINER_STATE: moved.to_json()})
    for name in _DESCRIPTION:
        if (run_directory.run_of(source) / name).is_file():
            shutil.copyfile(run_directory.run_of(source) / name, run / name)


def _write_states(source: Path, folder: Path) -> None:
    state = open_state(source)
    vocabulary = recipes.load(source / run_directory.RECIPE).model.vocabulary
    for name in state.names:
        (folder / name).mkdir(parents=True)
        torch.save(torch.tensor(float(state.adam_steps)), folder / name / "step.pt")
        for key in STATE_KEYS:
            torch.save(_record(name, state.tensor(name, key), vocabulary), folder / name / f"{key}.pt")


def _record(name: str, full: Tensor, vocabulary: int) -> dict[str, Any]:
    """A full tensor with what DeepSpeed's loader must know to cut it."""
    rule = registry.rule_for(name)
    record: dict[str, Any] = {}
    if rule.shard_dim is not None:
        record[ds.CAT_DIM] = rule.shard_dim
    if rule.num_stacked > 1:
        record[ds.PARAM_N_SUB_PARAMS] = rule.num_stacked
    if rule.is_vocabulary:
        record[ds.VOCAB_TENSOR] = True
        full = full[:vocabulary]
    return {**record, ds.PARAM: full.clone()}  # a part of a larger tensor would be written with all of it
