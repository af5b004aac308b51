"""What the launcher's environment says, the hostfile, locks of killed holders, and how a rank ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.errors import UserError
from leviathan_ds.parallel import launch
from leviathan_ds.parallel.launch import LaunchEnvironment

CHECK = "from leviathan_ds.parallel.launch import check_hostfile; check_hostfile(); print('went on')"
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


# ---- hostfile ----


def under_launcher(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run check_hostfile as the grandchild of a script with this name and these arguments."""
    launcher = folder / name
    launcher.write_text(
        "import subprocess, sys\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {CHECK!r}], cwd='/', check=False).returncode)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, str(launcher), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [["--hostfile", "missing"], ["--hostfile=missing"], ["-H", "missing"], ["-Hmissing"], ["--host", "missing"]],
)
def test_missing_hostfile_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    result = under_launcher(tmp_path, "deepspeed", *arguments, "train.py")
    assert result.returncode != 0
    assert f"--hostfile {tmp_path / 'missing'} does not exist" in result.stderr
    assert "went on" not in result.stdout


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("deepspeed", ["--hostfile", "hosts", "train.py"]),  # relative to the launcher's folder
        ("deepspeed", ["train.py"]),
        ("deepspeed", ["train.py", "-H", "missing"]),  # the script's own option
        ("runner.py", ["--num_gpus", "2", "train.py"]),
        ("other", ["--hostfile", "missing"]),
    ],
)
def test_whatever_is_no_missing_hostfile_goes_on(tmp_path: Path, name: str, arguments: list[str]) -> None:
    (tmp_path / "hosts").write_text("worker-1 slots=8\n")
    result = under_launcher(tmp_path, name, *arguments)
    assert (result.returncode, result.stdout) == (0, "went on\n"), result.stderr


# ---- lock ----

HOLD = """
import sys, time
from pathlib import Path
from leviathan_ds.parallel.launch import locked
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
    with launch.locked(path):  # and again in this process
        pass


# ---- the end of a rank ----


@pytest.mark.parametrize(("local_rank", "waits"), [("0", []), ("1", [launch._SPEAK_UP_AFTER_S])])
def test_a_mistake_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str, waits: list[float]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as exited:
        launch.exit_with(UserError("the reason"))
    assert exited.value.code == 2
    assert capsys.readouterr().err == "error: the reason\n"
    assert slept == waits
