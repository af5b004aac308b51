"""Stopping and going on changes nothing, at every ZeRO stage; what is not whole is not taken for a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from distributed_cases import (
    Case,
    damage_found,
    full_disk_run,
    last_good_found,
    refusal_of_load,
    resumed_run,
    saved_steps,
)

from leviathan_ds import accounting, run_directory
from leviathan_ds.training import checkpoint_writer as writer


@pytest.mark.parametrize("zero", ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, True)])
def test_resume_is_bitwise(two_ranks, tmp_path, zero, tp, sequence_parallel):
    """Also the steps after the save are done before its first byte is written."""
    case = Case(tp=tp, zero=zero, sequence_parallel=sequence_parallel, accumulation=2)
    for undisturbed, resumed, weights_equal in two_ranks.run(resumed_run, case, tmp_path):
        assert resumed == undisturbed
        assert weights_equal
    folders = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert folders == ["step_00000002"], "only the last one is kept, and nothing is left aside"
    assert_estimated_size(case, tmp_path)


@pytest.mark.parametrize("zero", ["zero0", "zero2", "zero3", "zero3_offload"])
def test_resume_of_a_blocking_save_is_bitwise(two_ranks, tmp_path, zero):
    """Written from the live state, after DeepSpeed has done with it."""
    for undisturbed, resumed, weights_equal in two_ranks.run(resumed_run, Case(tp=2, zero=zero), tmp_path, False):
        assert resumed == undisturbed
        assert weights_equal


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3"])
def test_resume_is_bitwise_in_bf16(two_ranks, tmp_path, zero):
    """The float32 master weights are in the checkpoint, not only the rounded ones."""
    case = Case(zero=zero, precision="bf16")
    for undisturbed, resumed, weights_equal in two_ranks.run(resumed_run, case, tmp_path):
        assert resumed == undisturbed
        assert weights_equal
    assert_estimated_size(case, tmp_path)


def assert_estimated_size(case: Case, folder) -> None:
    """What the doctor holds against the free disk is what is written, small files aside."""
    files = [path for path in (folder / "checkpoints" / "step_00000002").rglob("*") if path.is_file()]
    written = sum(path.stat().st_size for path in files if not path.name.startswith("random_states"))
    assert accounting.checkpoint_bytes(case.recipe(2 // case.tp), int(case.zero[4])) == pytest.approx(
        written, rel=0.1
    )


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


# ---- content ----

SHARDED = Case(tp=2, zero="zero2", sequence_parallel=True)


@pytest.fixture(scope="module")
def saved(two_ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    two_ranks.run(saved_steps, SHARDED, folder)
    return folder / "checkpoints" / "step_00000001"


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints" / saved.name))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_damage_of_every_kind_of_file_is_found_by_all_ranks_alike(two_ranks, saved, copy):
    """A flipped bit and a missing byte; each file is read by one rank only."""
    assert two_ranks.run(damage_found, saved) == [None, None]
    names = sorted(path.name for path in saved.iterdir())
    kinds = ("recipe", "trainer_state", "weights_tp00", "weights_tp01", "random_states", "mp_rank", "zero_pp_rank")
    assert all(any(name.startswith(kind) for name in names) for kind in kinds)
    for name in set(names) - {run_directory.MANIFEST}:
        path, content = copy / name, (saved / name).read_bytes()
        path.write_bytes(content[:-1])
        assert f"{path}: {len(content) - 1} bytes" in str(run_directory.incompleteness(copy))
        path.write_bytes(content)
        flip(path, len(content) // 2)
        found = two_ranks.run(damage_found, copy)
        assert found[0] == found[1] == f"{path}: its content has changed since it was written"
        path.write_bytes(content)
    assert two_ranks.run(damage_found, copy) == [None, None]


def test_shares_cover_every_file_once(copy):
    for path in sorted(copy.iterdir()):
        if path.name != run_directory.MANIFEST:
            content = path.read_bytes()
            flip(path, 0)
            shares = [run_directory.damage_of_share(copy, rank, 3) for rank in range(3)]
            assert sum(share is not None for share in shares) == 1, path.name
            path.write_bytes(content)


def test_what_one_rank_cannot_read_is_passed_over_by_all(two_ranks, copy):
    """The failing rank must not leave the other waiting for its answer. What is passed over is kept."""
    first, second = two_ranks.run(last_good_found, SHARDED, copy.parent.parent, None, 1)
    reason = f"{copy}: manifest.json: Input/output error; kept as damaged_step_00000001"
    assert first == second == (None, (reason,))
    assert [path.name for path in copy.parent.iterdir()] == ["damaged_step_00000001"]


def test_what_one_rank_does_not_see_is_not_damaged(two_ranks, copy):
    """A stale listing of a shared disk, or a disk that is not shared."""
    first, second = two_ranks.run(last_good_found, SHARDED, copy.parent.parent, 1)
    assert first == second
    assert isinstance(first, str) and first.startswith(
        f"rank 1 cannot read the checkpoint {copy}, which rank 0 sees"
    )
    assert two_ranks.run(last_good_found, SHARDED, copy.parent.parent) == [(copy.name, ())] * 2


def test_a_manifest_that_vanishes_is_damage(copy):
    (copy / run_directory.MANIFEST).unlink()
    for found in (run_directory.damage(copy), run_directory.damage_of_share(copy, 0, 2)):
        assert str(copy / run_directory.MANIFEST) in str(found)


def test_the_same_step_may_be_damaged_twice(tmp_path):
    names = []
    for _ in range(3):
        names.append(run_directory.set_aside(checkpoint(tmp_path, 7, a="1234")).name)
    assert names == ["damaged_step_00000007", "damaged_step_00000007_2", "damaged_step_00000007_3"]
    assert run_directory.checkpoints(tmp_path) == []


@pytest.mark.parametrize("content", ["", "[]", "null", '{"bytes": []}', '{"byt": {}}', '{"bytes": {"trainer_st'])
def test_a_broken_manifest_is_an_incomplete_checkpoint(copy, content):
    (copy / run_directory.MANIFEST).write_text(content)
    assert str(copy / run_directory.MANIFEST) in str(run_directory.incompleteness(copy))


class Payload:
    """What a stranger would put into a pickle."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("kind", ["mp_rank", "zero_pp_rank", "random_states"])
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_strangers_checkpoint_runs_no_code(two_ranks, copy, tmp_path, kind, as_zip):
    proof = tmp_path / "proof"
    pickle.loads(pickle.dumps(Payload(proof)))
    proof.unlink()  # it would work
    for path in copy.glob(f"{kind}*"):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "payload": Payload(proof)}, path, _use_new_zipfile_serialization=as_zip)
    for said in two_ranks.run(refusal_of_load, SHARDED, copy):
        assert f"/{kind}" in said and "holds objects that no file of this trainer holds" in said
        assert "\n" not in said
    assert not proof.exists()


def test_a_checkpoint_of_ours_loads(two_ranks, saved):
    assert two_ranks.run(refusal_of_load, SHARDED, saved) == [None, None]


# ---- the disk ----


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_outlives_a_full_disk(two_ranks, tmp_path, async_save):
    """Full on one rank: nobody commits, rank 0 says it in one line, the last good checkpoint stays."""
    first, second = two_ranks.run(full_disk_run, SHARDED, tmp_path, async_save, False)
    good = [["step_00000001"], ["step_00000001"], ["step_00000003"], ["step_00000003"]]
    assert first["steps"] == second["steps"] == good
    assert len(first["said"]) == 2 and second["said"] == []
    for step, last, line in zip((2, 4), ("step_00000001", "step_00000003"), first["said"], strict=True):
        assert line.startswith(f"the checkpoint of step {step} could not be written: ")
        assert "File too large" in line and f".writing_step_0000000{step}/" in line
        assert line.endswith(f"; {last} is the last good one")
        assert "\n" not in line
    assert first["error"] == second["error"]
    assert "the last checkpoint could not be written: " in first["error"]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_full_disk_ends_the_run_if_told_to(two_ranks, tmp_path, async_save):
    first, second = two_ranks.run(full_disk_run, SHARDED, tmp_path, async_save, True)
    assert first["steps"] == second["steps"] == [["step_00000001"]]
    assert first["error"] == second["error"]
    assert "a checkpoint could not be written: " in first["error"]


def torchs_way_to_fail() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    finally:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk(two_ranks, tmp_path):
    """A file system with room for one checkpoint and a half."""
    two_ranks.run(saved_steps, SHARDED, tmp_path / "roomy")
    size = sum(path.stat().st_blocks * 512 for path in (tmp_path / "roomy").rglob("*"))
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "tmpfs", small], check=True)
    try:
        said, _ = two_ranks.run(saved_steps, SHARDED, small, 2)
        assert len(said) == 1
        assert "the checkpoint of step 2 could not be written" in said[0] and os.strerror(errno.ENOSPC) in said[0]
        assert "step_00000001 is the last good one" in said[0]
        assert [path.name for path in run_directory.complete_checkpoints(small)] == ["step_00000001"]
        assert [path.name for path in (small / run_directory.CHECKPOINTS).iterdir()] == ["step_00000001"]
        assert two_ranks.run(damage_found, small / run_directory.CHECKPOINTS / "step_00000001") == [None, None]
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_full_disk_is_named_with_its_file(tmp_path):
    assert writer.attempt(torchs_way_to_fail) == "No space left on device"
    path = tmp_path / "file"
    path.symlink_to("/dev/full")
    said = writer.attempt(lambda: writer.write_pickle(path, {"w": torch.zeros(100_000)}))
    assert said == f"{path}: No space left on device"


@pytest.mark.parametrize("write", [writer.write_pickle, writer.write_weights])
def test_a_file_that_finds_no_room_is_named(tmp_path, write):
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        said = writer.attempt(lambda: write(path, {"w": torch.zeros(100_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said is not None and said.startswith(f"{path}: ") and "File too large" in said and "\n" not in said


def test_rotation(tmp_path):
    for step in (4, 5, 8, 10, 11, 12):
        checkpoint(tmp_path, step, a="1234")

    def left() -> list[int]:
        return [run_directory.step_of(path) for path in run_directory.complete_checkpoints(tmp_path)]

    writer.rotate(tmp_path, 2, 4)
    assert left() == [4, 8, 11, 12], "the last two and every fourth"
    # A damaged one neither counts nor goes, or the only good one would.
    aside = run_directory.set_aside(tmp_path / "checkpoints" / "step_00000012")
    writer.rotate(tmp_path, 1, 0)
    assert left() == [11] and aside.is_dir()


def test_host_memory_is_used_again():
    memory = writer.HostMemory()
    state = {"a": [torch.arange(4.0), "x"], "b": (torch.zeros(2, dtype=torch.bfloat16), {"lr": 1.0})}
    first = memory.hold_all(state)
    state["a"][0] += 1
    state["b"][1]["lr"] = 2.0
    assert first["a"][0].tolist() == [0, 1, 2, 3] and first["b"][1] == {"lr": 1.0}
    memory.rewind()
    second = memory.hold_all(state)
    assert second["a"][0].data_ptr() == first["a"][0].data_ptr() and second["a"][0].tolist() == [1, 2, 3, 4]
    memory.rewind()
    assert memory.hold_all(torch.zeros(5)).shape == (5,), "another shape than last time"
