"""What a start says when the ranks have met and cannot connect; the rest of it: tests/test_distributed.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from leviathan_ds.parallel import topology
from leviathan_ds.parallel.launch import StartFailure


@pytest.mark.parametrize(
    "fails", ["init_process_group", "all_reduce", "new_group", "barrier", "initialize_model_parallel"]
)
def test_ranks_that_cannot_connect_are_told_where_to_look(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """gloo connects when a group is made, NCCL at its first collective."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("\nno route to 172.17.0.1\nC++ frames")

    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init_process_group=lambda *_, **__: None,
        all_reduce=lambda *_, **__: None,
        new_group=lambda *_, **__: object(),
        barrier=lambda *_, **__: None,
        ProcessGroup=object,
    )
    groups = SimpleNamespace(
        model_parallel_is_initialized=lambda: False,
        destroy_model_parallel=lambda: None,
        initialize_model_parallel=lambda *_, **__: None,
    )
    setattr(groups if fails == "initialize_model_parallel" else fake, fails, refuse)
    monkeypatch.setattr(topology, "dist", fake)
    monkeypatch.setattr(topology, "parallel_state", groups)
    monkeypatch.setattr(topology, "_background_group", None)
    monkeypatch.setattr(topology.rendezvous, "meet", lambda *_: dist.HashStore())
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        StartFailure, match=r"no route to 172\.17\.0\.1; name the network card .* in GLOO_SOCKET_IFNAME"
    ):
        topology.initialize(1)
