"""Tasks in a pool of worker processes. Only descriptions pass through the pipes: workers read and write files.

The pool is its own, not concurrent.futures': a worker is a fresh interpreter (no fork of a threaded
parent, no second import of the parent's main module with its torch), and when one dies the parent knows
which, how, and what it was working on.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.encode import EncodeOptions, Progress
from data_prep.errors import UserError
from data_prep.sources import Shard

_WAKE_S = 0.5  # how often the display is told that time passes
_MOST_RESIDENT_BYTES = 280 << 20  # beyond this a worker makes way for a new one: some tokenizers' caches only grow


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of its work; the message says which, how and where."""


@dataclass(frozen=True, slots=True)
class EncodeShard:
    """Make part `number`; drop: positions of its documents that are duplicates."""

    number: int
    shard: Shard
    drop: NDArray[np.int64] | None = None

    @property
    def source(self) -> str:
        return self.shard.pieces[0].source.path

    def __str__(self) -> str:
        return f"encoding shard {self.number} ({self.shard})"


@dataclass(frozen=True, slots=True)
class HashSource:
    """Take size and hash of input `number`."""

    number: int
    source: str

    def __str__(self) -> str:
        return f"hashing {self.source}"


@dataclass(frozen=True, slots=True)
class SignShard:
    """Write the signatures of shard `number`, by which its duplicates are found."""

    number: int
    shard: Shard

    @property
    def source(self) -> str:
        return self.shard.pieces[0].source.path

    def __str__(self) -> str:
        return f"signing shard {self.number} ({self.shard})"


Task = EncodeShard | HashSource | SignShard


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker waits for its next task; resident_bytes: the memory that it holds."""

    resident_bytes: int


Message = Progress | Ready | UserError | OSError
"""What a worker says. Progress is that of the task in hand; an error ends the task, and Ready follows."""


class _Worker:
    """One worker process and the parent's end of its pipe."""

    def __init__(self, number: int, options: EncodeOptions) -> None:
        self.number = number
        self.connection, child_end = Pipe()
        package_root = str(Path(__file__).parents[1])
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "data_prep.worker", str(child_end.fileno()), str(os.getpid())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": search_path},
            process_group=0,  # Ctrl-C reaches the parent alone, which then ends the workers
        )
        child_end.close()
        self.task: Task | None = None
        self.source: str | None = None  # of the last task
        self.progress = Progress()
        self.ready = False
        self.most_resident_bytes = 0
        self.send(options)

    def send(self, message: Task | EncodeOptions) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self.death() from error

    def hand_out(self, task: Task) -> None:
        self.task, self.source, self.progress, self.ready = task, task.source, Progress(), False
        self.send(task)

    def receive(self) -> Message:
        """Raises WorkerDied when the pipe is closed."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self.death() from error

    def death(self) -> WorkerDied:
        doing = self.task or "starting"
        try:
            status = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return WorkerDied(f"worker {self.number} closed its pipe while {doing}")
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        hint = "; out of memory? try fewer --workers" if status == -signal.SIGKILL else ""
        return WorkerDied(f"worker {self.number} (process {self.process.pid}) {how} while {doing}{hint}")

    def outgrown(self, resident_bytes: int) -> bool:
        """Whether its memory asks for a fresh process; the first answer sets the scale."""
        self.most_resident_bytes = self.most_resident_bytes or max(_MOST_RESIDENT_BYTES, resident_bytes * 3 // 2)
        return resident_bytes > self.most_resident_bytes

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.wait()


class _Queue:
    """Tasks by source. A worker goes on with its source, since a compressed one is then decompressed once; next
    comes a source that nobody has begun; then it helps where most is left."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._waiting: dict[str, deque[Task]] = {}
        for task in tasks:
            self._waiting.setdefault(task.source, deque()).append(task)
        self._begun: set[str] = set()

    def next(self, source: str | None) -> Task | None:
        if source not in self._waiting:
            source = next((each for each in self._waiting if each not in self._begun), None)
        if source is None:
            source = max(self._waiting, key=lambda each: len(self._waiting[each]), default=None)
        if source is None:
            return None
        self._begun.add(source)
        task = self._waiting[source].popleft()
        if not self._waiting[source]:
            del self._waiting[source]
        return task


def run_tasks(
    tasks: Sequence[Task], options: EncodeOptions, workers: int, report: Callable[[Progress], None]
) -> None:
    """Do all tasks in worker processes; `report` gets the progress of all together, at least twice a second.

    After an error no task is begun, those in hand are finished, and the error of the first of them in the order of
    `tasks` is raised. Raises WorkerDied at once when a worker is gone. Ends the workers in any case.
    """
    queue = _Queue(tasks)
    order = {task: position for position, task in enumerate(map(str, tasks))}
    failures: list[tuple[int, UserError | OSError]] = []
    finished = Progress()
    pool: list[_Worker] = []
    try:
        for number in range(min(workers, len(tasks))):
            pool.append(_Worker(number, options))
        working = set(pool)
        while working:
            for connection in wait([worker.connection for worker in working], timeout=_WAKE_S):
                worker = next(worker for worker in working if worker.connection is connection)
                message = worker.receive()
                if isinstance(message, Progress):
                    worker.progress = message
                elif isinstance(message, Ready):
                    finished += worker.progress
                    worker.progress = Progress()
                    task = None if failures else queue.next(worker.source)
                    if task is None:
                        working.remove(worker)
                    else:
                        if worker.outgrown(message.resident_bytes):
                            worker.close()
                            working.remove(worker)
                            worker = pool[worker.number] = _Worker(worker.number, options)
                            working.add(worker)
                            worker.receive()  # its first Ready
                        worker.hand_out(task)
                elif worker.task is None:  # it cannot begin
                    raise message
                else:
                    failures.append((order[str(worker.task)], message))
            report(sum((worker.progress for worker in working), finished))
    finally:
        for worker in pool:
            worker.close()
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
