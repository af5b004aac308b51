"""What rank 0 sees or does for all ranks, so that a disk that fails or lags on one of them parts nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from data_prep.errors import UserError
from leviathan_ds.parallel import topology
from leviathan_ds.training.checkpoint_writer import reason

T = TypeVar("T")


def on_rank_0(action: Callable[[], T], failed: str) -> T:
    """What an action returns on rank 0, where alone it is done. Collective.

    Raises UserError on all ranks alike, `failed: REASON`, when the disk refuses it.
    """
    answer: list[Any] = [None, None]
    if topology.rank() == 0:
        try:
            answer = [action(), None]
        except OSError as error:
            answer = [None, f"{failed}: {reason(error)}"]
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise UserError(answer[1])
    return answer[0]


def of_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in rank order, on all ranks. Collective."""
    values: list[Any] = [None] * topology.world_size()
    dist.all_gather_object(values, value, group=group)
    return values
