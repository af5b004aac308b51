"""The pools of ranks that tests share: asleep between calls, closed when out of step, gone with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from workers import WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1)
    yield pool
    pool.close()


def state(pid: int) -> str | None:
    """T: stopped; None: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def wait_for(pid: int, wanted: str | None) -> None:
    deadline = time.monotonic() + 30
    while (found := state(pid)) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_ranks_sleep_between_calls(pool: WorkerPool) -> None:
    (pid,) = pool.run(os.getpid)
    wait_for(pid, "T")
    assert pool.run(os.getpid) == [pid]


def test_a_pool_whose_rank_died_is_closed(pool: WorkerPool) -> None:
    with pytest.raises(EOFError):
        pool.run(os._exit, 3)
    assert pool.closed


PARENT = """
import os, sys
from workers import WorkerPool
if __name__ == "__main__":
    print(*WorkerPool(1).run(os.getpid), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_no_rank_outlives_its_parent(how: str, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(tmp_path / "parent.py"), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    wait_for(int(done.stdout), None)
