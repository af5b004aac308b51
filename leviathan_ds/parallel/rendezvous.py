"""The meeting of all ranks before any process group exists: those that stay away are named.

torch's own rendezvous says how many are missing, and only on rank 0.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed documents its stores and leaves them out of __all__.

from __future__ import annotations

import datetime
import os
import time

import torch.distributed as dist

from leviathan_ds.parallel import hostfile
from leviathan_ds.parallel.launch import LaunchEnvironment, StartFailure

_PREFIX = "roll_call"  # in the store, beside torch's own keys


def meet(environment: LaunchEnvironment, timeout: datetime.timedelta) -> dist.Store:
    """Wait until every rank of the job has come; returns their store, at MASTER_ADDR:MASTER_PORT.

    Its keys are of this start alone, also where torchrun's agent keeps the server over restarts.

    Raises StartFailure on all ranks that came: naming those that did not within `timeout`, or the address where
    no rank 0 answers.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's agent serves the store itself, on the same port.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=environment.rank == 0 and not served,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        call = dist.PrefixStore(_PREFIX, store)
        call.set(str(environment.rank), "here")
    except dist.DistError as error:
        if environment.rank == 0:
            raise StartFailure(
                f"rank 0 cannot listen at {address}:{port}: {_first_line(error)}; is another job there?"
            ) from error
        raise StartFailure(
            f"no rank 0 answers at {address}:{port}: {_first_line(error)}; it has not started, has ended, or a "
            "firewall is between (see its own output, and --master_addr)"
        ) from error
    if environment.rank == 0:
        call.set("verdict", _missing(call, environment.world_size, timeout))
    try:
        # Rank 0 may have come last, and counts from then on.
        call.wait(["verdict"], timeout * 2)
        verdict = call.get("verdict").decode()
    except dist.DistError as error:
        raise StartFailure(
            f"rank 0 at {address}:{port} is gone: {_first_line(error)}; see its own output"
        ) from error
    if verdict:
        if environment.rank == 0:
            time.sleep(2.0)  # its end closes the store, where the others are reading this
        raise StartFailure(verdict)
    return store


def _missing(call: dist.Store, world_size: int, timeout: datetime.timedelta) -> str:
    """What to say of the ranks that have not come at the end of `timeout`; empty when all have."""
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world_size))
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not call.check([str(rank)])]
        time.sleep(0.05 if missing else 0)
    if not missing:
        return ""
    return (
        f"after {timeout.total_seconds():.0f} s {world_size - len(missing)} of {world_size} ranks have come; "
        f"missing: {_by_host(missing)}. Look there: is the node up, does it reach this one, did its ranks end "
        "with a message?"
    )


def _by_host(ranks: list[int]) -> str:
    slots = hostfile.started_slots()
    if slots is None:
        return "ranks " + ", ".join(map(str, ranks))
    host_of = [host for host, number in slots.items() for _ in range(number)]
    hosts = {host: [rank for rank in ranks if host_of[rank] == host] for host in slots}
    return "; ".join(f"ranks {', '.join(map(str, absent))} of {host}" for host, absent in hosts.items() if absent)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
