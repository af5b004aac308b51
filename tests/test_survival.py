"""Real jobs under the real launcher that are stopped, lose a rank, or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import test_end_to_end
import torch
from test_end_to_end import ROOT, command, finish, last_weights, losses, start

from leviathan_ds import run_directory
from leviathan_ds.parallel.launch import EXIT_STOPPED

recipe = test_end_to_end.recipe  # the fixture
STEPS = 40
# Loader processes, which the launcher signals too; no validation in between.
OPTIONS = (
    f"--training.train_steps={STEPS}",
    "--run.save_interval=10",
    "--run.log_interval=1",
    "--run.eval_interval=1000",
    "--data.num_workers=1",
)


def supervised(arguments: list[str]) -> list[str]:
    launcher = [sys.executable, str(ROOT / "launchers" / "supervise.py")]
    return [*launcher, "--auto_restart", "2", "--restart_delay_s", "2", "--", *arguments]


def wait_until(process: subprocess.Popen, came: Callable[[], bool], limit_s: float = 200) -> None:
    deadline = time.monotonic() + limit_s
    while not came():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_process(process: subprocess.Popen, rank: int) -> psutil.Process:
    """Of the ranks below a launcher; the first found is above its loader process."""
    for each in psutil.Process(process.pid).children(recursive=True):
        if each.environ().get("RANK") == str(rank):
            return each
    raise AssertionError(f"no rank {rank}")


def trained(run_dir: Path) -> Callable[[], bool]:
    """Whether the first checkpoint and a step after it are there."""
    return lambda: (run_dir / "checkpoints" / "step_00000010").exists() and len(losses(run_dir)) > 12


def check_equal(run_dir: Path, undisturbed: Path) -> None:
    assert losses(run_dir) == losses(undisturbed)
    expected = last_weights(undisturbed)
    for name, weight in last_weights(run_dir).items():
        assert torch.equal(weight, expected[name]), name


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    finish(start(command(recipe, run_dir, *OPTIONS, ranks=2)))
    return run_dir


@pytest.mark.slow
def test_a_stopped_run_saves_and_goes_on(recipe, undisturbed, tmp_path):
    """SIGTERM to DeepSpeed's launch.py, which hands it to every process of every rank; then to the supervisor."""
    run_dir = tmp_path / "stopped"
    arguments = command(recipe, run_dir, *OPTIONS, ranks=2)
    job = start(arguments)
    wait_until(job, trained(run_dir))
    rank_process(job, 0).parent().terminate()  # pyright: ignore[reportOptionalMemberAccess]
    output = job.communicate(timeout=200)[0]
    assert "ranks got SIGTERM, SIGUSR1 or RUN/stop; saved, the same command goes on" in output, output
    assert "DataLoader worker" not in output, output
    first = run_directory.read_state(run_directory.complete_checkpoints(run_dir)[-1]).step
    assert first < STEPS and first % 10, "a step of its own, not the last regular one"

    job = start(supervised(arguments))
    wait_until(job, lambda: len(losses(run_dir)) > first + 2)
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=200)[0]
    assert job.returncode == EXIT_STOPPED, output
    assert f"resuming at step {first}" in output
    assert "no restart: asked to stop" in output
    finish(start(supervised(arguments)))
    check_equal(run_dir, undisturbed)


@pytest.mark.slow
def test_a_run_that_loses_a_rank_is_restarted_and_ends_as_if_undisturbed(recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "dead"
    job = start(supervised(command(recipe, run_dir, *OPTIONS, ranks=2)))
    wait_until(job, trained(run_dir))
    rank_process(job, 1).kill()
    output = finish(job)
    assert "restart 1 of 2" in output and "restart 2 of 2" not in output
    assert "resuming at step" in output
    check_equal(run_dir, undisturbed)


@pytest.mark.slow
def test_a_run_with_a_hung_rank_ends_with_the_place_and_is_restarted(recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "hung"
    limit = "--run.distributed_timeout_minutes=0.25"
    job = start(supervised(command(recipe, run_dir, *OPTIONS, limit, ranks=2)))
    wait_until(job, trained(run_dir))
    os.kill(rank_process(job, 1).pid, signal.SIGSTOP)
    output = finish(job)
    assert "rank 0 on " in output and "hangs: no step was finished in 0.25 minutes" in output, output
    assert "all_reduce" in output or "all_gather" in output, "the place"
    assert "restart 1 of 2" in output
    check_equal(run_dir, undisturbed)
