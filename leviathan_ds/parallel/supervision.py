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
    126: "the command cannot be run",
    127: "there is no such command",
}

# Without SIGUSR1, of which the launchers below would die when Slurm sends it to everyone. The ranks take it.
_DEAF = ("sh", "-c", 'trap "" USR1; exec "$@"', "sh")

_POLL_S = 0.5
# DeepSpeed's pdsh runner ends the ranks of other hosts after SIGTERM, which takes it this long at the most.
_TERMINATION_S = 60.0


@dataclass
class Supervisor:
    """Runs a command until it ends well, or for a reason that a restart would meet again, or too often.

    Attributes:
        command: of the whole job, as `deepspeed …`.
        run_dir: of the job, on a disk that this machine sees: the ranks write RUN/met anew as soon as all of them
            have met, and RUN/stop asks them to save and stop.
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
        """Exit code of the last attempt. In the main thread: takes SIGTERM, SIGUSR1 and a first Ctrl-C."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
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
        met_before = _written_ns(self.run_dir / run_directory.MET)
        # By LOCAL_RANK ranks are told from launchers below.
        environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
        process = subprocess.Popen([*_DEAF, *self.command], env=environment, start_new_session=True)
        deadline = time.monotonic() + self.rendezvous_timeout_s
        met = asked = False
        try:
            while process.poll() is None:
                met = met or _written_ns(self.run_dir / run_directory.MET) != met_before
                if self._asked_to_stop and not met:
                    return EXIT_STOPPED, "asked to stop before all ranks had met"
                if self._asked_to_stop:
                    first, asked = not asked, True  # before the file is there: a Ctrl-C may come at any moment
                    # Not by a signal: it would reach no rank of another host, and DeepSpeed's launcher kills a
                    # rank 30 s after one. Again and again, as a job that is starting removes it.
                    (self.run_dir / run_directory.STOP).touch()
                    if first:
                        _say("asked to stop: the job saves after its step; a Ctrl-C ends it at once")
                if not met and time.monotonic() > deadline:
                    minutes = self.rendezvous_timeout_s / 60
                    return 1, f"the ranks have not met in {minutes:g} minutes (--rendezvous_timeout_minutes)"
                time.sleep(_POLL_S)
            code = process.returncode
            if code == 0 and any(_is_rank(each) for each in _session(process.pid)):
                return 1, "the launcher is gone and left its ranks behind"  # DeepSpeed's runner says 0 then
            return (128 - code if code < 0 else code), f"the job ended with code {code}"
        except OSError as error:
            return 1, f"asked to stop, but {error.filename} cannot be written: {error.strerror}"
        finally:
            self._end(process)
            if asked:
                with contextlib.suppress(OSError):
                    (self.run_dir / run_directory.STOP).unlink(missing_ok=True)

    def _ask_to_stop(self, *_: object) -> None:
        """The handler of signals; the loop in `_attempt` does what is to be done."""
        self._asked_to_stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

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
