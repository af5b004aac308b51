"""Checkpoints: DeepSpeed's engine state, the weights as plain safetensors, and the trainer's own state.

Written into a folder with a temporary name and committed by one rename, so a kill at any moment leaves the
last complete checkpoint in place and nothing that could be taken for one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from safetensors.torch import save_file

from data_prep.errors import UserError
from data_prep.files import written_aside
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import Recipe
from leviathan_ds.model.weights import shard_file
from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel import topology
from leviathan_ds.run_directory import TrainerState

_TEMPORARY = ".writing_"
_DISCARDED = ".discarded_"


def save(engine: DeepSpeedEngine, run_dir: Path, state: TrainerState, recipe: Recipe, keep: int) -> Path:
    """Write and commit a checkpoint, then drop all but the last `keep`. Collective over all ranks."""
    folder = run_dir / run_directory.CHECKPOINTS
    name = run_directory.checkpoint_name(state.step)
    temporary = folder / (_TEMPORARY + name)
    if topology.rank() == 0:
        _discard_leftovers(folder)
        temporary.mkdir(parents=True)
    topology.barrier()
    engine.save_checkpoint(str(folder), tag=temporary.name, save_latest=False)
    _save_weights(engine, temporary)
    torch.save(_random_states(), temporary / _random_states_file())
    topology.barrier()
    if topology.rank() == 0:
        run_directory.write_text(temporary / run_directory.RECIPE, recipes.to_yaml(recipe))
        _commit(temporary, folder / name, state)
        for old in run_directory.complete_checkpoints(run_dir)[:-keep]:
            discarded = old.with_name(_DISCARDED + old.name)
            old.rename(discarded)
            shutil.rmtree(discarded)
    topology.barrier()
    return folder / name


def load(engine: DeepSpeedEngine, checkpoint: Path) -> None:
    """Restore engine and random states. Collective; the layout must be the one that wrote the checkpoint."""
    path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name, load_lr_scheduler_states=False)
    if path is None:
        raise UserError(f"DeepSpeed could not load {checkpoint}; remove it to go on from the one before")
    _restore_random_states(torch.load(checkpoint / _random_states_file(), weights_only=True))


def _save_weights(engine: DeepSpeedEngine, folder: Path) -> None:
    writes = topology.data_parallel_rank() == 0
    weights = {}
    for name, whole in engines.named_local_parameters(engine):
        if writes:
            weights[name] = whole.to("cpu", copy=True).contiguous()
    if writes:
        save_file(weights, folder / shard_file(topology.tensor_parallel_rank()))


def _commit(temporary: Path, final: Path, state: TrainerState) -> None:
    with written_aside(temporary / run_directory.TRAINER_STATE) as file:
        file.write((json.dumps(dataclasses.asdict(state), indent=2) + "\n").encode())
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    for path in files:  # the rename below must not reach the disk before the content
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in files}
    with written_aside(temporary / run_directory.MANIFEST) as file:
        file.write((json.dumps({"bytes": sizes}, indent=2) + "\n").encode())
    if final.exists():  # an incomplete one of the same step, passed over at the resume
        discarded = final.with_name(_DISCARDED + final.name)
        final.rename(discarded)
        shutil.rmtree(discarded)
    temporary.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _discard_leftovers(folder: Path) -> None:
    for leftover in (*folder.glob(_TEMPORARY + "*"), *folder.glob(_DISCARDED + "*")):
        shutil.rmtree(leftover)


def _random_states_file() -> str:
    return f"random_states_rank{topology.rank():05d}.pt"


def _random_states() -> dict[str, Any]:
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    algorithm, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal), next_gauss))
