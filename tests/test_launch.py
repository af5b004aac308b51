"""What the launcher's environment says, locks of killed holders, and how a rank ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.errors import UserError
from data_prep.files import locked
from launchers import pretrain
from leviathan_ds import run_directory
from leviathan_ds.parallel import launch
from leviathan_ds.parallel.launch import LaunchEnvironment, StartFailure

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, LaunchEnvironment(0, 0, 1, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, LaunchEnvironment(5, 1, 8, 4)),
        (
            {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            LaunchEnvironment(5, 1, 8, 4),
        ),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, LaunchEnvironment(1, 1, 2, 2)),
    ],
    ids=["alone", "deepspeed", "torchrun", "neither"],
)
def test_environment_of_each_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: LaunchEnvironment
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnvironment.read() == expected


# ---- lock ----

HOLD = """
import sys, time
from pathlib import Path
from data_prep.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "build.lock"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(path)]
    holder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    waiting = None
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        os.set_blocking(waiting.stdout.fileno(), False)
        time.sleep(1.0)
        assert waiting.stdout.readline() == ""  # waits its turn
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        deadline = time.monotonic() + 20
        while not (line := waiting.stdout.readline()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert line == "held\n"
    finally:
        holder.kill()
        if waiting is not None:
            waiting.kill()
            waiting.wait()
    with locked(path):  # and again in this process
        pass


# ---- the end of a rank ----


@pytest.mark.parametrize(("local_rank", "waits"), [("0", []), ("1", [launch._SPEAK_UP_AFTER_S])])
@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (StartFailure, 69)])
def test_a_mistake_or_a_failed_start_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local_rank: str,
    waits: list[float],
    kind: type[UserError | StartFailure],
    code: int,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as exited:
        launch.exit_with(kind("the reason"))
    assert exited.value.code == code
    assert capsys.readouterr().err == "error: the reason\n"
    assert slept == waits


def test_a_rank_below_deaf_launchers_hears_sigusr1() -> None:
    """A request during start-up ends it: `supervise` has all launchers ignore the signal, which is inherited."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with pytest.raises(UserError, match="no_such_option"):
            pretrain.main(["--no_such_option"])
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_request_to_stop_is_of_one_start(tmp_path: Path) -> None:
    stop = tmp_path / run_directory.STOP
    stop.touch()
    with pretrain.held(tmp_path):
        assert not stop.exists(), "for a start that is gone"
        stop.touch()
    assert not stop.exists(), "met"
