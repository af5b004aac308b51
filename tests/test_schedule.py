"""The learning rate against its closed form."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from leviathan_ds.config import TrainingConfig
from leviathan_ds.training.schedule import learning_rate


def schedule(**values: float) -> tuple[TrainingConfig, list[float]]:
    training = TrainingConfig(**values)  # pyright: ignore[reportArgumentType]
    return training, [learning_rate(step, training) for step in range(training.train_steps)]


def test_ends() -> None:
    _, rates = schedule(train_steps=100, warmup_steps=10, lr=0.5, min_lr=0.125)
    assert rates[0] == 0.05
    assert rates[9] == 0.5
    assert rates[99] == 0.125
    assert rates[54] == pytest.approx((0.5 + 0.125) / 2, rel=1e-12)  # the middle of the 90 steps of the cosine


def test_warm_up_is_linear_and_the_cosine_follows_its_formula() -> None:
    training, rates = schedule(train_steps=50, warmup_steps=7, lr=3e-3, min_lr=1e-4)
    for step, rate in enumerate(rates):
        if step < 7:
            expected = 3e-3 * (step + 1) / 7
        else:
            expected = 1e-4 + (3e-3 - 1e-4) * math.cos(math.pi / 2 * (step - 6) / 43) ** 2
        assert rate == pytest.approx(expected, rel=1e-12)
    assert learning_rate(10**6, training) == 1e-4  # beyond the end


def test_continuous_and_falling_after_the_warm_up() -> None:
    _, rates = schedule(train_steps=1000, warmup_steps=100, lr=1.0, min_lr=0.0)
    after = rates[99:]
    drops = [before - rate for before, rate in pairwise(after)]
    assert all(0 < drop <= math.pi / 2 / 900 for drop in drops)  # the cosine's steepest slope
    assert max(abs(a - b) for a, b in pairwise(rates)) <= 0.01 + 1e-12


def test_no_warm_up_and_nothing_but_warm_up() -> None:
    _, rates = schedule(train_steps=4, warmup_steps=0, lr=1.0, min_lr=0.0)
    assert rates == pytest.approx([0.8535533906, 0.5, 0.1464466094, 0.0], abs=1e-9)  # cos² of π/8, π/4, 3π/8
    _, rates = schedule(train_steps=4, warmup_steps=4, lr=1.0, min_lr=0.1)
    assert rates == [0.25, 0.5, 0.75, 1.0]
    assert schedule(train_steps=1, warmup_steps=0, lr=1.0, min_lr=0.1)[1] == pytest.approx([0.1])


def test_it_is_a_function_of_the_step_alone() -> None:
    training, rates = schedule(train_steps=30, warmup_steps=3)
    assert [learning_rate(step, training) for step in reversed(range(30))] == rates[::-1]
