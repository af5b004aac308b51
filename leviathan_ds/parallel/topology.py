"""Process groups, devices and threads: who is where, and on what.

Everything above asks here for ranks and for the device, so that the same code runs on GPUs with NCCL and on
CPUs with gloo.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

from leviathan_ds.parallel import rendezvous
from leviathan_ds.parallel.launch import LaunchEnvironment, StartFailure

# Ranks wait in it for the slowest disk. A rank that dies is noticed at once, by its closed connection; one whose
# disk is dead is ended by its watchdog.
_BACKGROUND_TIMEOUT = datetime.timedelta(hours=2)

_background_group: dist.ProcessGroup | None = None


def device() -> torch.device:
    """The device that this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    """The accelerator's name as torch gives it, "cpu" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def initialize(tensor_model_parallel_size: int, timeout_minutes: float = 10.0) -> None:
    """Start torch.distributed under the launcher (or alone) and build Megatron's process groups.

    Collective over all ranks. Ranks of one tensor-parallel group are neighbours, so that TP stays in a node.
    A collective of any group, gloo's and NCCL's, fails after timeout_minutes. Raises StartFailure on every rank
    that came when others do not within that time, and when they cannot connect to each other.
    """
    environment = LaunchEnvironment.read()
    if torch.cuda.is_available():
        torch.cuda.set_device(environment.local_rank)
    else:
        _prepare_cpu(environment)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    store = None
    if environment.world_size > 1 and not dist.is_initialized():
        store = rendezvous.meet(environment, timeout)
    try:
        _initialize_process_group(environment, store, timeout)
        if parallel_state.model_parallel_is_initialized() and tensor_parallel_size() == tensor_model_parallel_size:
            return  # groups are never freed while the world lives: each of them keeps threads and sockets
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_model_parallel_size,
            distributed_timeout_minutes=timeout_minutes,  # pyright: ignore[reportArgumentType]
        )
    except RuntimeError as error:
        if store is None:
            raise
        raise StartFailure(
            f"the ranks met, but cannot talk to each other: {str(error).strip().splitlines()[0]}; name the "
            "network card between the nodes in GLOO_SOCKET_IFNAME (with NCCL too) and NCCL_SOCKET_IFNAME "
            "(`ip address` shows them), and look for a firewall between their other ports"
        ) from error
    # Sequence parallelism forks Megatron's CUDA generator around the layers. Nothing here is random after
    # initialisation (no dropout), so the tracker that leaves generators alone is the right one everywhere.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def _prepare_cpu(environment: LaunchEnvironment) -> None:
    # The device shim: megatron-core's buffers, sequence-parallel collectives and rotary embedding ask
    # torch.cuda.current_device() where to allocate. Without a GPU the answer is the CPU.
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // environment.local_world_size))


def _initialize_process_group(
    environment: LaunchEnvironment,
    store: dist.Store | None,  # pyright: ignore[reportPrivateImportUsage]
    timeout: datetime.timedelta,
) -> None:
    if dist.is_initialized():
        return
    if store is None:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
    )
    if environment.world_size > 1:
        # NCCL connects at its first collective, and gloo when the background group is made: here, not in the
        # midst of a run, it must come to light that they cannot.
        one = torch.ones(1, device=device())
        dist.all_reduce(one)
        one.item()
        dist.barrier(background_group())


def shutdown() -> None:
    """Leave the process groups; a rank that exits without this can hang its neighbours' exit."""
    global _background_group  # noqa: PLW0603
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _background_group = None


def background_group() -> dist.ProcessGroup:
    """All ranks once more, on the CPU: for one thread beside the training, whose collectives it must not meet.

    Collective at the first call.
    """
    global _background_group  # noqa: PLW0603
    if _background_group is None:
        group = dist.new_group(backend="gloo", timeout=_BACKGROUND_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        _background_group = group
    return _background_group


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def tensor_parallel_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def tensor_parallel_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def data_parallel_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def barrier() -> None:
    dist.barrier()
