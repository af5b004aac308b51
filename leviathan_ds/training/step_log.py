"""What the steps since the last log left on the device, turned into records in one transfer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel import topology
from leviathan_ds.training.metrics import Metrics

T = TypeVar("T")


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
        self._component_norms: dict[str, Tensor] = {}
        self._lap_start = time.perf_counter()
        self._paused_s = self._waited_s = 0.0
        self._total_s = self._total_waited_s = 0.0
        self._total_steps = 0

    def add(self, loss: Tensor, lr: float, grad_norm: Tensor | float | None) -> None:
        """Note one step: this rank's mean loss as a device scalar, the norm as DeepSpeed keeps it."""
        self._steps.append((loss, lr, grad_norm))

    def add_component_norms(self, norms: dict[Any, Tensor]) -> None:
        """Note the gradient norms by component of the step that is being taken, as device scalars."""
        self._component_norms = {f"grad_norm_{component}": norm for component, norm in norms.items()}

    def waits_for(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; the time until each of them is there counts as waiting for data."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self._waited_s += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in the block is no step's; steps that are queued before it still count."""
        engines.synchronize()
        start = time.perf_counter()
        yield
        engines.synchronize()
        self._paused_s += time.perf_counter() - start

    def flush(self, done: int, skipped_steps: int = 0) -> None:
        """Record every step up to `done`, losses averaged over the data-parallel ranks. Collective.

        Columns of the whole interval (rates, memory, waiting, norms by component) are the last step's alone. The
        mean loss on the console is that of finite losses; a skipped step's need not be one.

        Args:
            skipped_steps: those whose update was left out, since the run's first start.
        """
        values, norms, component_norms, waited_s, memory_bytes = self._fetch()
        engines.synchronize()
        seconds = time.perf_counter() - self._lap_start - self._paused_s
        tokens_per_s = len(values) * self._tokens_per_step / seconds
        first = done - len(values) + 1
        records: list[dict[str, Any]] = [
            {"step": first + i, "loss": value, "lr": lr, "grad_norm": norm}
            for i, (value, (_, lr, _), norm) in enumerate(zip(values, self._steps, norms, strict=True))
        ]
        mfu = self._utilization(tokens_per_s)
        records[-1] |= component_norms | {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s / topology.world_size(),
            **({} if mfu is None else {"mfu": mfu}),
            "memory_gib": memory_bytes / 2**30,
            "data_wait_share": waited_s / seconds,
            "skipped_steps": skipped_steps,
        }
        finite = [value for value in values if math.isfinite(value)]
        summary = {**records[-1], "loss": sum(finite) / len(finite) if finite else math.nan}
        remaining_s = (self._train_steps - done) * self._tokens_per_step / tokens_per_s
        self._metrics.steps(records, summary, remaining_s)
        self._total_s, self._total_steps = self._total_s + seconds, self._total_steps + len(values)
        self._total_waited_s += waited_s
        self._steps.clear()
        self._component_norms = {}
        self._lap_start, self._paused_s, self._waited_s = time.perf_counter(), 0.0, 0.0

    def _fetch(self) -> tuple[list[float], list[float | None], dict[str, float], float, float]:
        """Losses, norms, norms by component, the longest wait and the most memory of any rank: one transfer."""
        device = topology.device()
        losses = torch.stack([loss for loss, _, _ in self._steps])
        dist.all_reduce(losses, group=parallel_state.get_data_parallel_group())
        worst = torch.tensor([self._waited_s, _memory_bytes()], dtype=torch.float64, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        norms = [norm for _, _, norm in self._steps]
        scalars = [*(norm for norm in norms if norm is not None), *self._component_norms.values()]
        doubles = [torch.as_tensor(scalar, dtype=torch.float64, device=device) for scalar in scalars]
        parts = [(losses / topology.data_parallel_size()).double(), worst, *(each.view(1) for each in doubles)]
        fetched = iter(torch.cat(parts).tolist())
        values = [next(fetched) for _ in losses]
        waited_s, memory_bytes = next(fetched), next(fetched)
        fetched_norms = [None if norm is None else next(fetched) for norm in norms]
        return (
            values,
            fetched_norms,
            dict(zip(self._component_norms, fetched, strict=True)),
            waited_s,
            memory_bytes,
        )

    @property
    def mean_tokens_per_s(self) -> float:
        """Over all flushed steps of this process."""
        return self._total_steps * self._tokens_per_step / self._total_s

    @property
    def data_wait_share(self) -> float:
        """Share of the time of all flushed steps of this process that the slowest rank waited for data."""
        return self._total_waited_s / self._total_s


def _memory_bytes() -> int:
    """The most that was allocated on this rank's GPU since the last call; without one, the resident set now."""
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak
