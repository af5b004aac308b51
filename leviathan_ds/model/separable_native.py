"""The separable product by a small C kernel on the CPU (separable_cpu.c), where there is a C compiler.

Two to four times as fast as the portable version and quiet: no thousand small parallel regions that wait for
each other. Compiled once per machine type in about a second, into the user's cache; a process killed while
compiling leaves nothing that another would use or wait for.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from leviathan_ds.model.separable import padded_splines, portable_separable_product

_logger = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("separable_cpu.c")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC")
_LANES = 16  # of separable_cpu.c


def separable_product(
    t: Float[Tensor, "h n d"], delta: Float[Tensor, "h d κ r"], normalize: bool
) -> Float[Tensor, "h n r"]:
    """`portable_separable_product`, through the C kernel for float32 on a CPU that has a compiler."""
    if t.device.type == "cpu" and t.dtype == delta.dtype == torch.float32 and _library() is not None:
        return _NativeProduct.apply(t, delta, normalize)  # pyright: ignore[reportReturnType]
    return portable_separable_product(t, delta, normalize)


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is no C compiler or it fails."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        return None
    path = _cache_folder() / f"separable_{_identity(compiler)}.so"
    try:
        if not path.is_file():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:  # a read-only home, a broken compiler
        _logger.warning("no C kernel for the generator (%s); the portable version is used, slower", error)
        return None


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "leviathan_ds"


def _identity(compiler: str) -> str:
    """Of source, flags, compiler and CPU: home directories are shared by unlike machines."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else platform.processor()
    features = sorted({line for line in cpu.splitlines() if line.startswith(("flags", "Features"))} or {cpu})
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version, "".join(features).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        aside = Path(folder) / path.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(aside), "-lm"]
        subprocess.run(command, capture_output=True, check=True)
        aside.replace(path)  # ranks that compile at once replace equal by equal


def _for_each_head(name: str, tensors: tuple[Tensor, ...], num_knots: int, normalize: bool) -> None:
    """Call the kernel for all heads on the threads that torch was given; ctypes lets go of the GIL."""
    library = _library()
    assert library is not None
    num_heads, num_ids, seed_size = tensors[0].shape
    sizes = (*map(ctypes.c_long, (num_ids, seed_size, num_knots, tensors[1].shape[3])), ctypes.c_int(normalize))

    def work(head: int) -> None:
        pointers = (ctypes.c_void_p(tensor[head].data_ptr()) for tensor in tensors)
        if getattr(library, name)(*pointers, *sizes):
            raise MemoryError(f"{name}: no memory for one block of ids")

    threads = min(num_heads, torch.get_num_threads())
    if threads == 1:
        for head in range(num_heads):
            work(head)
    else:
        list(_executor(threads).map(work, range(num_heads)))


@cache
def _executor(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def _padded_splines(delta: Float[Tensor, "h d κ r"]) -> Float[Tensor, "h d knots_padded rank_padded"]:
    """`padded_splines` with the rank filled up to whole vectors; the modes that this adds are dropped again."""
    return torch.nn.functional.pad(padded_splines(delta), (0, -delta.shape[3] % _LANES))


class _NativeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor, delta: Tensor, normalize: bool) -> Tensor:
        t = t.contiguous()
        ctx.save_for_backward(t, delta)
        ctx.normalize = normalize
        splines = _padded_splines(delta)
        modes = t.new_empty(*t.shape[:2], splines.shape[3])
        _for_each_head("separable_forward", (t, splines, modes), delta.shape[2], normalize)
        return modes[..., : delta.shape[3]]

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        t, delta = ctx.saved_tensors
        rank = delta.shape[3]
        splines = _padded_splines(delta)
        grad_modes = torch.nn.functional.pad(grad_outputs[0], (0, splines.shape[3] - rank)).contiguous()
        grad_t, grad_splines = torch.zeros_like(t), torch.zeros_like(splines)
        arguments = (t, splines, grad_modes, grad_t, grad_splines)
        _for_each_head("separable_backward", arguments, delta.shape[2], ctx.normalize)
        return grad_t, grad_splines[:, :, 1:-1, :rank], None
