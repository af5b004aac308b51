"""Counts what a rank communicates: every collective by group, kind and bytes (docs/scaling.md)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leviathan_ds.communication import Group, Kind

_KINDS: dict[str, Kind] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}


class CountCollectives(TorchDispatchMode):
    """Within this context, the bytes of every collective that this rank takes part in, whoever calls it.

    torch.distributed passes every call through the dispatcher, so no reference to a function of it that a library
    took at import escapes. Bytes are those of the whole tensor: what is reduced or sent, gathered, or about to be
    scattered. A group of one rank moves nothing and is not counted. Counts the calls of one thread: on a GPU the
    backward pass has another.

    Raises RuntimeError at a collective that is none of `Kind`, or whose ranks are none of `Group`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[Group, Kind]] = Counter()
        self.calls: Counter[tuple[Group, Kind]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self._count(function.overloadpacket.__name__, args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        ranks = dist.get_process_group_ranks(_group(args))
        if len(ranks) == 1:
            return
        if name not in _KINDS:
            raise RuntimeError(f"c10d.{name} over ranks {ranks} is no collective that docs/scaling.md knows")
        key = (_group_name(ranks), _KINDS[name])
        self.calls[key] += 1
        # Whole tensors before or after: a gathered result and a tensor to scatter are N times their counterpart.
        self.bytes[key] += max(_num_bytes(argument) for argument in args)


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    raise RuntimeError("a collective without a process group")


def _group_name(ranks: list[int]) -> Group:
    if ranks == dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()):  # pyright: ignore[reportArgumentType]
        return "tp"
    if ranks == dist.get_process_group_ranks(parallel_state.get_data_parallel_group()):  # pyright: ignore[reportArgumentType]
        return "dp"
    if len(ranks) == dist.get_world_size():
        return "world"
    raise RuntimeError(f"a collective over ranks {ranks}, no group that docs/scaling.md knows")


def _num_bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_num_bytes, argument)) if isinstance(argument, (list, tuple)) else 0
