"""A checkpoint of one layout into an engine of another: other ranks, ZeRO stage or offloading.

Every rank takes from the whole state (`whole_state.py`) what it holds itself. Nothing is converted on the disk:
nobody waits for a converter, and a kill leaves nothing behind. DeepSpeed's own way is a conversion first, and its
loader cannot read the result at ZeRO-3 with tensor parallelism (it slices only for DeepSpeed's own AutoTP).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from data_prep.errors import UserError
from leviathan_ds import run_directory
from leviathan_ds.parallel import registry, topology
from leviathan_ds.training.whole_state import STATE_KEYS, StateKey, WholeState, open_state


@dataclass(frozen=True)
class _Run:
    """The part of a parameter whose optimizer state this rank holds.

    Elements [start, start + numel) of the flattened shard lie from `offset` on in `partition`, a float32 tensor
    that the optimizer steps.
    """

    name: str
    shape: list[int]  # of the tensor-parallel shard
    partition: Tensor
    offset: int
    start: int
    numel: int


def load(engine: DeepSpeedEngine, checkpoint: Path) -> None:
    """Fill a new engine of any layout from a checkpoint of any other. Collective.

    Raises UserError when the checkpoint has no optimizer states to take over or is of another model.
    """
    state = open_state(checkpoint)
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.checkpoint_event_prologue()  # pyright: ignore
    runs = list(_runs(engine))
    unknown = {run.name for run in runs} - set(state.names)
    if unknown:
        raise UserError(f"{checkpoint} lacks {', '.join(sorted(unknown))}, which the recipe's model has")
    optimizer: torch.optim.Optimizer = engine.basic_optimizer  # pyright: ignore
    for partition in _partitions(engine):
        optimizer.state[partition] = {
            "step": _step_count(optimizer, partition, state.adam_steps),
            "exp_avg": torch.zeros_like(partition),
            "exp_avg_sq": torch.zeros_like(partition),
        }
    for run in runs:
        for key in STATE_KEYS:
            target = run.partition if key == "fp32" else optimizer.state[run.partition][key]
            shard = _shard(state, run, key, checkpoint).flatten()
            target.detach().view(-1)[run.offset : run.offset + run.numel] = shard[
                run.start : run.start + run.numel
            ]
    _refresh_weights(engine)
    trainer = run_directory.read_state(checkpoint)
    engine.global_steps, engine.global_samples = trainer.step, trainer.consumed_samples


def _step_count(optimizer: torch.optim.Optimizer, partition: Tensor, steps: int) -> Tensor | int:
    """torch counts in a tensor, for its fused kernel on the device; DeepSpeed's own optimizers in an int."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return steps
    return torch.tensor(float(steps), device=partition.device if optimizer.defaults["fused"] else "cpu")


def _partitions(engine: DeepSpeedEngine) -> list[Tensor]:
    """The float32 tensors that this rank's optimizer steps."""
    optimizer = cast(Any, engine.optimizer)
    if engine.zero_optimization_stage() == 3:  # which puts them into the groups for the time of a step
        return optimizer.fp32_partitioned_groups_flat
    return [partition for group in optimizer.param_groups for partition in group["params"]]


def _shard(state: WholeState, run: _Run, key: StateKey, checkpoint: Path) -> Tensor:
    """This tensor-parallel rank's part of a parameter's state."""
    rule, size = registry.rule_for(run.name), topology.tensor_parallel_size()
    shape = rule.full_shape(run.shape, size)
    full = rule.padded(state.tensor(run.name, key), shape)
    if list(full.shape) != shape:
        raise UserError(f"{checkpoint}: {run.name} is {list(full.shape)}, the recipe's model wants {shape}")
    return rule.shard(full, topology.tensor_parallel_rank(), size)


def _runs(engine: DeepSpeedEngine) -> Iterator[_Run]:
    """What this rank holds of every parameter, at any ZeRO stage."""
    module, optimizer = cast(nn.Module, engine.module), cast(Any, engine.optimizer)
    if engine.zero_optimization_stage() == 0:
        for name, parameter in module.named_parameters():
            yield _Run(name, list(parameter.shape), parameter, 0, 0, parameter.numel())
        return
    if engine.zero_optimization_stage() < 3:
        for name, parameter in module.named_parameters():
            mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
            if mapping is not None:  # some elements are this rank's
                (partition,) = optimizer.param_groups[mapping.param_group_index]["params"]
                held, own = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield _Run(name, list(parameter.shape), partition, held.start, own.start, own.numel)
        return
    names = {parameter: name for name, parameter in module.named_parameters()}
    for partition, group in zip(_partitions(engine), optimizer.fp16_groups, strict=True):
        offset = 0
        for parameter in group:
            per_rank = parameter.partition_numel()
            start = topology.data_parallel_rank() * per_rank
            numel = min(per_rank, max(0, parameter.ds_numel - start))  # the last ranks' are padded
            yield _Run(names[parameter], list(parameter.ds_shape), partition, offset, start, numel)
            offset += per_rank


def _refresh_weights(engine: DeepSpeedEngine) -> None:
    """Compute with the float32 weights that were filled in, as after an optimizer step. Collective."""
    optimizer, stage = cast(Any, engine.optimizer), engine.zero_optimization_stage()
    if stage in (1, 2):
        optimizer.update_lp_params()
    if stage < 3:
        return
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:  # small ones, kept whole on every rank
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
    optimizer.checkpoint_event_epilogue()
