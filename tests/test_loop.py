"""What the loop records of its steps: losses averaged over the ranks, and time without its interruptions."""

from __future__ import annotations

import pytest
from distributed_cases import logged_run

from leviathan_ds.training import loop


def test_losses_are_averaged_over_data_parallel_ranks(two_ranks) -> None:
    for logged in two_ranks.run(logged_run, 0):
        assert [(record["step"], record["loss"]) for record in logged["records"]] == [(7, 1.5), (8, 3.0)]
        assert [record["grad_norm"] for record in logged["records"]] == [3.0, None]
        assert logged["summary"]["loss"] == 2.25
        rate = logged["summary"]["tokens_per_s"]
        assert logged["remaining_s"] == pytest.approx(4 * 100 / rate)


def test_clock_waits_for_the_device_and_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step is only queued: its seconds pass in the synchronisation."""
    now = [0.0]
    queued = [0.0]

    def synchronize() -> None:
        now[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop.engines, "synchronize", synchronize)
    clock = loop._Clock(tokens_per_step=10)
    clock.start()
    queued[0] += 2.0  # two steps of a second
    with clock.paused():
        now[0] += 100.0  # a validation
    queued[0] += 2.0
    assert clock.lap(4) == 10.0
    queued[0] += 1.0
    assert clock.lap(2) == 20.0
    assert clock.mean_tokens_per_s == pytest.approx(12.0)
