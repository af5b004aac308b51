"""The whole training state of a checkpoint, one full parameter at a time, whatever layout wrote it.

Float32 weights and AdamW's moments are cut twice: over the tensor-parallel ranks into shards, which the registry
puts together again, and by ZeRO over the data-parallel ranks into runs of the flattened shard, which follow each
other in rank order. Both cuts are undone when a parameter is asked for: the files are mapped into memory, and
only what is used is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from deepspeed.checkpoint import constants as ds
from safetensors import safe_open
from torch import Tensor

from data_prep.errors import UserError
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.model.weights import CheckpointWeights, weight_files
from leviathan_ds.parallel import registry
from leviathan_ds.training.checkpoint_engine import load_plain

StateKey = Literal["fp32", "exp_avg", "exp_avg_sq"]
STATE_KEYS: tuple[StateKey, ...] = ("fp32", "exp_avg", "exp_avg_sq")
UNIVERSAL = "zero"  # the folder of DeepSpeed's universal format


class WholeState(Protocol):
    """Float32 weights and AdamW's moments of every parameter.

    Attributes:
        names: every parameter, as the model names it.
        adam_steps: optimizer steps so far; fewer than the run's where steps were skipped.
    """

    names: list[str]
    adam_steps: int

    def tensor(self, name: str, key: StateKey) -> Tensor:
        """A full parameter's weight or moment, float32, on the CPU; vocabulary rows as the writer padded them."""
        ...


def open_state(checkpoint: Path) -> WholeState:
    """The state of a complete checkpoint: of any ZeRO stage, in DeepSpeed's universal format, or imported.

    Raises UserError naming the checkpoint when its parts do not belong together.
    """
    if run_directory.read_state(checkpoint).weights_only:
        return _ImportedState(checkpoint)
    if (checkpoint / UNIVERSAL).is_dir():
        return _UniversalState(checkpoint)
    return _ShardedState(checkpoint)


class _ImportedState:
    """Weights from elsewhere, with the moments that an optimizer begins with."""

    adam_steps = 0

    def __init__(self, checkpoint: Path) -> None:
        self._weights = CheckpointWeights(checkpoint)
        self.names = list(self._weights.shapes)

    def tensor(self, name: str, key: StateKey) -> Tensor:
        if key != "fp32":
            return torch.zeros(self._weights.shapes[name])
        return self._weights.tensor(name).float()


class _UniversalState:
    """A folder for each parameter, with a file for each full tensor."""

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint / UNIVERSAL
        self.names = sorted(path.name for path in self._folder.iterdir() if path.is_dir())
        self.adam_steps = _same_steps(
            checkpoint, {int(_read(self._folder / name / "step.pt")) for name in self.names}
        )

    def tensor(self, name: str, key: StateKey) -> Tensor:
        return _read(self._folder / name / f"{key}.pt")[ds.PARAM]


class _ShardedState:
    """What the ranks of one layout wrote."""

    def __init__(self, checkpoint: Path) -> None:
        self._shapes = []  # of each tensor-parallel rank: name → shape of the shard
        # (tensor-parallel rank, name) → the runs of its flattened shard, in data-parallel order
        self._runs: dict[tuple[int, str], list[dict[str, Tensor]]] = {}
        steps = set()
        for tp, weights in enumerate(weight_files(checkpoint)):
            with safe_open(weights, framework="pt") as shards:
                self._shapes.append({name: shards.get_slice(name).get_shape() for name in shards.keys()})
            for name, run, step in _runs_of_rank(checkpoint, tp):
                self._runs.setdefault((tp, name), []).append(run)
                steps.add(int(step))
        self.names = list(self._shapes[0])
        self.adam_steps = _same_steps(checkpoint, steps)

    def tensor(self, name: str, key: StateKey) -> Tensor:
        shards = [
            torch.cat([run[key] for run in self._runs[tp, name]]).view(shapes[name])
            for tp, shapes in enumerate(self._shapes)
        ]
        return registry.rule_for(name).unshard(shards)


_Run = tuple[str, dict[str, Tensor], Any]  # a parameter's name, a part of its states, its count of steps


def _runs_of_rank(checkpoint: Path, tensor_parallel_rank: int) -> Iterator[_Run]:
    """The runs of a tensor-parallel rank's parameters, data-parallel rank by rank."""
    mp_rank = f"mp_rank_{tensor_parallel_rank:02d}"
    files = sorted(  # bf16 may stand before the name
        checkpoint.glob(f"*zero_pp_rank_*_{mp_rank}_optim_states.pt"),
        key=lambda path: int(re.findall(r"zero_pp_rank_(\d+)_", path.name)[0]),
    )
    if not files:
        yield from _runs_without_zero(_read(checkpoint / f"{mp_rank}_model_states.pt"), checkpoint)
    stage3 = checkpoint / f"zero_pp_rank_0_{mp_rank}_model_states.pt"
    shapes = _read(stage3)[ds.PARAM_SHAPES] if stage3.is_file() else None
    for rank, file in enumerate(files):
        state = _read(file)[ds.OPTIMIZER_STATE_DICT]
        if shapes is None:
            yield from _runs_below_stage3(state)
        else:
            yield from _runs_of_stage3(state, shapes, rank, len(files))


def _runs_without_zero(state: dict[str, Any], checkpoint: Path) -> Iterator[_Run]:
    """torch's optimizer numbers the parameters through its groups."""
    training = recipes.load(checkpoint / run_directory.RECIPE).training
    groups = registry.group_names(
        [name for name in state["module"] if state["module"][name] is not None],
        training,
    )
    names = [name for group in groups.values() for name in group]
    moments = _in_order(state["optimizer"])
    for name, own in zip(names, moments, strict=True):
        weight = state["module"][name].flatten()
        flat = {key: own[key].flatten() for key in ("exp_avg", "exp_avg_sq")}
        yield name, _cut(weight, flat, 0, weight.numel()), own["step"]


def _runs_below_stage3(state: dict[str, Any]) -> Iterator[_Run]:
    """DeepSpeed says where in the flat partition of each parameter group a rank's runs lie."""
    moments = _in_order(state[ds.BASE_OPTIMIZER_STATE])
    groups = zip(state[ds.SINGLE_PARTITION_OF_FP32_GROUPS], moments, state[ds.PARAM_SLICE_MAPPINGS], strict=True)
    for fp32, own, mapping in groups:
        for name, place in mapping.items():
            yield name, _cut(fp32, own, place.start, place.numel), own["step"]


def _runs_of_stage3(
    state: dict[str, Any], shapes: list[dict[str, torch.Size]], rank: int, size: int
) -> Iterator[_Run]:
    """Every parameter is cut into `size` equal runs, the last of them padded."""
    moments = _in_order(state[ds.OPTIMIZER_STATE_DICT])
    for fp32, own, group in zip(state[ds.FP32_FLAT_GROUPS], moments, shapes, strict=True):
        start = 0
        for name, shape in group.items():
            per_rank = -(-shape.numel() // size)
            yield name, _cut(fp32, own, start, min(per_rank, max(0, shape.numel() - rank * per_rank))), own["step"]
            start += per_rank


def _in_order(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of an optimizer's tensors, in the order of its groups."""
    return [optimizer["state"][index] for index in range(len(optimizer["state"]))]


def _cut(fp32: Tensor, moments: dict[str, Tensor], start: int, numel: int) -> dict[str, Tensor]:
    flat = {"fp32": fp32, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
    return {key: tensor.detach()[start : start + numel] for key, tensor in flat.items()}


def _same_steps(checkpoint: Path, steps: set[int]) -> int:
    if len(steps) != 1:
        raise UserError(
            f"{checkpoint}: its optimizer states are of steps {sorted(steps)}; choose another checkpoint"
        )
    return steps.pop()


def _read(path: Path) -> Any:
    return load_plain(path, mmap=True)
