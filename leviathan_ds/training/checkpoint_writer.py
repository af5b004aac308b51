"""From a state in memory to a committed folder: copies in host memory, files, manifest, rename, rotation.

Nothing here is collective or knows DeepSpeed, so that it can run in a thread beside the training.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_map

from data_prep.errors import one_line
from leviathan_ds import run_directory
from leviathan_ds.parallel.watchdog import disk_work, does_disk_work

_TEMPORARY = ".writing_"
_DISCARDED = ".discarded_"
_SYNC_BYTES = 256 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


class HostMemory:
    """Copies of tensors in the host's memory, pinned beside a GPU, in buffers that the next save uses again."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0

    def rewind(self) -> None:
        """From here on buffers are filled anew, in the order of the last time where shapes are equal."""
        self._used = 0

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy, complete at the return: what it was taken from may be freed on another stream (ZeRO-3)."""
        place = self._buffers[self._used : self._used + 1]
        if not place or place[0].shape != tensor.shape or place[0].dtype != tensor.dtype:
            place = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())]
            self._buffers[self._used : self._used + 1] = place
        self._used += 1
        return place[0].copy_(tensor.detach())

    def hold_all(self, state: Any) -> Any:
        """The same for every tensor in nested containers; everything else in them is copied too."""
        return tree_map(
            lambda leaf: self.hold(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
            state,
            is_leaf=lambda node: isinstance(node, torch.Size),  # else it would come back as a tuple
        )


def temporary_folder(final: Path) -> Path:
    return final.with_name(_TEMPORARY + final.name)


@does_disk_work
def make_temporary_folder(final: Path) -> None:
    """Remove what killed saves have left, and make the folder that the ranks write into."""
    for leftover in (*final.parent.glob(_TEMPORARY + "*"), *final.parent.glob(_DISCARDED + "*")):
        shutil.rmtree(leftover)
    temporary_folder(final).mkdir(parents=True)


@does_disk_work
def write_pickle(path: Path, state: Any) -> tuple[int, int]:
    """Size and CRC-32 of the file, which is on the disk then."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except Exception as error:
        raise OSError(f"{path}: {one_line(error)}") from error
    return _settle(path)


@does_disk_work
def write_weights(path: Path, weights: dict[str, Tensor]) -> tuple[int, int]:
    """Size and CRC-32 of the file, which is on the disk then."""
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(weights, path)
        path.chmod(mode)  # safetensors forbids it to everybody else
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    return _settle(path)


@does_disk_work
def commit(final: Path, files: dict[str, tuple[int, int]], texts: dict[str, str]) -> None:
    """Give the temporary folder its name, once everything in it is on the disk and in its manifest.

    Args:
        files: size and CRC-32 of what the ranks wrote.
        texts: small files to be written beside them.
    """
    temporary = temporary_folder(final)
    for name, text in texts.items():
        run_directory.write_text(temporary / name, text)
    found = {str(path.relative_to(temporary)): path for path in temporary.rglob("*") if path.is_file()}
    described = {name: files.get(name) or _settle(path) for name, path in found.items()}
    if lost := files.keys() - found.keys():
        raise OSError(f"{', '.join(sorted(lost))} vanished; is {final.parent} one folder for all ranks?")
    run_directory.write_manifest(temporary, described)
    if final.exists():  # an incomplete one of the same step, passed over at the resume
        _discard(final)
    temporary.rename(final)
    _sync(final.parent)


@does_disk_work
def rotate(run_dir: Path, keep: int, keep_every_steps: int) -> None:
    """Drop all but the last `keep` checkpoints and those at multiples of `keep_every_steps` (0: none)."""
    for old in run_directory.complete_checkpoints(run_dir)[:-keep]:
        if not keep_every_steps or run_directory.step_of(old) % keep_every_steps:
            _discard(old)


def attempt(action: Callable[[], object]) -> str | None:
    """Do something; the reason in one line if it fails."""
    try:
        action()
    except Exception as error:
        return one_line(error)
    return None


def _settle(path: Path) -> tuple[int, int]:
    """Bring a file to the disk (by the machine that wrote it: no other one can) and describe it."""
    _sync(path)
    return path.stat().st_size, run_directory.checksum(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Block by block, so that a watchdog tells a slow disk from a dead one; the last word has fsync.
        for start in range(0, os.fstat(descriptor).st_size, _SYNC_BYTES):
            with disk_work(path):
                _sync_range(descriptor, start, _SYNC_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_range(descriptor: int, start: int, size: int) -> None:
    wait_before, write, wait_after = 1, 2, 4
    whole = wait_before | write | wait_after
    if _LIBC.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), whole):
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.ESPIPE, errno.EINVAL):  # not for this kernel, or for folders
            raise OSError(number, os.strerror(number))


def _discard(folder: Path) -> None:
    discarded = folder.with_name(_DISCARDED + folder.name)
    folder.rename(discarded)
    shutil.rmtree(discarded)
