"""Batches from datasets: stacked, with the distinct ids found on the CPU, prefetched by loader processes.

b micro-batch, s sequence length, m distinct ids, bounds = documents in the batch + 1.
"""

from __future__ import annotations

import atexit
import multiprocessing
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader

from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.parallel.watchdog import ignore_stop_signals


@dataclass(frozen=True)
class Batch:
    """One forward pass of one rank."""

    tokens: Int[Tensor, "b s"]
    labels: Int[Tensor, "b s"]
    loss_mask: Float[Tensor, "b s"]
    distinct_ids: Int[Tensor, " m"]
    inverse: Int[Tensor, "b s"]
    cu_seqlens: Int[Tensor, " bounds"] | None = None
    """Where documents begin in the flattened tokens, and their end; int32. None: attention over whole samples."""

    def _map(self, function: Any) -> Batch:
        tensors = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return Batch(**{name: function(tensor) for name, tensor in tensors.items()})

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._map(torch.Tensor.pin_memory)


def collate(samples: list[dict[str, Any]]) -> Batch:
    """Stack GPTDataset's samples, find the batch's distinct ids and where their positions begin anew."""
    tokens, labels, mask = (
        torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels", "loss_mask")
    )
    distinct_ids, inverse = torch.unique(tokens, return_inverse=True)
    return Batch(tokens, labels, mask, distinct_ids, inverse, _cu_seqlens(samples))


def _cu_seqlens(samples: list[dict[str, Any]]) -> Tensor | None:
    """Of data.reset_attention_mask: the positions of GPTDataset's samples begin anew after an end-of-document."""
    if "position_ids" not in samples[0]:
        return None
    positions = torch.cat([sample["position_ids"] for sample in samples])
    starts = (positions == 0).nonzero().flatten()
    if len(starts) == len(samples):  # each sample is one document, or attention is not restricted to documents
        return None
    return torch.cat([starts, torch.tensor([len(positions)])]).int()


def loader(dataset: Any, sampler: GlobalBatchSampler | list[list[int]], num_workers: int) -> DataLoader:
    """A loader of `Batch`es in the sampler's order."""
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if num_workers else None,
        worker_init_fn=_shield_worker,
    )


def _shield_worker(_: int) -> None:
    """The launcher and Slurm send a request to stop to every process of a rank; only the rank is to act on it."""
    ignore_stop_signals()


@atexit.register
def _end_workers() -> None:
    """What multiprocessing sends to the workers of a rank that fails is such a signal, and then it waits."""
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()
