"""Stopping and going on changes nothing, at every ZeRO stage; what is not whole is not taken for a checkpoint."""

from __future__ import annotations

import json

import pytest
from distributed_cases import Case, resumed_run

from leviathan_ds import run_directory


@pytest.mark.parametrize("zero", ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, True)])
def test_resume_is_bitwise(two_ranks, tmp_path, zero, tp, sequence_parallel):
    case = Case(tp=tp, zero=zero, sequence_parallel=sequence_parallel, accumulation=2)
    for undisturbed, resumed, weights_equal in two_ranks.run(resumed_run, case, tmp_path):
        assert resumed == undisturbed
        assert weights_equal
    folders = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert folders == ["step_00000002"], "only the last one is kept, and nothing is left aside"


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3"])
def test_resume_is_bitwise_in_bf16(two_ranks, tmp_path, zero):
    """The float32 master weights are in the checkpoint, not only the rounded ones."""
    for undisturbed, resumed, weights_equal in two_ranks.run(
        resumed_run, Case(zero=zero, precision="bf16"), tmp_path
    ):
        assert resumed == undisturbed
        assert weights_equal


def checkpoint(folder, step: int, **files: str):
    """A folder that looks like a checkpoint, complete by its manifest."""
    path = folder / "checkpoints" / run_directory.checkpoint_name(step)
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_text(content)
    sizes = {name: len(content) for name, content in files.items()}
    (path / run_directory.MANIFEST).write_text(json.dumps({"bytes": sizes}))
    return path


def test_the_last_complete_checkpoint_counts(tmp_path):
    good = checkpoint(tmp_path, 10, a="1234")
    missing, short, bare = (checkpoint(tmp_path, step, a="1234") for step in (20, 30, 40))
    (missing / "a").unlink()
    (short / "a").write_text("123")
    (bare / run_directory.MANIFEST).unlink()
    (tmp_path / "checkpoints" / ".writing_step_00000050").mkdir()
    assert run_directory.complete_checkpoints(tmp_path) == [good]
    assert run_directory.find_checkpoint(tmp_path) == good
    reasons = {path.name: reason for path, reason in run_directory.checkpoints(tmp_path)}
    assert "missing" in str(reasons["step_00000020"]) and "3 bytes, 4" in str(reasons["step_00000030"])
    assert run_directory.MANIFEST in str(reasons["step_00000040"])
