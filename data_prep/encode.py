"""Source files to token ids in a pool of processes.

The parent reads lines and hands them out in batches; the workers parse and encode them. Answers come
back in the order of the input, so the result does not depend on the number of workers. Memory is
bounded: at most BATCHES_PER_WORKER batches per worker are read but not yet handed on.

The pool is its own, not concurrent.futures': a worker is a fresh interpreter (no fork of a threaded
parent, no second import of the parent's main module with its torch), and when one dies the parent knows
which, how, and what it was working on.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from data_prep.batches import Batch, EncodedBatch, EncodeOptions
from data_prep.errors import UserError
from data_prep.sources import BadLine, LineReader

BATCHES_PER_WORKER = 4
_BATCH_BYTES = 1 << 19
_BATCH_LINES = 4096


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of its work; the message says which, how and where."""


class SourceReader:
    """Iterates over the Batches of several files; counts and hashes the files as they are read.

    `finished` holds the LineReaders of the files read so far, `num_bytes` the bytes read from all.
    """

    def __init__(self, paths: list[Path], skip_damaged: bool) -> None:
        """`skip_damaged`: count damaged compressed data in `num_damaged` instead of raising BadLine."""
        self.finished: list[LineReader] = []
        self.num_damaged = 0
        self._paths = paths
        self._skip_damaged = skip_damaged
        self._current: LineReader | None = None

    @property
    def num_bytes(self) -> int:
        current = self._current.num_bytes if self._current else 0
        return current + sum(reader.num_bytes for reader in self.finished)

    def __iter__(self) -> Iterator[Batch]:
        for path in self._paths:
            self._current = LineReader(path)
            try:
                yield from _batches(self._current)
            except BadLine:
                if not self._skip_damaged:
                    raise
                self.num_damaged += 1
            self.finished.append(self._current)
            self._current = None


def _batches(reader: LineReader) -> Iterator[Batch]:
    lines: list[bytes] = []
    first, size = 1, 0
    try:
        for number, line in reader:
            lines.append(line)
            size += len(line)
            if size >= _BATCH_BYTES or len(lines) >= _BATCH_LINES:
                yield Batch(str(reader.path), first, lines)
                lines, first, size = [], number + 1, 0
    except BadLine:
        if lines:  # the whole lines before the damage
            yield Batch(str(reader.path), first, lines)
        raise
    if lines:
        yield Batch(str(reader.path), first, lines)


class _Worker:
    """One worker process and the parent's end of its pipe."""

    def __init__(self, number: int, options: EncodeOptions) -> None:
        self.number = number
        self.connection, child_end = Pipe()
        package_root = str(Path(__file__).parents[1])
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "data_prep.worker", str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": search_path},
            process_group=0,  # Ctrl-C reaches the parent alone, which then ends the workers
        )
        child_end.close()
        self.position = -1  # of the batch in hand; -1 when idle
        self.task = "starting"
        self.send(options)

    def send(self, message: Batch | EncodeOptions) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self.death() from error

    def hand_out(self, position: int, batch: Batch) -> None:
        last = batch.first_line + len(batch.lines) - 1
        self.position, self.task = position, f"encoding {batch.path} lines {batch.first_line} to {last}"
        self.send(batch)

    def take_back(self) -> tuple[int, EncodedBatch | UserError]:
        """(position, answer). Raises WorkerDied when the pipe is closed."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self.death() from error
        position, self.position = self.position, -1
        return position, answer

    def death(self) -> WorkerDied:
        try:
            status = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return WorkerDied(f"worker {self.number} closed its pipe while {self.task}")
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        hint = "; out of memory? try fewer --workers" if status == -signal.SIGKILL else ""
        return WorkerDied(f"worker {self.number} (process {self.process.pid}) {how} while {self.task}{hint}")

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.wait()


def encode_sources(
    source: SourceReader, options: EncodeOptions, workers: int
) -> Generator[EncodedBatch, None, None]:
    """The encoded batches of `source`, in its order.

    Raises the first BadLine in the order of the input, and WorkerDied at once when a worker is gone.
    Closing the generator ends the workers.
    """
    pool: list[_Worker] = []
    try:
        for number in range(workers):
            pool.append(_Worker(number, options))
        yield from _ordered_answers(_until_damage(source), pool)
    finally:
        for worker in pool:
            worker.close()


def _until_damage(source: SourceReader) -> Iterator[Batch | BadLine]:
    """The batches; damage in the compressed data comes as the last item, in its turn."""
    try:
        yield from source
    except BadLine as error:
        yield error


def _ordered_answers(batches: Iterator[Batch | BadLine], pool: list[_Worker]) -> Iterator[EncodedBatch]:
    by_connection: dict[Connection, _Worker] = {worker.connection: worker for worker in pool}
    done: dict[int, EncodedBatch | UserError] = {}
    num_read = num_yielded = 0
    exhausted = False
    while True:
        for worker in pool:
            # One batch at a time in each pipe: with two, parent and worker could block on each other.
            if worker.position >= 0 or exhausted or num_read - num_yielded >= BATCHES_PER_WORKER * len(pool):
                continue
            batch = next(batches, None)
            if batch is None:
                exhausted = True
            elif isinstance(batch, BadLine):
                done[num_read] = batch
                num_read += 1
            else:
                worker.hand_out(num_read, batch)
                num_read += 1
        while num_yielded in done:
            answer = done.pop(num_yielded)
            if isinstance(answer, UserError):
                raise answer
            num_yielded += 1
            yield answer
        busy = [worker.connection for worker in pool if worker.position >= 0]
        if not busy and exhausted and num_yielded == num_read:
            return
        if not busy:  # the window was full of answers that waited for the slowest one, and is empty now
            continue
        for connection in wait(busy):
            position, answer = by_connection[connection].take_back()  # pyright: ignore[reportArgumentType]
            done[position] = answer
