"""A thread in every rank that ends it when nothing moves any more, and that hears the requests to stop.

The main thread of a rank that hangs sits in some collective or system call and runs no Python: neither a check
in the loop nor a Python signal handler would. This thread does. Imports nothing heavy.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from leviathan_ds.parallel.launch import EXIT_HUNG, LaunchEnvironment

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_HERE = str(Path(__file__).parents[1])
_POLL_S = 1.0
# Between a report and the end: the launcher kills all ranks at the first exit, and each should have its say.
_OTHERS_REPORT_S = 3.0


class Watchdog:
    """Use as a context manager around the steps, in the main thread; call `beat` after each.

    When `timeout_s` pass without a beat (outside `paused`), the rank prints its number, host, last step and stack
    and exits with EXIT_HUNG. SIGTERM and SIGUSR1 end nothing: they set `stop_signal`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.stop_signal: str | None = None
        """Name of the last request to stop."""
        self._timeout_s = timeout_s
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
        self._neighbours = _living_neighbours()
        self._last_beat = time.monotonic()
        self._thread.start()
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
            if self.stop_signal is not None and _living_neighbours() < self._neighbours:
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
                time.sleep(_OTHERS_REPORT_S)
                os._exit(EXIT_HUNG)

    def _say(self, message: str) -> None:
        rank = LaunchEnvironment.read().rank
        line = f"rank {rank} on {socket.gethostname()} after step {self._step} {message}\n"
        os.write(sys.stderr.fileno(), line.encode())  # in one piece: other ranks write too


def ignore_stop_signals() -> None:
    """For the helper processes of a rank: a request to stop goes to the whole process tree, but is the rank's."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _living_neighbours() -> int:
    """Ranks that the same launcher started and that live, this one among them."""
    try:
        launcher = psutil.Process().parent()
        children = [] if launcher is None else launcher.children()
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
    except psutil.Error:
        return 0


def _main_frame():
    return sys._current_frames()[threading.main_thread().ident]  # pyright: ignore[reportArgumentType]


def _place() -> str:
    """Where the main thread is: the innermost line of this project, and of anything."""
    frames = traceback.extract_stack(_main_frame())
    ours = [frame for frame in frames if frame.filename.startswith(_HERE)]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in (*ours[-1:], frames[-1])]
    return " → ".join(dict.fromkeys(places))
