"""Pools of gloo ranks that live for the whole test session: starting one costs seconds, a call costs nothing.

A test hands a module-level function of `tests/distributed_cases.py` to a pool; every rank calls it with the same
arguments, and the test gets the results in rank order.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 300
_PR_SET_PDEATHSIG = 1


class WorkerPool:
    """`size` processes joined in one torch.distributed world (gloo, one thread each).

    They are stopped between calls: twenty threads of gloo in each wake a hundred times a second, and a session's
    twenty ranks would take a core from whatever test runs.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        atexit.register(self.close)  # before multiprocessing's own, which would wait for a stopped rank for ever
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on every rank; raises if any rank raised, died or did not answer.

        After the latter two, or an exception from outside, the pool is closed: its ranks are out of step.
        """
        try:
            answers = self._answers(function, arguments)
        except BaseException:
            self.close()
            raise
        failures = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(answers) if failed]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def _answers(self, function: Callable[..., Any], arguments: tuple) -> list[tuple[bool, Any]]:
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(
                    f"rank {rank} gave no answer to {function.__name__}{arguments} in {TIMEOUT_S} s"
                )
            answers.append(pipe.recv())
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes.clear()
        self._processes.clear()

    @property
    def closed(self) -> bool:
        return not self._processes


class WorkerPools:
    """A pool for each tensor-parallel size that the arguments name, started when it is first asked for.

    A world whose tensor-parallel size changes keeps the threads of all its process groups, and they are not idle.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pools: dict[int | None, WorkerPool] = {}

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As `WorkerPool.run`."""
        key = next((argument.tp for argument in arguments if hasattr(argument, "tp")), None)
        if key not in self._pools or self._pools[key].closed:
            self._pools[key] = WorkerPool(self._size)
        return self._pools[key].run(function, *arguments)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    # A stopped process does not see its pipe close. The signal comes when the thread that made the pool ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(*arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
