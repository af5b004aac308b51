"""What the launcher told this process, before any process group exists. Imports nothing heavy."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data_prep.errors import UserError

# How a rank ends, beside 0 (done) and 1 (a traceback); docs/faults.md.
EXIT_MISTAKE = 2
EXIT_DIVERGED = 65  # too many skipped steps in a row: the same start would meet them again
EXIT_NOT_MET = 69  # the ranks did not get together: a node may have died, and the same start may succeed
EXIT_STOPPED = 75  # saved on request (a signal, RUN/stop, run.exit_duration_minutes): the same command goes on
EXIT_HUNG = 124  # the watchdog's, as timeout(1) has it
EXIT_INTERRUPTED = 130

# DeepSpeed's launcher looks at its ranks once a second; a rank may also be seconds behind its neighbours.
_SPEAK_UP_AFTER_S = 20.0

_logger = logging.getLogger(__name__)


class StartFailure(RuntimeError):
    """The ranks of a job did not get together; its message is one line that says who or what is missing.

    Unlike after a UserError another start may succeed, as when a node has died and comes back.
    """


class InUse(UserError):
    """Another process holds what this one wants for itself."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """A rank's place as `deepspeed` (or torchrun) set it; a lone process is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @staticmethod
    def read() -> LaunchEnvironment:
        world_size = os.environ.get("WORLD_SIZE", "1")
        local = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size
        return LaunchEnvironment(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(world_size),
            local_world_size=int(local),
        )


def share_cores_politely() -> None:
    """Let idle CPU threads sleep instead of spin; call before torch is imported.

    OpenMP's default, to spin at the end of every parallel region, costs nothing on idle cores and a factor of
    two to ten as soon as anything else wants one of them.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def quiet_libraries() -> None:
    """Leave out warnings about missing GPU kernels and chatter that says nothing to act on. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns when it has to find that out
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It says that it does not cache a blend's index, which leviathan_ds.data.index does.
    logging.getLogger("megatron.core.datasets.blended_dataset").setLevel(logging.ERROR)


def quiet_interrupts() -> None:
    """Let Ctrl-C end all ranks but the node's first at once: their tracebacks would bury its one line."""
    if LaunchEnvironment.read().local_rank != 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def hear_stop_signals() -> None:
    """Let SIGUSR1 end this rank until its watchdog takes it: `supervise` starts the launchers above deaf to it."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def exit_interrupted() -> NoReturn:
    """End this rank after Ctrl-C: one line, exit code 130, without waiting for ranks that are gone."""
    print("stopped; the same command goes on from the last checkpoint", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


def exit_with(error: UserError | StartFailure) -> NoReturn:
    """End this rank with one line on each node: exit code EXIT_MISTAKE, or EXIT_NOT_MET after a StartFailure.

    The launcher kills the other ranks as soon as one has failed. So those that do not speak for their node
    wait to be killed; if they are not, the error is theirs alone and they say it.
    """
    if LaunchEnvironment.read().local_rank != 0:
        time.sleep(_SPEAK_UP_AFTER_S)
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(EXIT_MISTAKE if isinstance(error, UserError) else EXIT_NOT_MET)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold a file among the processes of all machines that see it; freed when this process dies.

    A record lock: unlike flock's, no data loader's worker inherits it and keeps it after a kill. Raises
    InUse when another process holds the file, UserError when it cannot be made; where the disk knows no locks,
    it only warns.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another --run_dir") from None
    with opened as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise InUse(
                    f"another process is training in {path.parent} ({path} is locked); wait for it or end it, "
                    "or take another --run_dir"
                ) from None
            _logger.warning("%s cannot be locked (%s); start no second run in its folder", path, error)
        yield
