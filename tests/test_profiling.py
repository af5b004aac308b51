"""Traces of chosen steps, and nothing at all for the others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from leviathan_ds.training import profiling
from leviathan_ds.training.step_log import StepLog

pytestmark = pytest.mark.usefixtures("one_rank")


def log() -> StepLog:
    return StepLog(SimpleNamespace(), 1, 1)  # pyright: ignore[reportArgumentType]


def test_a_chosen_step_leaves_a_chrome_trace(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        with profiling.traced(tmp_path, step, (2,), log()):
            torch.randn(50, 50) @ torch.randn(50, 50)
    (file,) = tmp_path.glob("traces/*")
    assert file.name == "step_00000002_rank00000.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_other_steps_meet_no_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profile", None)  # a call would fail
    monkeypatch.setattr(profiling.engines, "synchronize", None)
    with profiling.traced(tmp_path, 1, (), log()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_other_copies_of_the_model_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling.topology, "data_parallel_rank", lambda: 1)
    with profiling.traced(tmp_path, 1, (1,), log()):
        pass
    assert list(tmp_path.iterdir()) == []
