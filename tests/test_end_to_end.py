"""The commands as a user types them, on real text: train, be killed, go on, export, generate."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_prep.preprocess import preprocess
from data_prep.train_tokenizer import train_tokenizer
from leviathan_ds import run_directory
from leviathan_ds.model.weights import full_weights
from leviathan_ds.report import page

ROOT = Path(__file__).parent.parent
TEXT = Path(__file__).parent / "data_prep" / "minipile_tiny.jsonl"
STEPS, SAVE = 12, 5
RECIPE = {
    "model": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "make_vocab_size_divisible_by": 8,
        "generator": {"seed_size": 8, "num_heads": 2, "num_knots": 6, "rank": 8},
    },
    # Fewer samples in an epoch than the run takes: the middle of a later epoch is resumed too.
    "data": {"sequence_length": 512, "validation_fraction": 0.2, "num_workers": 0},
    "training": {
        "train_steps": STEPS,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "warmup_steps": 2,
        "precision": "fp32",
    },
    "run": {
        "log_interval": 3,
        "eval_interval": 6,
        "eval_samples": 4,
        "save_interval": SAVE,
        "keep_checkpoints": 9,
        "tensorboard": True,
        "profile_steps": [4],
    },
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    train_tokenizer([TEXT], folder / "tok.model", 600)
    preprocess([TEXT], folder / "tok.model", folder / "text", workers=1)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "prefixes": [str(folder / "text")]}}))
    return path


def command(recipe: Path, run_dir: Path, *options: str, ranks: int = 1, ds_config: str = "zero2") -> list[str]:
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
    port = str(20000 + os.getpid() % 20000)
    script = ["--master_port", port, str(ROOT / "launchers" / "pretrain.py")]
    arguments = ["--ds_config", str(ROOT / "ds_configs" / f"{ds_config}.json"), "--config", str(recipe)]
    return [*launcher, *script, *arguments, "--run_dir", str(run_dir), *options]


def start(arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def run_python(script: str, *arguments: str) -> str:
    return finish(start([sys.executable, str(ROOT / "launchers" / script), *arguments]))


def kill_at(process: subprocess.Popen, moment: Path) -> None:
    """kill -9 of the whole job as soon as a path exists."""
    deadline = time.monotonic() + 200
    while not moment.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{moment} never came"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(0.5)


def losses(run_dir: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run_dir / run_directory.METRICS).read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def tensorboard_losses(run_dir: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / run_directory.TENSORBOARD), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def learning_rates(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / run_directory.METRICS).read_text().splitlines()]
    return [record["lr"] for record in records if "loss" in record]


def last_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(full_weights(run_directory.complete_checkpoints(run_dir)[-1]))


LAYOUT = ("--parallel.tensor_model_parallel_size=2", "--parallel.sequence_parallel=true")


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    output = finish(start(command(recipe, run_dir, *LAYOUT, ranks=2)))
    assert "starting: leviathan" in output
    return run_dir


def test_a_killed_run_ends_as_if_undisturbed(recipe, undisturbed, tmp_path):
    """kill -9 at the moment when a save begins; losses and weights bitwise equal afterwards (fp32, TP 2)."""
    run_dir = tmp_path / "killed"
    saving = run_dir / "checkpoints" / ".writing_step_00000010"
    kill_at(start(command(recipe, run_dir, *LAYOUT, ranks=2)), saving)
    assert [path.name for path in run_directory.complete_checkpoints(run_dir)] == ["step_00000005"]
    output = finish(start(command(recipe, run_dir, *LAYOUT, ranks=2)))
    assert "resuming at step 5" in output
    assert losses(run_dir) == losses(undisturbed)
    assert list(losses(run_dir)) == list(range(1, STEPS + 1))
    starts = run_directory.read_lines(run_dir / run_directory.STARTS)
    assert [start["first_step"] for start in starts] == [0, 5]
    assert tensorboard_losses(run_dir) == tensorboard_losses(undisturbed), "each step once, as if undisturbed"
    expected = last_weights(undisturbed)
    for name, weight in last_weights(run_dir).items():
        assert torch.equal(weight, expected[name]), name
    assert not list((run_dir / "checkpoints").glob(".*")), "leftovers of the kill"


def test_a_run_is_measured(undisturbed):
    """Every column of docs/metrics.md that a CPU can have, where it belongs; a start, traces, a page."""
    records = run_directory.read_lines(undisturbed / run_directory.METRICS)
    steps = [record for record in records if "loss" in record]
    logged = [record for record in steps if "tokens_per_s" in record]
    assert [record["step"] for record in logged] == [3, 5, 6, 9, 10, 12]
    for record in logged:
        components = [record[f"grad_norm_{component}"] for component in ("generator", "body", "head")]
        assert sum(norm**2 for norm in components) ** 0.5 == pytest.approx(record["grad_norm"], rel=1e-5)
        assert record["tokens_per_s_per_gpu"] == record["tokens_per_s"] / 2
        assert 0 < record["data_wait_share"] < 1
        assert 0 < record["memory_gib"] < 64
        assert record["skipped_steps"] == 0
    health = [record for record in records if "knots_used" in record]
    assert [record["step"] for record in health] == [0, 6, 12]
    assert all(
        0 < record["knots_used"] <= 1 and record["product_min"] < record["product_max"] for record in health
    )
    summary = json.loads((undisturbed / run_directory.SUMMARY).read_text())
    assert 0 < summary["data_wait_share"] < 1

    (start,) = run_directory.read_lines(undisturbed / run_directory.STARTS)
    assert (start["world_size"], start["device"], start["versions"]["torch"]) == (2, "cpu", torch.__version__)
    (dataset,) = start["data"]
    assert dataset["share"] == 1
    assert sum(counts["tokens"] for counts in dataset["domains"].values()) == dataset["tokens"]
    # Both ranks of the one copy of the model.
    traces = sorted(path.name for path in (undisturbed / run_directory.TRACES).iterdir())
    assert traces == [f"step_00000004_rank0000{rank}.json.gz" for rank in (0, 1)]
    assert page(undisturbed).count("<figure>") >= 10


@pytest.mark.slow  # test_run.py has it in its pool of ranks
def test_a_finished_run_says_so(recipe, undisturbed):
    before = (undisturbed / run_directory.METRICS).read_text()
    output = finish(start(command(recipe, undisturbed, *LAYOUT, ranks=2)))
    assert "is done: all 12 steps" in output
    assert (undisturbed / run_directory.METRICS).read_text() == before


@pytest.mark.slow  # test_run.py and test_checkpoint.py have it in their pools of ranks
def test_a_damaged_checkpoint_is_named_and_passed_over(recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(undisturbed), str(run_dir)], check=True)
    cut = run_dir / "checkpoints" / "step_00000012" / "weights_tp01.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (changed,) = (run_dir / "checkpoints" / "step_00000010").glob("zero_pp_rank_0_mp_rank_01*")
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    output = finish(start(command(recipe, run_dir, *LAYOUT, ranks=2)))
    for line in (f"{cut}: {cut.stat().st_size - 1} bytes", f"{changed}: its content has changed"):
        assert f"passing over a checkpoint: {line}" in output
    assert "resuming at step 5" in output
    assert losses(run_dir) == losses(undisturbed)


@pytest.mark.parametrize("freed", [True, pytest.param(False, marks=pytest.mark.slow)])  # slow: test_reshard.py
def test_a_run_goes_on_on_another_cluster(freed, recipe, undisturbed, tmp_path):
    """From TP 2 at ZeRO 2 to one rank at ZeRO 3: through a checkpoint without a layout, and by itself."""
    run_dir = tmp_path / "moved"
    shutil.copytree(undisturbed, run_dir)
    for later in ("step_00000010", "step_00000012"):
        shutil.rmtree(run_dir / "checkpoints" / later)
    if freed:
        moved, run_dir = run_dir, tmp_path / "freed"
        output = run_python("reshard.py", str(moved), "--output", str(run_dir))
        assert f"goes on with --run_dir {run_dir}, on any layout" in output
    layout = ("--training.micro_batch_size=4",)
    output = finish(start(command(recipe, run_dir, *layout, ranks=1, ds_config="zero3")))
    assert "resuming at step 5 on another layout" in output
    assert losses(run_dir) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert learning_rates(run_dir) == learning_rates(undisturbed)


def test_export_evaluate_and_generate(recipe, undisturbed, tmp_path):
    """From a TP 2 checkpoint in one process; `from_pretrained` knows no code of ours."""
    output = run_python("export_hf.py", "--checkpoint", str(undisturbed), "--output", str(tmp_path / "hf"))
    assert "largest logit difference" in output
    summary = json.loads((undisturbed / run_directory.SUMMARY).read_text())
    assert summary["hf_max_logit_diff"] < 1e-4
    assert summary["final_val_loss"] < summary["initial_val_loss"]
    prefix = yaml.safe_load(recipe.read_text())["data"]["prefixes"][0]
    scores = tmp_path / "scores.json"
    arguments = ("--data", prefix, "--samples", "4", "--json", str(scores))
    run_python("evaluate.py", "--checkpoint", str(undisturbed), *arguments)
    (model,) = json.loads(scores.read_text())["models"]
    assert model["overall"]["loss"] == pytest.approx(summary["final_val_loss"], abs=1e-4)
    options = ("--prompt", "The ", "--max_new_tokens", "8")
    first = run_python("generate.py", "--checkpoint", str(undisturbed), *options)
    assert first.startswith("The ") and first == run_python(
        "generate.py", "--checkpoint", str(undisturbed), *options
    )
    assert load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"].shape == (600, 32)


@pytest.mark.slow  # test_distributed.py has the weights, test_export.py the export
def test_equal_initial_weights_export_equally_at_tp_1_and_2(recipe, tmp_path):
    """The weights before the first step do not depend on the layout, and neither does their export."""
    tables = []
    for ranks, layout, stage in ((1, (), "zero3"), (2, LAYOUT[:1], "zero1")):
        run_dir = tmp_path / f"tp{ranks}"
        # A vanishing learning rate: the weights stay the initial ones to the last bit that matters.
        still = ("--training.lr=1e-30", "--training.min_lr=0", "--training.train_steps=2", "--run.eval_samples=2")
        finish(start(command(recipe, run_dir, *still, *layout, ranks=ranks, ds_config=stage)))
        run_python("export_hf.py", "--checkpoint", str(run_dir), "--output", str(tmp_path / f"hf{ranks}"))
        tables.append(load_file(tmp_path / f"hf{ranks}" / "model.safetensors"))
    assert tables[0].keys() == tables[1].keys()
    for name, tensor in tables[0].items():
        assert torch.equal(tensor, tables[1][name]), name
