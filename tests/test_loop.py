"""What the loop records of its steps: losses averaged over the ranks, and time without its interruptions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from distributed_cases import logged_run

from leviathan_ds.parallel import topology
from leviathan_ds.training import step_log


def test_losses_are_averaged_over_data_parallel_ranks(two_ranks) -> None:
    for logged in two_ranks.run(logged_run, 0):
        assert [(record["step"], record["loss"]) for record in logged["records"]] == [(7, 1.5), (8, 3.0)]
        assert [record["grad_norm"] for record in logged["records"]] == [3.0, None]
        assert logged["summary"]["loss"] == 2.25
        rate = logged["summary"]["tokens_per_s"]
        assert logged["remaining_s"] == pytest.approx(4 * 100 / rate)


def test_clock_waits_for_the_device_and_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step is only queued: its seconds pass in the synchronisation."""
    topology.initialize(1)
    now, queued = [0.0], [0.0]

    def synchronize() -> None:
        now[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(step_log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(step_log.engines, "synchronize", synchronize)
    rates = []
    recorder = SimpleNamespace(steps=lambda records, summary, remaining_s: rates.append(summary["tokens_per_s"]))
    log = step_log.StepLog(recorder, tokens_per_step=10, train_steps=100)  # pyright: ignore[reportArgumentType]

    def steps(count: int) -> None:  # a second each
        for _ in range(count):
            log.add(torch.zeros(()), 0.1, None)
            queued[0] += 1.0

    steps(2)
    with log.paused():
        now[0] += 100.0  # a validation
    steps(2)
    log.flush(4)
    with log.paused():
        now[0] += 50.0
    steps(1)
    queued[0] -= 0.5
    log.flush(5)
    assert rates == [10.0, 20.0]
    assert log.mean_tokens_per_s == pytest.approx(50 / 4.5)


def test_mfu_is_logged_where_the_devices_peak_is_known() -> None:
    topology.initialize(1)
    logged = []
    recorder = SimpleNamespace(steps=lambda records, summary, remaining_s: logged.extend(records))
    for utilization in (lambda rate: rate / 1e9, lambda rate: None):
        log = step_log.StepLog(recorder, 10, 100, utilization)  # pyright: ignore[reportArgumentType]
        log.add(torch.zeros(()), 0.1, None)
        log.flush(1)
    assert logged[0]["mfu"] == logged[0]["tokens_per_s"] / 1e9
    assert "mfu" not in logged[1]


def test_a_diverged_step_ends_the_run_and_is_on_record() -> None:
    """Raised before any save: see the order in the loop."""
    topology.initialize(1)
    logged = []
    recorder = SimpleNamespace(steps=lambda records, summary, remaining_s: logged.extend(records))
    log = step_log.StepLog(recorder, tokens_per_step=10, train_steps=100)  # pyright: ignore[reportArgumentType]
    log.add(torch.tensor(1.0), 0.1, 2.0)
    log.add(torch.tensor(float("nan")), 0.1, float("nan"))
    with pytest.raises(FloatingPointError, match="the loss of step 8 is nan"):
        log.flush(8)
    assert len(logged) == 2
