"""How long a dataset's documents are."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LengthStatistics:
    """Of the documents' lengths in tokens, end-of-document included.

    histogram: documents by the power of two below their length: "1", "2" (2 and 3), "4" (4 to 7), ..."""

    min: int
    mean: float
    median: float
    max: int
    histogram: dict[str, int]


def length_statistics(lengths: Iterable[NDArray[np.int32]]) -> LengthStatistics:
    """Of blocks of lengths, each at least 1; iterated over twice, one block in memory at a time."""
    least, most, total = np.iinfo(np.int32).max, 0, 0
    by_power = np.zeros(32, np.int64)
    for block in lengths:
        least, most = min(least, int(block.min())), max(most, int(block.max()))
        total += int(block.sum(dtype=np.int64))
        by_power += np.bincount(_powers(block), minlength=32)
    documents = int(by_power.sum())
    # The middle document, or the two around the middle, are sought among the lengths of their power of two.
    middle = [_nth_length(lengths, by_power, rank) for rank in ((documents - 1) // 2, documents // 2)]
    histogram = {str(1 << power): int(count) for power, count in enumerate(by_power) if count}
    return LengthStatistics(least, total / documents, sum(middle) / 2, most, histogram)


def _powers(lengths: NDArray[np.int32]) -> NDArray[np.intp]:
    """[n] floor(log2) of each length."""
    return np.frexp(lengths.astype(np.float64))[1].astype(np.intp) - 1


def _nth_length(lengths: Iterable[NDArray[np.int32]], by_power: NDArray[np.int64], rank: int) -> int:
    """The length at place `rank` (from 0) in ascending order."""
    power = int(np.searchsorted(np.cumsum(by_power), rank, side="right"))
    start = 1 << power
    counts = np.zeros(start, np.int64)
    for block in lengths:
        counts += np.bincount(block[_powers(block) == power] - start, minlength=start)
    return start + int(np.searchsorted(np.cumsum(counts), rank - by_power[:power].sum(), side="right"))
