"""All ranks meet, or those that stay away are named on every rank that came."""

from __future__ import annotations

import datetime
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from leviathan_ds.parallel import hostfile, rendezvous
from leviathan_ds.parallel.launch import LaunchEnvironment, StartFailure


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return port


def meet(ranks: list[int], world_size: int, timeout_s: float) -> list[str]:
    """What each of these ranks gets: "met", or its message."""

    def one(rank: int) -> str:
        try:
            store = rendezvous.meet(
                LaunchEnvironment(rank, 0, world_size, 1), datetime.timedelta(seconds=timeout_s)
            )
        except StartFailure as error:
            return str(error)
        stores.append(store)  # rank 0's serves the others until all have read
        return "met"

    stores: list[object] = []
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_all_come() -> None:
    assert meet([2, 0, 1], 3, 60) == ["met"] * 3


def test_missing_ranks_are_named_on_every_rank_that_came() -> None:
    first, second = meet([0, 2], 4, 2)
    assert first == second
    assert first.startswith("after 2 s 2 of 4 ranks have come; missing: ranks 1, 3.")


def test_missing_ranks_are_named_with_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfile, "started_slots", lambda: {"worker-1": 2, "worker-2": 2, "worker-3": 1})
    (said,) = meet([0], 5, 1)
    assert "missing: ranks 1 of worker-1; ranks 2, 3 of worker-2; ranks 4 of worker-3." in said


def test_no_rank_0(address: int) -> None:
    (said,) = meet([1], 2, 1)
    assert said.startswith(f"no rank 0 answers at 127.0.0.1:{address}: ")
    assert "\n" not in said


def test_a_port_that_is_taken(address: int) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", address))
        other.listen()
        (said,) = meet([0], 2, 1)
    assert said.startswith(f"rank 0 cannot listen at 127.0.0.1:{address}: ")


def test_a_restart_by_torchrun_sees_nothing_of_the_start_before(
    monkeypatch: pytest.MonkeyPatch, address: int
) -> None:
    """Its agent keeps the server; the dead start's keys would be taken for this one's addresses and ballots."""
    server = dist.TCPStore("127.0.0.1", address, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with ThreadPoolExecutor(2) as threads:
            ranks = [LaunchEnvironment(rank, rank, 2, 2) for rank in (0, 1)]
            stores = list(threads.map(lambda rank: rendezvous.meet(rank, datetime.timedelta(seconds=60)), ranks))
        assert not stores[1].check(["address of rank 0"])
        stores[0].set("address of rank 0", "somewhere")
        assert stores[1].get("address of rank 0") == b"somewhere"
    del server
