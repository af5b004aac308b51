"""The hostfile and the hosts of a `deepspeed` command, read from the processes above a rank."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leviathan_ds.parallel import hostfile

CHECK = "from leviathan_ds.parallel.hostfile import check_hostfile; check_hostfile(); print('went on')"
TELL = """
from leviathan_ds.parallel import hostfile
found = hostfile.find_launcher()
print((str(found.hostfile), found.selects, found.environment["MARK"]), hostfile.started_slots())
"""
WORLD = base64.urlsafe_b64encode(json.dumps({"a": [0, 1], "b": [0]}).encode()).decode()


def under_launcher(
    folder: Path, name: str, *arguments: str, code: str = CHECK
) -> subprocess.CompletedProcess[str]:
    """Run Python code as the grandchild of a script with this name and these arguments."""
    launcher = folder / name
    launcher.write_text(
        "import subprocess, sys\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {code!r}], cwd='/', check=False).returncode)\n"
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


@pytest.mark.parametrize(
    ("arguments", "selects"),
    [
        (["--hostfile", "hosts", "train.py", "--include", "a"], False),
        (["--hostfile", "hosts", "--include", "a:0", "train.py"], True),
        (["--hostfile=hosts", "--exclude=b", "train.py"], True),
        (["-H", "hosts", "-i", "a", "train.py"], True),
        (["-Hhosts", "--num_n", "1", "train.py"], True),
    ],
)
def test_options_of_the_launcher_are_seen(
    tmp_path: Path, arguments: list[str], selects: bool, monkeypatch
) -> None:
    monkeypatch.setenv("MARK", "of the shell")
    result = under_launcher(tmp_path, "deepspeed", *arguments, code=TELL)
    assert result.stdout == f"('{tmp_path}/hosts', {selects}, 'of the shell') None\n", result.stderr


def test_under_pdsh_the_command_is_found_beside_the_rank(tmp_path: Path, monkeypatch) -> None:
    """deepspeed → pdsh here, and a rank that sshd has started: no ancestor, another environment."""
    monkeypatch.setenv("MARK", "of the shell")
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    sleep, world = "import time; print('up', flush=True); time.sleep(600)", f"--world_info={WORLD}"
    pdsh = [str(tmp_path / "pdsh"), "-c", sleep, world]
    (tmp_path / "pdsh").symlink_to(sys.executable)
    runner = tmp_path / "deepspeed"
    runner.write_text(f"import subprocess; subprocess.run({pdsh!r})\n")
    neighbour = subprocess.Popen(
        [sys.executable, str(runner), "--hostfile", "hosts", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "up\n"
        monkeypatch.setenv("MARK", "of sshd")
        result = under_launcher(tmp_path, "launch", world, "train.py", code=TELL)
        assert result.stdout == f"('{tmp_path}/hosts', False, 'of the shell') {{'a': 2, 'b': 1}}\n", result.stderr
    finally:
        os.killpg(neighbour.pid, 9)
        neighbour.wait()


def test_without_a_launcher_nothing_is_known() -> None:
    assert hostfile.started_slots() is None


def test_slots_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    path = tmp_path / "hosts"
    path.write_text("# a comment\n\nworker-1 slots=8\n  10.0.0.2\tslots=4 max_slots=8\n")
    assert hostfile.read_slots(path) == dict(fetch_hostfile(str(path))) == {"worker-1": 8, "10.0.0.2": 4}
