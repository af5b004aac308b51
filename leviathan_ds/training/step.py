"""One optimizer step: the micro-batches of a global batch through DeepSpeed, nothing read back to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from leviathan_ds.data.loader import Batch
from leviathan_ds.model.embedding import DistinctIds
from leviathan_ds.parallel import engine as engines
from leviathan_ds.training.faults import StepGuard


def mean_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Mean loss over the unmasked tokens of one batch, float32 scalar on the device."""
    distinct = DistinctIds(batch.distinct_ids, batch.inverse)
    # Divided before the head forms its gradient: there the factor acts in float32.
    weights = batch.loss_mask / batch.loss_mask.sum().clamp(min=1)
    return model(batch.tokens, batch.labels, weights, distinct, batch.cu_seqlens)


def train_step(
    engine: DeepSpeedEngine,
    batches: Iterator[Batch],
    num_passes: int,
    lr: float,
    device: torch.device,
    guard: StepGuard | None = None,
    on_gradients: Callable[[], None] | None = None,
) -> Tensor:
    """Run one optimizer step; returns this rank's mean loss as a device scalar.

    A guard may turn the step into one that changes nothing, by the factor that it gives the last loss.
    on_gradients is called when the step's gradient is complete and the optimizer has not used it yet.

    DeepSpeed owns accumulation (it divides by num_passes and steps at the last one): two backward calls
    around one step of ours would lose micro-batches under ZeRO.
    """
    for group in engines.parameter_groups(engine):
        group["lr"] = lr * group["lr_scale"]
    losses: list[Tensor] = []
    for _ in range(num_passes):
        loss = mean_loss(engine, next(batches).to(device))
        losses.append(loss.detach())
        if guard is not None and len(losses) == num_passes:
            loss = loss * guard.vote(torch.stack(losses))
        engine.backward(loss)
        if on_gradients is not None and len(losses) == num_passes:
            on_gradients()
        engines.step(engine)
    return torch.stack(losses).mean()
