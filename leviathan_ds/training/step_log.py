"""What the steps since the last log left on the device, turned into records in one transfer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel import topology
from leviathan_ds.training.metrics import Metrics


class StepLog:
    """Losses and norms per step, and the time that steps take, validation and checkpoints left out.

    Nothing is read back to the host between two flushes: on a GPU the steps stay queued.
    """

    def __init__(
        self,
        metrics: Metrics,
        tokens_per_step: int,
        train_steps: int,
        utilization: Callable[[float], float | None] = lambda tokens_per_s: None,
    ) -> None:
        """utilization: model FLOPs utilisation at a rate, None (not logged) where the device's peak is unknown."""
        self._metrics = metrics
        self._utilization = utilization
        self._tokens_per_step = tokens_per_step
        self._train_steps = train_steps
        self._steps: list[tuple[Tensor, float, Tensor | float | None]] = []
        self._lap_start = time.perf_counter()
        self._paused_s = self._total_s = 0.0
        self._total_steps = 0

    def add(self, loss: Tensor, lr: float, grad_norm: Tensor | float | None) -> None:
        """Note one step: this rank's mean loss as a device scalar, the norm as DeepSpeed keeps it."""
        self._steps.append((loss, lr, grad_norm))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in the block is no step's; steps that are queued before it still count."""
        engines.synchronize()
        start = time.perf_counter()
        yield
        engines.synchronize()
        self._paused_s += time.perf_counter() - start

    def flush(self, done: int) -> None:
        """Record every step up to `done`, losses averaged over the data-parallel ranks. Collective.

        Raises FloatingPointError, on all ranks alike, when a loss is not finite.
        """
        losses = torch.stack([loss for loss, _, _ in self._steps])
        dist.all_reduce(losses, group=parallel_state.get_data_parallel_group())
        values = (losses / topology.data_parallel_size()).tolist()
        engines.synchronize()
        seconds = time.perf_counter() - self._lap_start - self._paused_s
        tokens_per_s = len(values) * self._tokens_per_step / seconds
        first = done - len(values) + 1
        mfu = self._utilization(tokens_per_s)
        records = [
            {
                "step": first + i,
                "loss": value,
                "lr": lr,
                "grad_norm": None if norm is None else float(norm),
                "tokens_per_s": tokens_per_s,
                **({} if mfu is None else {"mfu": mfu}),
            }
            for i, (value, (_, lr, norm)) in enumerate(zip(values, self._steps, strict=True))
        ]
        summary = {**records[-1], "loss": sum(values) / len(values)}
        remaining_s = (self._train_steps - done) * self._tokens_per_step / tokens_per_s
        self._metrics.steps(records, summary, remaining_s)
        self._total_s, self._total_steps = self._total_s + seconds, self._total_steps + len(values)
        self._steps.clear()
        self._lap_start, self._paused_s = time.perf_counter(), 0.0
        for record in records:
            if not math.isfinite(record["loss"]):
                raise FloatingPointError(
                    f"the loss of step {record['step']} is {record['loss']}; earlier checkpoints are healthy: "
                    "lower training.lr or look at the data, and start again"
                )

    @property
    def mean_tokens_per_s(self) -> float:
        """Over all flushed steps of this process."""
        return self._total_steps * self._tokens_per_step / self._total_s
