"""Which samples a rank reads: a pure function of the step, so that a resume needs no state but a number.

The samples of one optimizer step are the same set in the same global order on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class GlobalBatchSampler:
    """Micro-batches of sample indices for one data-parallel rank, from `first_step` to the end.

    Step s covers the samples [s·G, (s+1)·G) of a global batch of G; its m-th forward pass takes the m-th run
    of micro_batch_size × data_parallel_size of them, each rank its own micro_batch_size.
    """

    first_step: int
    num_steps: int
    global_batch_size: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.num_steps):
            yield from self.step_indices(step)

    def __len__(self) -> int:
        return (self.num_steps - self.first_step) * self.passes_per_step

    @property
    def passes_per_step(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def step_indices(self, step: int) -> list[list[int]]:
        """This rank's micro-batches of one optimizer step."""
        stride = self.micro_batch_size * self.data_parallel_size
        start = step * self.global_batch_size + self.data_parallel_rank * self.micro_batch_size
        starts = range(start, start + stride * self.passes_per_step, stride)
        return [list(range(first, first + self.micro_batch_size)) for first in starts]
