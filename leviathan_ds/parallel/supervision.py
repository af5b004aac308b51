"""Start a job again when it ends with a fault. Knows processes and exit codes; imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from data_prep.errors import UserError
from leviathan_ds import run_directory
from leviathan_ds.parallel.launch import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_MISTAKE, EXIT_STOPPED

# The same start would end in the same way, or somebody wanted the end.
NO_RESTART = {
    0: "done",
    EXIT_MISTAKE: "a mistake to mend",
    EXIT_DIVERGED: "too many skipped steps in a row",
    EXIT_INTERRUPTED: "Ctrl-C",
}

_POLL_S = 0.5
# DeepSpeed's pdsh runner ends the ranks of other hosts after SIGTERM, which takes it this long at the most.
_TERMINATION_S = 60.0


@dataclass
class Supervisor:
    """Runs a command until it ends well, or for a reason that a restart would meet again, or too often.

    Attributes:
        command: of the whole job, as `deepspeed …`.
        run_dir: of the job: its recipe is written anew as soon as all ranks have met.
        auto_restart: restarts at the most.
        rendezvous_timeout_s: for a start until then; when a node dies before, the launcher waits for ever.
        restart_stopped: restart also after EXIT_STOPPED, when not this process itself was asked to stop.
        delay_s: before a restart, for ports and devices to come free.
    """

    command: list[str]
    run_dir: Path
    auto_restart: int
    rendezvous_timeout_s: float
    restart_stopped: bool = False
    delay_s: float = 10.0
    _asked_to_stop: bool = False

    def run(self) -> int:
        """Exit code of the last attempt. In the main thread: takes SIGTERM and SIGUSR1 while it runs."""
        restarts = 0
        while True:
            code, reason = self._attempt()
            why_not = NO_RESTART.get(code)
            if self._asked_to_stop or (code == EXIT_STOPPED and not self.restart_stopped):
                why_not = "asked to stop"
            if why_not is None and restarts >= self.auto_restart:
                why_not = f"all {self.auto_restart} restarts are used"
            if why_not is not None:
                if code != 0:
                    _say(f"{reason}; no restart: {why_not}")
                return code
            restarts += 1
            _say(f"{reason}; restart {restarts} of {self.auto_restart} in {self.delay_s:g} s")
            time.sleep(self.delay_s)
            if self._asked_to_stop:
                return code

    def _attempt(self) -> tuple[int, str]:
        """Exit code of one attempt and what is to be said of it; no process of it is left."""
        recipe = self.run_dir / run_directory.RECIPE
        written_before = _written_ns(recipe)
        # Ignored by the launchers below, which would die of it when Slurm sends it to everyone; the ranks take it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        # By LOCAL_RANK ranks are told from launchers below.
        environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
        process = subprocess.Popen(self.command, env=environment, start_new_session=True)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_, process=process: self._ask_to_stop(process))
        deadline = time.monotonic() + self.rendezvous_timeout_s
        met = False
        try:
            while process.poll() is None:
                met = met or _written_ns(recipe) != written_before
                if not met and time.monotonic() > deadline:
                    minutes = self.rendezvous_timeout_s / 60
                    return 1, f"the ranks have not met in {minutes:g} minutes (--rendezvous_timeout_minutes)"
                time.sleep(_POLL_S)
            code = process.returncode
            if code == 0 and any(_is_rank(each) for each in _session(process.pid)):
                return 1, "the launcher is gone and left its ranks behind"  # DeepSpeed's runner says 0 then
            return (128 - code if code < 0 else code), f"the job ended with code {code}"
        finally:
            self._end(process)

    def _ask_to_stop(self, process: subprocess.Popen) -> None:
        """Have the job save and stop: its ranks agree on the step, so that those of this machine suffice.

        Not by way of DeepSpeed's launcher, which kills a rank 30 s after a request, and of itself ends with 1.
        """
        self._asked_to_stop = True
        ranks = [each for each in _session(process.pid) if _is_rank(each)]
        for each in ranks:
            each.send_signal(signal.SIGUSR1)
        if not ranks:  # on other hosts, or not there yet
            process.terminate()
        _say(f"asked to stop: {len(ranks)} ranks of this machine save after their step")

    def _end(self, process: subprocess.Popen) -> None:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATION_S)
        remaining = _session(process.pid)
        for each in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(remaining, timeout=_TERMINATION_S)
        process.poll()


def run_dir_of(command: list[str]) -> Path:
    """The --run_dir on the command line of a job. Raises UserError if there is none."""
    for index, argument in enumerate(command):
        name, equals, value = argument.partition("=")
        if name == "--run_dir" and (equals or index + 1 < len(command)):
            return Path(value if equals else command[index + 1])
    raise UserError("the command has no --run_dir; a restart needs to know which run goes on")


def _written_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _session(session: int) -> list[psutil.Process]:
    """All processes of a session and below them, also those whose parent is dead."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
        except (OSError, psutil.Error):
            continue
    return [each for each in found.values() if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def _is_rank(process: psutil.Process) -> bool:
    """Whether a launcher gave it a rank; a rank's own helpers, which inherit it, have a rank above them."""

    def has_rank(some: psutil.Process | None) -> bool:
        try:
            return some is not None and "LOCAL_RANK" in some.environ()
        except psutil.Error:  # gone, or another user's
            return False

    try:
        return has_rank(process) and not has_rank(process.parent())
    except psutil.Error:
        return False


def _say(message: str) -> None:
    print(f"supervise: {message}", file=sys.stderr, flush=True)
