"""What the ranks of a worker pool run for test_reshard.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from distributed_cases import GLOBAL_BATCH, Case, batches, build
from torch import Tensor

from leviathan_ds import run_directory
from leviathan_ds.parallel import topology

SAVED_AT = 2


# ZeRO-3 for models larger than the tests': parameters partitioned for good, stepped in many groups.
SMALL_GROUPS = {"stage3_param_persistence_threshold": 0, "sub_group_size": 2000}


def _engine(case: Case, small_groups: bool) -> tuple[Any, Any]:
    return build(case, zero_optimization=SMALL_GROUPS if small_groups else None)


def _train(engine: Any, case: Case, steps: range) -> list[float]:
    """Global mean losses of the steps, each with a learning rate of its own."""
    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.training.step import train_step

    losses = []
    for step in steps:
        micro, lr = batches(case)[step], 1e-2 / (step + 1)
        loss = train_step(engine, iter(micro), len(micro), lr, torch.device("cpu"))
        assert all(group["lr"] == lr * group["lr_scale"] for group in engines.parameter_groups(engine))
        torch.distributed.all_reduce(loss, group=topology.parallel_state.get_data_parallel_group())
        losses.append(loss.item() / topology.data_parallel_size())
    return losses


def _shards(engine: Any) -> tuple[int, int, dict[str, Tensor]]:
    from leviathan_ds.parallel import engine as engines

    weights = {name: whole.float().clone() for name, whole in engines.named_local_parameters(engine)}
    return topology.data_parallel_rank(), topology.tensor_parallel_rank(), weights


def _save(engine: Any, folder: Path, case: Case, recipe: Any) -> None:
    from leviathan_ds.training import checkpoint

    layout = {"precision": case.precision}
    state = run_directory.TrainerState(SAVED_AT, SAVED_AT * GLOBAL_BATCH, layout, [], None)
    checkpoints = checkpoint.Checkpoints(engine, folder, recipe)
    checkpoints.save(state)
    checkpoints.finish()


def undisturbed_run(case: Case, folder: Path, small_groups: bool = False) -> tuple[list[float], Any]:
    """Train, save after two steps, train on: losses after the save, and this rank's weights at the end."""
    engine, recipe = _engine(case, small_groups)
    _train(engine, case, range(SAVED_AT))
    _save(engine, folder, case, recipe)
    losses = _train(engine, case, range(SAVED_AT, case.steps))
    shards = _shards(engine)
    engine.destroy()
    return losses, shards


def resharded_run(case: Case, saved: Path, small_groups: bool = False) -> tuple[list[float], Any]:
    """The same steps after the save in a new engine of another layout."""
    from leviathan_ds.training import checkpoint

    engine, _ = _engine(case, small_groups)
    checkpoint.load(engine, saved, same_layout=False)
    assert engine.global_steps == SAVED_AT
    losses = _train(engine, case, range(SAVED_AT, case.steps))
    shards = _shards(engine)
    engine.destroy()
    return losses, shards


def restored_random_numbers(case: Case, saved: Path) -> tuple[int, float]:
    """This rank, and the first random number after the checkpoint is loaded."""
    from leviathan_ds.training import checkpoint

    engine, _ = _engine(case, False)
    checkpoint.load(engine, saved, same_layout=False)
    engine.destroy()
    return topology.rank(), torch.rand(()).item()


def resaved(case: Case, saved: Path, folder: Path) -> None:
    """Take a checkpoint over and save it at once in this layout."""
    from leviathan_ds.training import checkpoint

    engine, recipe = _engine(case, False)
    checkpoint.load(engine, saved, same_layout=False)
    _save(engine, folder, case, recipe)
    engine.destroy()


def loaded_by_deepspeed(case: Case, universal: Path) -> dict[str, dict[str, Tensor]]:
    """What DeepSpeed's own loader makes of its universal format, at ZeRO 1 on one data-parallel rank."""
    engine, _ = _engine(case, False)
    rank, size = topology.tensor_parallel_rank(), topology.tensor_parallel_size()
    states = {}
    for name, parameter in engine.module.named_parameters():
        parameter.load_hp_checkpoint_state(str(universal / "zero" / name), rank, size)
        mapping = parameter._hp_mapping
        whole = {"fp32": mapping.hp_fragment, **mapping.optim_fragment}
        states[name] = {key: value.detach().clone().view(parameter.shape) for key, value in whole.items()}
    engine.destroy()
    return states
