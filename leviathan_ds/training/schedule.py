"""The learning rate as a pure function of the step: no state to save, nothing to go wrong at a resume."""

from __future__ import annotations

import math

from leviathan_ds.config import TrainingConfig


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Learning rate of optimizer step `step` (0 is the first).

    Linear from lr/warmup_steps to lr over the first warmup_steps steps, then a cosine that reaches min_lr at
    the last step.
    """
    if step < training.warmup_steps:
        return training.lr * (step + 1) / training.warmup_steps
    decay_steps = training.train_steps - training.warmup_steps
    progress = min(1.0, (step + 1 - training.warmup_steps) / max(1, decay_steps))
    return training.min_lr + 0.5 * (training.lr - training.min_lr) * (1 + math.cos(math.pi * progress))
