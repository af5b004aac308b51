"""What the loop records of its steps: losses averaged over the ranks, and time without its interruptions."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
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
        assert logged["summary"]["tokens_per_s_per_gpu"] == rate / 2
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


def test_waiting_for_data_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    topology.initialize(1)
    now = [0.0]
    monkeypatch.setattr(step_log.time, "perf_counter", lambda: now[0])

    def slow_batches():
        for number in range(4):
            now[0] += 3.0
            yield number

    logged = []
    recorder = SimpleNamespace(steps=lambda records, summary, remaining_s: logged.append(summary))
    log = step_log.StepLog(recorder, tokens_per_step=10, train_steps=100)  # pyright: ignore[reportArgumentType]
    batches = log.waits_for(slow_batches())
    for done in (1, 2):
        assert [next(batches), next(batches)] == [2 * done - 2, 2 * done - 1]
        now[0] += 2.0 if done == 1 else 0.0  # the step itself
        with log.paused():
            now[0] += 50.0
        log.add(torch.zeros(()), 0.1, None)
        log.flush(done)
    assert [summary["data_wait_share"] for summary in logged] == [6 / 8, 1.0]
    assert log.data_wait_share == 12 / 14
    with pytest.raises(StopIteration):
        next(batches)


def test_what_describes_an_interval_is_on_its_last_step_alone() -> None:
    topology.initialize(1)
    logged = []
    recorder = SimpleNamespace(steps=lambda records, summary, remaining_s: logged.extend(records))
    log = step_log.StepLog(recorder, tokens_per_step=10, train_steps=100)  # pyright: ignore[reportArgumentType]
    log.add(torch.zeros(()), 0.1, torch.tensor(2.0))
    log.add_component_norms({"body": torch.tensor(1.5)})
    log.add(torch.zeros(()), 0.1, 2.5)
    log.flush(2, skipped_steps=7)
    log.add(torch.zeros(()), 0.1, None)
    log.flush(3)
    first, second, third = logged
    assert first == {"step": 1, "loss": 0.0, "lr": 0.1, "grad_norm": 2.0}
    assert (second["grad_norm"], second["grad_norm_body"], second["skipped_steps"]) == (2.5, 1.5, 7)
    resident = psutil.Process().memory_info().rss / 2**30
    assert second["memory_gib"] == pytest.approx(resident, rel=0.2)
    assert third["grad_norm"] is None and "grad_norm_body" not in third


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


def test_a_loss_that_is_not_finite_is_on_record_and_no_part_of_the_mean() -> None:
    topology.initialize(1)
    logged, summaries = [], []

    def steps(records, summary, remaining_s) -> None:
        logged.extend(records)
        summaries.append(summary["loss"])

    recorder = SimpleNamespace(steps=steps)
    log = step_log.StepLog(recorder, tokens_per_step=10, train_steps=100)  # pyright: ignore[reportArgumentType]
    log.add(torch.tensor(1.0), 0.1, 2.0)
    log.add(torch.tensor(float("nan")), 0.1, float("nan"))
    log.flush(8)
    assert len(logged) == 2
    assert summaries == [1.0]
