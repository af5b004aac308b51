"""The watchdog of a rank and the supervisor of a job, on processes that stand for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from data_prep.errors import UserError
from leviathan_ds.parallel import watchdog as watchdogs
from leviathan_ds.parallel.launch import (
    EXIT_DIVERGED,
    EXIT_HUNG,
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    EXIT_NOT_MET,
    EXIT_STOPPED,
)
from leviathan_ds.parallel.supervision import Supervisor, run_dir_of

ROOT = Path(__file__).parent.parent
LIMIT_S = 60  # for what takes seconds
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # that a supervisor takes


def python(code: str) -> subprocess.Popen:
    prelude = "import sys, time, os, signal, ctypes\nfrom leviathan_ds.parallel.watchdog import Watchdog\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code],
        cwd=ROOT,
        env={**os.environ, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_rank_that_hangs_says_where_and_ends():
    hung = python(
        "def wait_for_a_dead_peer():\n"
        "    signal.pause()\n"
        "with Watchdog(1.0) as watchdog:\n"
        "    watchdog.beat(7)\n"
        "    wait_for_a_dead_peer()\n"
    )
    _, error = hung.communicate(timeout=LIMIT_S)
    assert hung.returncode == EXIT_HUNG
    assert error.startswith("rank 3 on ") and " after step 7 hangs: no step was finished in " in error
    assert "run.distributed_timeout_minutes" in error.splitlines()[0]
    assert "wait_for_a_dead_peer" in error


def test_a_rank_that_holds_the_interpreters_lock_ends_too():
    """ctypes.PyDLL keeps the lock during the call: no other Python thread gets a turn."""
    hung = python("with Watchdog(0.5):\n    ctypes.PyDLL(None).sleep(300)\n")
    _, error = hung.communicate(timeout=LIMIT_S)
    assert hung.returncode == 1
    assert "Timeout" in error and 'File "<string>"' in error


def test_steps_and_long_phases_do_not_trip_it():
    fine = python(
        "with Watchdog(2.0) as watchdog:\n"
        "    for step in range(4):\n"
        "        time.sleep(1.0)\n"
        "        watchdog.beat(step)\n"
        "    with watchdog.paused():\n"
        "        time.sleep(3.5)\n"
        "    time.sleep(1.0)\n"
    )
    _, error = fine.communicate(timeout=LIMIT_S)
    assert (fine.returncode, error) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_is_heard_while_no_python_runs(number):
    """pthread_join of a blocked C call keeps the main thread out of the interpreter; the thread still hears."""
    asked = python(
        "import threading\n"
        "with Watchdog(600) as watchdog:\n"
        "    def tell():\n"
        "        while watchdog.stop_signal is None: time.sleep(0.01)\n"
        "        os.write(1, watchdog.stop_signal.encode())\n"
        "        os._exit(0)\n"
        "    threading.Thread(target=tell).start()\n"
        "    print('ready', flush=True)\n"
        "    ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))\n"
    )
    assert asked.stdout is not None
    assert asked.stdout.readline() == "ready\n"
    asked.send_signal(number)
    assert asked.communicate(timeout=LIMIT_S)[0] == number.name


def test_when_a_neighbour_is_dead_a_blocked_rank_ends_at_the_launchers_signal(tmp_path):
    """Without waiting the 30 s that DeepSpeed's launcher gives each rank."""
    launcher = python(
        "import subprocess\n"
        "alive = subprocess.Popen(['sleep', '600'])\n"
        "blocked = subprocess.Popen([sys.executable, '-c', 'import signal, time\\n"
        "from leviathan_ds.parallel.watchdog import Watchdog\\n"
        "with Watchdog(600):\\n    print(1, flush=True)\\n    while True: time.sleep(600)'], stdout=-1)\n"
        "blocked.stdout.readline()\n"
        "blocked.terminate()\n"
        "time.sleep(3)\n"
        "print(blocked.poll(), flush=True)\n"  # both there: a preemption, which ends nothing by itself
        "alive.kill(); alive.wait()\n"
        "print(blocked.wait(), flush=True)\n",
    )
    output, error = launcher.communicate(timeout=LIMIT_S)
    assert output.split() == ["None", str(128 + signal.SIGTERM)], error
    assert "ends with its node's other ranks" in error


@pytest.mark.parametrize("is_rank", [True, False])
def test_only_ranks_are_neighbours(is_rank):
    """What else a shell has started may end at any time; a request to stop then still saves."""
    variable = "{**os.environ}" if is_rank else "{}"
    launcher = python(
        "import subprocess\n"
        f"other = subprocess.Popen(['sleep', '600'], env={variable})\n"
        "asked = subprocess.Popen([sys.executable, '-c', 'import time\\n"
        "from leviathan_ds.parallel.watchdog import Watchdog\\n"
        "with Watchdog(600) as watchdog:\\n    print(1, flush=True)\\n    time.sleep(600)'], stdout=-1)\n"
        "asked.stdout.readline()\n"
        "asked.terminate()\n"
        "other.kill(); other.wait()\n"
        "time.sleep(3)\n"
        "print(asked.poll(), flush=True)\n"
        "asked.kill()\n",
    )
    output, error = launcher.communicate(timeout=LIMIT_S)
    assert output.split() == [str(128 + signal.SIGTERM) if is_rank else "None"], error


def test_neighbours_that_vanish_or_belong_to_others(monkeypatch):
    """Between the list of children and the look at one it may end; another user's shows nothing of itself."""

    class Child:
        pid = 0

        def __init__(self, error: psutil.Error | None) -> None:
            self.error = error

        def environ(self) -> dict[str, str]:
            if self.error is not None:
                raise self.error
            return {"LOCAL_RANK": "1"}

        def is_running(self) -> bool:
            return True

        def status(self) -> str:
            if self.error is not None:
                raise self.error
            return psutil.STATUS_SLEEPING

    gone, hidden, sound = Child(psutil.NoSuchProcess(1)), Child(psutil.AccessDenied(1)), Child(None)
    monkeypatch.setattr(psutil.Process, "children", lambda self: [gone, hidden, sound])
    for name, value in {"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert watchdogs._neighbours() == [sound]
    assert [watchdogs._is_dead(child) for child in (gone, hidden, sound)] == [True, False, False]  # pyright: ignore
    monkeypatch.setenv("LOCAL_SIZE", "1")
    assert watchdogs._neighbours() == []


def test_a_stop_file_is_a_request_to_stop(tmp_path):
    asked = python(
        f"stop = {str(tmp_path / 'stop')!r}\n"
        "import pathlib\n"
        "with Watchdog(600, pathlib.Path(stop)) as watchdog:\n"
        "    time.sleep(3)\n"
        "    print(watchdog.stop_signal)\n"
        "    open(stop, 'w').close()\n"
        "    while watchdog.stop_signal is None: time.sleep(0.1)\n"
        "    print(watchdog.stop_signal == stop)\n"
    )
    assert asked.communicate(timeout=LIMIT_S)[0].split() == ["None", "True"]


SAVING = (
    "import pathlib, threading, torch\n"
    "from leviathan_ds.training import checkpoint_writer as writer\n"
    "with Watchdog(2.0) as watchdog, watchdog.paused():\n"
)


@pytest.mark.parametrize("saver", ["thread", "main"])
def test_a_save_on_a_dead_disk_ends_the_rank_with_the_files_name(tmp_path, saver):
    """To open a pipe without a reader blocks as a dead file system does. The loop waits in `paused`."""
    os.mkfifo(tmp_path / "state.pt")
    save = f"writer.write_pickle(pathlib.Path({str(tmp_path / 'state.pt')!r}), torch.ones(3))"
    how = f"threading.Thread(target=lambda: {save}).start(); time.sleep(600)" if saver == "thread" else save
    hung = python(SAVING + f"    {how}\n")
    _, error = hung.communicate(timeout=LIMIT_S)
    assert hung.returncode == EXIT_HUNG, error
    assert f"hangs: nothing moved at {tmp_path / 'state.pt'} in 0.0333333 minutes" in error


def test_a_slow_save_is_left_alone(tmp_path):
    """Six seconds in one file at a time limit of two, by writes that come half a second apart; then a sync of
    blocks, each of which takes 1.5 s."""
    fine = python(
        SAVING + f"    path = pathlib.Path({str(tmp_path / 'state.pt')!r})\n"
        "    def slowly(path):\n"
        "        with path.open('wb', buffering=0) as file:\n"
        "            for _ in range(12): file.write(b'x' * 100); time.sleep(0.5)\n"
        "    writer.does_disk_work(slowly)(path)\n"
        "    blocks = []\n"
        "    writer._SYNC_BYTES = 300\n"
        "    writer._sync_range = lambda descriptor, start, size: blocks.append(start) or time.sleep(1.5)\n"
        "    writer.disk_work(path).__enter__()\n"
        "    writer._sync(path)\n"
        "    print(blocks)\n"
    )
    output, error = fine.communicate(timeout=LIMIT_S)
    assert (fine.returncode, error, output) == (0, "", "[0, 300, 600, 900]\n")


# ---- the supervisor ----

JOB = """
import os, pathlib, subprocess, sys, time
run_dir = pathlib.Path(sys.argv[sys.argv.index('--run_dir') + 1])
attempts = run_dir.parent / 'attempts'
with attempts.open('a') as file: file.write('x')
attempt = len(attempts.read_text())
def meet():
    run_dir.mkdir(exist_ok=True)
    (run_dir / 'met').write_text(str(attempt))
"""


def supervise(tmp_path: Path, code: str, auto_restart: int = 2, timeout_s: float = 600) -> tuple[int, int]:
    """Exit code and number of attempts of a Python script as the job; signal handlers as before."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    command = [sys.executable, "-c", JOB + code, "--run_dir", str(tmp_path / "run")]
    result = Supervisor(command, tmp_path / "run", auto_restart, timeout_s, delay_s=0.0).run()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return result, len((tmp_path / "attempts").read_text())


def test_a_fault_is_restarted_until_the_job_is_done(tmp_path, capfd):
    assert supervise(tmp_path, "meet(); sys.exit(0 if attempt == 3 else 247)") == (0, 3)
    assert capfd.readouterr().err.splitlines() == [
        "supervise: the job ended with code 247; restart 1 of 2 in 0 s",
        "supervise: the job ended with code 247; restart 2 of 2 in 0 s",
    ]


def test_restarts_run_out(tmp_path, capfd):
    assert supervise(tmp_path, "meet(); os.kill(os.getpid(), 9)") == (128 + 9, 3)
    assert "no restart: all 2 restarts are used" in capfd.readouterr().err


@pytest.mark.parametrize("code", [EXIT_MISTAKE, EXIT_DIVERGED, EXIT_STOPPED])
def test_what_a_restart_would_not_mend_is_not_restarted(tmp_path, code):
    assert supervise(tmp_path, f"sys.exit({code})") == (code, 1)


def test_a_node_that_stays_away_at_the_rendezvous_is_a_fault(tmp_path, capfd):
    """The real `meet` and the real end of a rank: rank 1 comes at the second attempt only."""
    code = (
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "os.environ |= {'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0'}\n"
        "import datetime\n"
        "from leviathan_ds.parallel import launch, rendezvous\n"
        "if attempt == 1:\n"
        "    try:\n"
        "        rendezvous.meet(launch.LaunchEnvironment.read(), datetime.timedelta(seconds=2))\n"
        "    except launch.StartFailure as error:\n"
        "        launch.exit_with(error)\n"
    )
    assert supervise(tmp_path, code) == (0, 2)
    error = capfd.readouterr().err
    assert "1 of 2 ranks have come; missing: ranks 1." in error
    assert f"the job ended with code {EXIT_NOT_MET}; restart 1 of 2" in error


def test_ranks_that_never_meet_are_killed_whole_and_restarted(tmp_path, capfd):
    """The launcher and a grandchild that ignores SIGTERM; the second attempt meets."""
    code = (
        "if attempt == 2: meet(); sys.exit(0)\n"
        "stubborn = 'import os, signal, time; signal.signal(15, signal.SIG_IGN); "
        'open(os.environ["PIDFILE"], "w").write(str(os.getpid())); time.sleep(600)\'\n'
        "subprocess.run([sys.executable, '-c', stubborn], env={**os.environ, 'PIDFILE': str(run_dir) + '.pid'})\n"
    )
    assert supervise(tmp_path, code, timeout_s=5.0) == (0, 2)
    assert "the ranks have not met in 0.0833333 minutes" in capfd.readouterr().err
    assert not psutil.pid_exists(int((tmp_path / "run.pid").read_text()))


def test_a_launcher_that_dies_and_leaves_ranks_is_a_fault(tmp_path, capfd):
    """DeepSpeed's runner ends with 0 when its child was killed by a signal."""
    code = (
        "meet()\n"
        "if attempt == 1:\n"
        "    rank = ['sleep', '600']\n"
        "    subprocess.Popen(rank, env={**os.environ, 'LOCAL_RANK': '0'}, stdout=subprocess.DEVNULL)\n"
    )
    assert supervise(tmp_path, code) == (0, 2)
    assert "the launcher is gone and left its ranks behind" in capfd.readouterr().err


def supervised(tmp_path: Path, code: str) -> subprocess.Popen:
    """The command, over a job that prints "up"."""
    script = [sys.executable, str(ROOT / "launchers" / "supervise.py"), "--auto_restart", "5", "--"]
    job = subprocess.Popen(
        [*script, sys.executable, "-c", JOB + code, "--run_dir", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    return job


def test_a_request_to_stop_reaches_the_run_and_ends_the_restarts(tmp_path):
    """By RUN/stop, so that ranks below sshd or on other hosts hear of it: this one is in a session of its own.

    Slurm sends SIGUSR1 to everyone: the launcher ignores it. A job that is starting removes the file.
    """
    rank = (
        "import pathlib, sys, time; stop = pathlib.Path(sys.argv[1]); print(1, flush=True)\n"
        "for time_of_it in 'starting', 'training':\n"
        "    while not stop.exists(): time.sleep(0.01)\n"
        "    stop.unlink()\n"
        "sys.exit(75)\n"
    )
    code = (
        f"rank = [sys.executable, '-c', {rank!r}, str(run_dir / 'stop')]\n"
        "rank = subprocess.Popen(rank, stdout=subprocess.PIPE, start_new_session=True)\n"
        "rank.stdout.readline()\n"
        "meet()\n"
        "time.sleep(1.5)\n"
        "print('up', flush=True)\n"
        "sys.exit(rank.wait())\n"
    )
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        job = supervised(tmp_path, code)
        for child in psutil.Process(job.pid).children():
            child.send_signal(signal.SIGUSR1)
        job.send_signal(number)
        _, error = job.communicate(timeout=LIMIT_S)
        assert job.returncode == EXIT_STOPPED, error
        assert "no restart: asked to stop" in error
        assert not (tmp_path / "run" / "stop").exists()


def test_a_request_before_all_have_met_ends_the_job_at_once(tmp_path):
    job = supervised(tmp_path, "print('up', flush=True); time.sleep(600)")
    job.terminate()
    _, error = job.communicate(timeout=LIMIT_S)
    assert job.returncode == EXIT_STOPPED
    assert error == "supervise: asked to stop before all ranks had met; no restart: asked to stop\n"


def test_a_second_interrupt_does_not_wait_for_the_run(tmp_path):
    job = supervised(tmp_path, "meet(); time.sleep(1.5); print('up', flush=True); time.sleep(600)")
    job.send_signal(signal.SIGINT)
    assert job.stderr is not None
    assert "a Ctrl-C ends it at once" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=LIMIT_S)
    assert job.returncode == EXIT_INTERRUPTED
    assert not (tmp_path / "run" / "stop").exists()


def test_a_command_that_does_not_exist_is_not_restarted(tmp_path):
    job = Supervisor([str(tmp_path / "deepspeeed")], tmp_path, 3, 600, delay_s=0.0)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    assert job.run() == 127
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_run_directory_is_read_from_the_command():
    assert run_dir_of(["deepspeed", "x.py", "--run_dir", "runs/a"]) == Path("runs/a")
    assert run_dir_of(["deepspeed", "x.py", "--run_dir=runs/a"]) == Path("runs/a")
    with pytest.raises(UserError, match="no --run_dir"):
        run_dir_of(["deepspeed", "x.py"])
