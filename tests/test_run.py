"""Whole jobs on two ranks: disks that are full, checkpoints that are damaged, and what a resume may change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed_cases import Case
from run_cases import NAN_STEPS, whole_run

from launchers import audit
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.parallel.launch import EXIT_DIVERGED
from leviathan_ds.training.schedule import learning_rate

CASE = Case(zero="zero1")
STEPS = 8
RECIPE = """
model:
  {hidden_size: 32, num_layers: 1, num_attention_heads: 2, generator: {seed_size: 8, num_heads: 2, rank: 4}}
data: {prefixes: ["PREFIX"], sequence_length: 32, validation_fraction: 0.2, num_workers: 0}
training: {train_steps: 8, warmup_steps: 1, micro_batch_size: 2, global_batch_size: 4, precision: fp32}
run: {eval_samples: 2, save_interval: 2, log_interval: 1, keep_checkpoints: 9}
"""


@pytest.fixture(scope="module")
def recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(RECIPE.replace("PREFIX", str(corpus)))
    return path


@pytest.fixture(scope="module")
def trained(two_ranks, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two skipped steps; not to be changed."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    for rank in two_ranks.run(whole_run, CASE, recipe, run_dir, (), None, True):
        assert rank["code"] == 0
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / run_directory.CHECKPOINTS).iterdir())


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / run_directory.CHECKPOINTS / run_directory.checkpoint_name(step)


def records(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return run_directory.read_lines(run_dir / name)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---- a full disk ----

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


@needs_root
def test_a_run_goes_on_while_its_disk_is_full(two_ranks, recipe, small_disk):
    """Full from before the first record until after the first checkpoints: each says so once, no line is lost."""
    run_dir = small_disk / "run"
    options = ("--run.tensorboard=true", "--run.profile_steps=[2]")
    first, second = two_ranks.run(whole_run, CASE, recipe, run_dir, options, "steps", True)
    assert (first["error"], second["error"]) == (None, None)
    assert (first["code"], second["code"]) == (0, 0)
    full = [line for line in first["said"] if os.strerror(28) in line]
    assert second["said"] == []
    for name, number in {
        "metrics.jsonl": 1,
        "faults.jsonl": 1,
        "summary.json": 1,
        "tensorboard": 1,
        "the trace step_00000002": 1,
        "the checkpoint of step 2": 1,
        "the checkpoint of step 4": 1,
    }.items():
        assert sum(line.startswith(f"{name}") for line in full) == number, (name, full)
    assert len(full) == 7
    trained = [each["step"] for each in records(run_dir, run_directory.METRICS) if "loss" in each]
    assert trained == list(range(1, STEPS + 1))
    validated = [each["step"] for each in records(run_dir, run_directory.METRICS) if "val_loss" in each]
    assert validated == [0, STEPS]
    assert [each["step"] for each in records(run_dir, run_directory.FAULTS)] == list(NAN_STEPS)
    assert {"initial_val_loss", "final_val_loss"} <= run_directory.update_summary(run_dir).keys()
    assert checkpoints(run_dir) == ["step_00000006", "step_00000008"]


@needs_root
def test_a_start_on_a_full_disk_is_one_line_on_all_ranks(two_ranks, recipe, small_disk):
    run_dir = small_disk / "run"
    first, second = two_ranks.run(whole_run, CASE, recipe, run_dir, (), "start")
    assert first["error"] == second["error"]
    assert first["error"].startswith(f"{run_dir} cannot be written; make room and start the same command again: ")
    assert os.strerror(28) in first["error"] and "\n" not in first["error"]


# ---- how a start ended ----


def test_a_diverged_start_is_on_record_until_the_run_has_gone_on(two_ranks, recipe: Path, tmp_path: Path):
    """Whatever launched it: a study reads the summary (studies/runner.py)."""
    for options, nan, code in ((("--faults.max_consecutive_skips=1",), True, EXIT_DIVERGED), ((), False, 0)):
        ranks = two_ranks.run(whole_run, CASE, recipe, tmp_path / "run", options, None, nan)
        assert [rank["code"] for rank in ranks] == [code, code]
        assert run_directory.update_summary(tmp_path / "run")["exit_code"] == code


# ---- blends ----


def test_a_blend_with_attention_within_documents_is_validated_by_domain(
    two_ranks, recipe: Path, corpus_copy: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """And an audit names the data of both ranks."""
    corpus_copy("one"), corpus_copy("other")
    blend, run_dir = tmp_path / "blend.yaml", tmp_path / "run"
    entries = [{"name": name, "train": f"{name}/tiny", "weight": 2} for name in ("one", "other")]
    blend.write_text(yaml.safe_dump({"datasets": entries}))
    options = ("--data.prefixes=[]", f"--data.blend={blend}", "--data.reset_attention_mask=true")
    ranks = two_ranks.run(whole_run, CASE, recipe, run_dir, (*options, "--run.eval_samples=8"))
    assert [rank["code"] for rank in ranks] == [0, 0]
    for record in (each for each in records(run_dir, run_directory.METRICS) if "val_loss" in each):
        (domains,) = (
            each
            for each in records(run_dir, run_directory.METRICS)
            if "val_loss/one" in each and each["step"] == record["step"]
        )
        assert domains["val_loss/one"] == domains["val_loss/other"]  # copies of one corpus
        assert record["val_loss"] == pytest.approx(domains["val_loss/one"], rel=1e-12)
    assert audit.main([str(run_dir), "--step", "2", "--json"]) == 0
    pieces = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(piece["rank"], piece["sample"]) for piece in pieces} == {(0, 4), (0, 5), (1, 6), (1, 7)}


# ---- which checkpoint, and what of the run's record ----


def test_a_resume_may_lower_the_learning_rate_and_passes_over_damage_for_good(two_ranks, recipe, run_dir):
    """Also: records of steps that are run again are replaced, and the rotation does not count what is damaged."""
    assert [each["step"] for each in records(run_dir, run_directory.FAULTS)] == list(NAN_STEPS)
    flip(checkpoint(run_dir, STEPS) / "weights_tp00.safetensors")
    options = ("--training.lr=0.0005", "--run.keep_checkpoints=1")
    first, second = two_ranks.run(whole_run, CASE, recipe, run_dir, options)
    assert (first["code"], second["code"]) == (0, 0)
    said = "\n".join(first["said"])
    assert "weights_tp00.safetensors: its content has changed since it was written; kept as damaged_step" in said
    assert "the run's recipe changes: training.lr was 0.001 and is 0.0005 from step 6" in said
    assert "resuming at step 6" in said
    assert checkpoints(run_dir) == ["damaged_step_00000008", "step_00000008"]
    assert "damaged_step_00000008" in records(run_dir, run_directory.STARTS)[-1]["passed_over"][0]

    before = recipes.load(recipe).training
    after = replace(before, lr=0.0005)
    rates = [each["lr"] for each in records(run_dir, run_directory.METRICS) if "loss" in each]
    expected = [learning_rate(step, before if step < 6 else after) for step in range(STEPS)]
    assert rates == expected
    assert [each["step"] for each in records(run_dir, run_directory.FAULTS)] == [NAN_STEPS[0]]

    # Another start keeps the note, and finds the old rate changed.
    written = run_dir / run_directory.RECIPE
    note = "# training.lr was 0.001 and is 0.0005 from step 6\n"
    assert written.read_text().startswith(note)
    assert recipes.load(written).training.lr == 0.0005
    flip(checkpoint(run_dir, STEPS) / "weights_tp00.safetensors")
    first, _ = two_ranks.run(whole_run, CASE, recipe, run_dir)
    assert "starting: " in "\n".join(first["said"]), "keep_checkpoints was 1"
    assert written.read_text().startswith(note + "# training.lr was 0.0005 and is 0.001 from step 0\n")
    assert set(checkpoints(run_dir)) >= {"damaged_step_00000008", "damaged_step_00000008_2", "step_00000008"}
    assert recipes.load(written).training.lr == 0.001


def test_rank_0_chooses_the_checkpoint_when_the_job_holds_the_run_directory(two_ranks, recipe, run_dir, tmp_path):
    """Another rank sees an old listing, and another job saved while this one prepared."""
    for step in (4, 6):
        shutil.rmtree(checkpoint(run_dir, step))
    last = checkpoint(run_dir, STEPS).rename(tmp_path / checkpoint(run_dir, STEPS).name)
    for rank in two_ranks.run(whole_run, CASE, recipe, run_dir, (), None, False, True, last):
        assert (rank["code"], rank["error"]) == (0, None)
        assert all("is done: all 8 steps" in line for line in rank["said"])
    assert checkpoints(run_dir) == ["step_00000002", "step_00000008"]
