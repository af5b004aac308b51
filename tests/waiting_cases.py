"""Where the host waits for the device in steps of training; what test_gpu.py runs in a pool of one rank."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from distributed_cases import Case, batches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leviathan_ds.config import FaultsConfig
from leviathan_ds.parallel import topology
from leviathan_ds.parallel.watchdog import Watchdog

WAITING = ("local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")
"""Operations that would make a GPU's queue wait for the host, by the beginning of their names: for the CPU."""

_NOBODYS = (str(Path(torch.__file__).parent), warnings.__file__, __file__)


def waits(function: Any) -> bool:
    """Whether an operation of torch is one of WAITING."""
    return function.overloadpacket.__name__.strip("_").startswith(WAITING)


def _culprit() -> str:
    """File and line of the innermost frame that is neither torch's nor the recording's."""
    frames = traceback.extract_stack()
    return next(
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in reversed(frames)
        if not frame.filename.startswith(_NOBODYS) or frame.name == "planted_wait"
    )


class _Recording(TorchDispatchMode):
    def __init__(self, culprits: list[str]) -> None:
        super().__init__()
        self._culprits = culprits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(function):
            self._culprits.append(_culprit())
        return function(*args, **(kwargs or {}))


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Who made the host wait within the block.

    On a GPU torch warns, also in the thread of the backward pass. A wait inside an operation's C++ backward would
    be put down to who called backward, DeepSpeed: `test_a_step_never_waits_for_the_device` looks for those.
    """
    culprits: list[str] = []
    if not torch.cuda.is_available():
        with _Recording(culprits):
            yield culprits
        return

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            culprits.append(_culprit())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield culprits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def waits_of_steps(zero: str, run_dir: Path, planted: bool) -> list[str]:
    """Who waits in the last two of five steps as the loop takes them between two logs: bf16, two passes.

    planted: the guard's vote is made to wait.
    """
    from distributed_cases import build
    from fault_cases import LR, guard_of

    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.training.step import train_step
    from leviathan_ds.training.step_log import StepLog

    case = Case(zero=zero, precision="bf16", accumulation=2)
    engine, _ = build(case)
    guard, said = guard_of(case, run_dir, FaultsConfig(loss_spike_zscore=50.0, loss_spike_window=2), Watchdog(600))
    log = StepLog(said, 1, case.steps)  # pyright: ignore[reportArgumentType]
    vote = guard.vote

    def planted_wait(losses: Tensor) -> Tensor:
        return vote(losses) * (1.0 if losses.sum().item() < 1e9 else 2.0)

    if planted:
        guard.vote = planted_wait
    pinned = torch.cuda.is_available()
    steps = [[batch.pin_memory() if pinned else batch for batch in micro] for micro in batches(case)]

    def take(step: int) -> None:
        loss = train_step(engine, iter(steps[step]), len(steps[step]), LR, topology.device(), guard)
        log.add(loss, LR, engines.global_grad_norm(engine))
        guard.settle(engine, step)

    for step in range(3):  # kernels are compiled, ZeRO-3 traces, the window of losses fills
        take(step)
    with recorded_waits() as culprits:
        for step in range(3, case.steps):
            take(step)
    engine.destroy()
    return culprits
