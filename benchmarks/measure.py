"""What the benchmarks share: alternating timings, peak memory, JSON lines."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

MB = 1e6


def alternate(arms: dict[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each call of each arm; the arms take turns, so that a machine's moods hit them alike."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(-warmup, repeats):
        for arm, work in arms.items():
            _synchronize()
            start = time.perf_counter()
            work()
            _synchronize()
            if repeat >= 0:
                times[arm].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], arm: str, baseline: str) -> float:
    """Median over the repeats of arm / baseline of the same repeat: what drifts cancels."""
    return statistics.median(a / b for a, b in zip(times[arm], times[baseline], strict=True))


def peak_memory_mb(work: Callable[[], Any]) -> float:
    """Memory that a call needs beyond what is held before it, in MB: allocated on a GPU, resident on a CPU.

    To be called by `in_fresh_process`: memory that the allocator has kept would hide what is needed.
    """
    if torch.cuda.is_available():
        _synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        _synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MB
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the process's peak to its present resident set
    before = _status_kb("VmRSS")
    work()
    return (_status_kb("VmHWM") - before) * 1024 / MB


@contextmanager
def low_retention() -> Iterator[None]:
    """Processes started meanwhile give freed memory back at once: by itself glibc keeps blocks of up to 32 MB."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    try:
        yield
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a module-level function in a new process that keeps no freed memory."""
    with low_retention(), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def on_all_ranks(tensor_parallel_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a module-level function returns on each rank of a fresh tensor-parallel world, in rank order."""
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = (tensor_parallel_size, port, queue, function, arguments)
    with low_retention():
        torch.multiprocessing.spawn(_rank_of_world, world, nprocs=tensor_parallel_size)
    return [answer for _, answer in sorted((queue.get() for _ in range(tensor_parallel_size)), key=lambda a: a[0])]


def _rank_of_world(
    rank: int, size: int, port: int, queue: Any, function: Callable[..., Any], arguments: tuple
) -> None:
    from leviathan_ds.parallel import topology

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    topology.initialize(size)
    queue.put((rank, function(*arguments)))


def report(benchmark: str, **values: Any) -> None:
    """One JSON line, floats to four significant digits."""
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps({"benchmark": benchmark, **rounded}), flush=True)


def _status_kb(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise KeyError(key)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
