"""Threads in every rank that end it when nothing moves any more, and that hear the requests to stop.

The main thread of a rank that hangs sits in some collective or system call and runs no Python: neither a check
in the loop nor a Python signal handler would. These threads do. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

import psutil

from leviathan_ds.parallel.launch import EXIT_HUNG, LaunchEnvironment

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_HERE = str(Path(__file__).parents[1])
_POLL_S = 1.0
_STOP_FILE_POLL_S = 2.0
# Between a report and the end: the launcher kills all ranks at the first exit, and each should have its say.
_OTHERS_REPORT_S = 3.0


class Watchdog:
    """Use as a context manager around the steps, in the main thread; call `beat` after each.

    When `timeout_s` pass without a beat (outside `paused`), the rank prints its number, host, last step and stack
    and exits with EXIT_HUNG; so it does, paused or not, when `disk_work` of some thread makes no progress for so
    long. SIGTERM and SIGUSR1 end nothing: they set `stop_signal`, as does the coming of `stop_file`.
    """

    def __init__(self, timeout_s: float, stop_file: Path | None = None) -> None:
        self.stop_signal: str | None = None
        """Name of the last request to stop: of the signal, or the file's."""
        self._timeout_s = timeout_s
        self._stop_file = stop_file
        self._step = "none"
        self._last_beat: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        # The handler in C writes a signal's number here at once, also while the main thread runs no Python.
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        self._neighbours = _neighbours()
        self._last_beat = time.monotonic()
        self._thread.start()
        if self._stop_file is not None:
            # A thread of its own, which nobody waits for: a dead file system would keep it.
            threading.Thread(target=self._look_for, args=(self._stop_file,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._signals.close()
        self._wakeup.close()

    def beat(self, step: int) -> None:
        """A step is finished."""
        self._step = str(step)
        self._last_beat = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What takes as long as it takes: validation, saving. Collectives in it have their own time limit."""
        self._last_beat = None
        yield
        self._last_beat = time.monotonic()

    def _watch(self) -> None:
        while not self._ended.is_set():
            # If this thread gets no turn because the main thread holds the interpreter's lock, C code reports.
            faulthandler.dump_traceback_later(self._timeout_s + 5 * _POLL_S, exit=True)
            if select.select([self._signals], [], [], _POLL_S)[0]:
                for number in self._signals.recv(64):
                    if number in STOP_SIGNALS:
                        self.stop_signal = signal.Signals(number).name
            if self.stop_signal is not None and any(map(_is_dead, self._neighbours)):
                # The launcher tears the job down and would wait 30 s for each rank that does not end.
                self._say(f"ends with its node's other ranks; it was at {_place()}")
                os._exit(128 + signal.SIGTERM)
            last = self._last_beat
            if last is not None and time.monotonic() - last > self._timeout_s:
                stack = "".join(traceback.format_stack(_main_frame()))
                self._say(
                    f"hangs: no step was finished in {self._timeout_s / 60:g} minutes "
                    f"(run.distributed_timeout_minutes); it is at {_place()}\n{stack}"
                )
                self._end_hung()
            for path in _stuck(self._timeout_s):
                self._say(
                    f"hangs: nothing moved at {path} in {self._timeout_s / 60:g} minutes "
                    "(run.distributed_timeout_minutes); is its file system dead?"
                )
                self._end_hung()

    def _end_hung(self) -> NoReturn:
        time.sleep(_OTHERS_REPORT_S)
        os._exit(EXIT_HUNG)

    def _look_for(self, stop_file: Path) -> None:
        while not self._ended.wait(_STOP_FILE_POLL_S):
            with contextlib.suppress(OSError):
                if stop_file.exists():
                    self.stop_signal = str(stop_file)
                    return

    def _say(self, message: str) -> None:
        rank = LaunchEnvironment.read().rank
        line = f"rank {rank} on {socket.gethostname()} after step {self._step} {message}\n"
        os.write(sys.stderr.fileno(), line.encode())  # in one piece: other ranks write too


def ignore_stop_signals() -> None:
    """For the helper processes of a rank: a request to stop goes to the whole process tree, but is the rank's."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# ---- work on disks ----


@dataclass
class _DiskWork:
    path: Path
    since: float
    counts: str = ""  # the kernel's, of what the thread has read and written


_disk_work: dict[int, _DiskWork] = {}  # by the thread's number in the kernel

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@contextmanager
def disk_work(path: Path) -> Iterator[None]:
    """Around work on files in any thread; `path` is what a message names if a watchdog finds it stuck.

    Progress is every byte read or written by the thread, and every beginning and end of such a block in it.
    """
    thread = threading.get_native_id()
    around = _disk_work.get(thread)
    _disk_work[thread] = _DiskWork(path, time.monotonic())
    try:
        yield
    finally:
        if around is None:
            del _disk_work[thread]
        else:
            around.since = time.monotonic()
            _disk_work[thread] = around


def does_disk_work(
    function: Callable[Concatenate[Path, _Parameters], _Result],
) -> Callable[Concatenate[Path, _Parameters], _Result]:
    """Decorate a function whose first argument is the path that it works on."""

    @functools.wraps(function)
    def watched(path: Path, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with disk_work(path):
            return function(path, *args, **kwargs)

    return watched


def _stuck(timeout_s: float) -> list[Path]:
    now = time.monotonic()
    stuck = []
    for thread, work in list(_disk_work.items()):
        counts = _counts(thread)
        if counts != work.counts:
            work.counts, work.since = counts, now
        elif now - work.since > timeout_s:
            stuck.append(work.path)
    return stuck


def _counts(thread: int) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/io").read_text()
    except OSError:  # a kernel without them
        return ""


# ---- ranks ----


def _neighbours() -> list[psutil.Process]:
    """The other ranks that the same launcher started on this machine, as far as this one may know them."""
    if LaunchEnvironment.read().local_world_size == 1:
        return []
    found = []
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process().parent()
        for child in [] if launcher is None else launcher.children():
            with contextlib.suppress(psutil.Error):
                if child.pid != os.getpid() and "LOCAL_RANK" in child.environ():
                    found.append(child)
    return found


def _is_dead(process: psutil.Process) -> bool:
    """Whether it has certainly ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _main_frame():
    return sys._current_frames()[threading.main_thread().ident]  # pyright: ignore[reportArgumentType]


def _place() -> str:
    """Where the main thread is: the innermost line of this project, and of anything."""
    frames = traceback.extract_stack(_main_frame())
    ours = [frame for frame in frames if frame.filename.startswith(_HERE)]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in (*ours[-1:], frames[-1])]
    return " → ".join(dict.fromkeys(places))
