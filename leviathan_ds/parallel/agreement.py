"""Values that ranks tell each other, and what rank 0 does for all, its failures included, so that none is parted.

All functions are collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from data_prep.errors import UserError, one_line
from leviathan_ds.parallel import topology

T = TypeVar("T")


def on_rank_0(action: Callable[[], T], failed: str) -> T:
    """What an action returns on rank 0, where alone it is done.

    Raises UserError on all ranks alike, `failed: REASON`, when the disk refuses it.
    """
    answer: list[Any] = [None, None]
    if topology.rank() == 0:
        try:
            answer = [action(), None]
        except OSError as error:
            answer = [None, f"{failed}: {one_line(error)}"]
    result, failure = of_rank_0(answer)
    if failure is not None:
        raise UserError(failure)
    return result


def of_rank_0(value: T) -> T:
    """Rank 0's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def of_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in rank order, on all ranks."""
    values: list[Any] = [None] * topology.world_size()
    dist.all_gather_object(values, value, group=group)
    return values
