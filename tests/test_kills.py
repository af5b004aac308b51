"""The night that machines died: a run killed twenty times ends bitwise as if nobody had touched it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_end_to_end import ROOT, command, finish, last_weights, losses, recipe, start

from leviathan_ds import run_directory

__all__ = ["recipe"]  # the fixture

RANKS, STEPS = 4, 60
OPTIONS = (
    "--parallel.tensor_model_parallel_size=2",
    "--parallel.sequence_parallel=true",
    f"--training.train_steps={STEPS}",
    "--run.log_interval=1",
    "--run.save_interval=2",
    "--run.eval_interval=1000",
    "--run.keep_checkpoints=2",
)


def start_ranks(arguments: list[str]) -> list[subprocess.Popen]:
    """The ranks of a job without the launcher around them, which would add seconds to every start."""
    script = arguments[arguments.index(str(ROOT / "launchers" / "pretrain.py")) :]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, *script],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(RANKS)
    ]


def kill_all(processes: list[subprocess.Popen], chance: random.Random) -> None:
    """kill -9, in any order, of everything that the processes have started too."""
    for process in chance.sample(processes, len(processes)):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    for process in processes:
        process.wait()
        with suppress(ProcessLookupError):  # until a launcher's ranks are gone too
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.01)


def wait_for_moment(kind: str, run_dir: Path, processes: list[subprocess.Popen], chance: random.Random) -> None:
    """A random moment: of the start, some steps after it, or of a save."""
    metrics, folder = run_dir / run_directory.METRICS, run_dir / run_directory.CHECKPOINTS
    if kind == "start":
        time.sleep(chance.uniform(0, 15))
        return
    began = metrics.stat().st_mtime_ns if metrics.is_file() else 0
    wanted = chance.randint(1, 6) if kind == "step" else 0
    deadline, seen, last = time.monotonic() + 400, 0, began
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        written = metrics.stat().st_mtime_ns if metrics.is_file() else began
        seen, last = seen + (written != last), written
        if kind == "save" and any(folder.glob(".writing_*")) and seen > 0:
            time.sleep(chance.uniform(0, 0.05))
            return
        if kind == "step" and seen > wanted:
            time.sleep(chance.uniform(0, 0.3))
            return
        time.sleep(0.002)
    assert time.monotonic() < deadline, f"no {kind} came"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_change_nothing(recipe, tmp_path):
    """DP 2 × TP 2, asynchronous saves, fp32: losses and weights, bitwise."""
    chance = random.Random(0)
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "killed"
    finish(start(command(recipe, undisturbed, *OPTIONS, ranks=RANKS)))
    arguments = command(recipe, run_dir, *OPTIONS, ranks=RANKS)
    moments = ["start"] * 3 + ["step"] * 8 + ["save"] * 9
    chance.shuffle(moments)
    during_save, reached = 0, []
    for number, kind in enumerate(moments):
        launched = [start(arguments)] if number % 5 == 0 else start_ranks(arguments)
        try:
            wait_for_moment(kind, run_dir, launched, chance)
        finally:
            kill_all(launched, chance)
        during_save += any((run_dir / run_directory.CHECKPOINTS).glob(".writing_*"))
        complete = run_directory.complete_checkpoints(run_dir)
        reached.append(run_directory.step_of(complete[-1]) if complete else 0)
    print(f"kills: {moments}; last checkpoints: {reached}; {during_save} during a save")
    assert during_save >= 3 and reached[-1] < STEPS and reached == sorted(reached)
    finish(start(arguments))
    assert losses(run_dir) == losses(undisturbed)
    assert list(losses(run_dir)) == list(range(1, STEPS + 1))
    found, expected = last_weights(run_dir), last_weights(undisturbed)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
