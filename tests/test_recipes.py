"""The recipes that ship: sizes as named, twins alike, and launchers/describe.py over them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launchers import describe
from leviathan_ds import accounting
from leviathan_ds.communication import communication
from leviathan_ds.recipe import differences, load

ROOT = Path(__file__).parents[1]
NOMINAL = {"60m": 60e6, "109m": 109e6, "200m": 200e6, "400m": 400e6, "421m": 421e6, "1200m": 1.2e9}
PAPER_TOKENS = {"200m": 4.2e9, "400m": 8.4e9, "1200m": 24.1e9}
TWINS = ("dense_tied", "dense_untied")


def recipe_path(embedding: str, size: str) -> Path:
    return ROOT / "recipes" / f"{embedding}_{size}.yaml"


def run_describe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    assert describe.main(["--config", str(recipe_path("leviathan", "1200m")), *options]) == 0
    return capsys.readouterr().out


def test_every_recipe_in_the_folder_loads_and_is_known() -> None:
    names = {path.name for path in (ROOT / "recipes").glob("*.yaml")}
    expected = {recipe_path(kind, size).name for kind in ("leviathan", *TWINS) for size in NOMINAL}
    assert expected <= names
    for name in sorted(names):
        load(ROOT / "recipes" / name)


@pytest.mark.parametrize("size", NOMINAL)
def test_size_is_within_three_percent_of_the_name(size: str) -> None:
    model = load(recipe_path("leviathan", size)).model
    assert model.vocab_size == 200_376
    count = accounting.count_parameters(model)
    assert count.total == pytest.approx(NOMINAL[size], rel=0.03)
    # k·b·d + h·d² + 2·h·d + h·d·κ·r + h·r·D at the paper's sizes: 1,204,352 + 512·D
    assert count.embedding == 1_204_352 + 512 * model.hidden_size


def test_the_largest_generator_is_the_papers() -> None:
    model = load(recipe_path("leviathan", "1200m")).model
    assert model.hidden_size == 2048
    assert accounting.count_parameters(model).embedding == 2_252_928
    table = accounting.count_parameters(replace(model, embedding="dense_untied")).embedding
    assert table == pytest.approx(410.4e6, rel=1e-3)


@pytest.mark.parametrize("size", NOMINAL)
@pytest.mark.parametrize("embedding", TWINS)
def test_twins_differ_in_the_embedding_alone(size: str, embedding: str) -> None:
    ours, twin = load(recipe_path("leviathan", size)), load(recipe_path(embedding, size))
    assert differences(ours, twin) == {
        "model.embedding": ("leviathan", embedding),
        "model.generator.sigmoid_divisor": (0.5, 2.0),  # which a dense model has no use for
    }
    assert accounting.count_parameters(ours.model).body == accounting.count_parameters(twin.model).body


@pytest.mark.parametrize("size", NOMINAL)
def test_budgets_batches_and_memory(size: str) -> None:
    recipe = load(recipe_path("leviathan", size))
    assert recipe.data.sequence_length == recipe.training.global_batch_size == 512
    tokens = recipe.training.train_steps * 512 * 512
    assert tokens == pytest.approx(PAPER_TOKENS.get(size, 21 * NOMINAL[size]), rel=1e-3)
    for world_size in (1, 2, 4, 8):
        assert recipe.gradient_accumulation_steps(world_size) >= 1
    for embedding in ("leviathan", *TWINS):
        memory = accounting.estimate_memory(load(recipe_path(embedding, size)), 1, 2)
        assert memory.total < 60 * 2**30  # of 80 GB, with room for what is not counted


@pytest.mark.parametrize("size", NOMINAL)
@pytest.mark.parametrize("embedding", ["leviathan", *TWINS])
def test_the_documented_table_is_current(size: str, embedding: str) -> None:
    recipe = load(recipe_path(embedding, size))
    model, count = recipe.model, accounting.count_parameters(recipe.model)
    gflops = accounting.flops_per_token(model, recipe.data.sequence_length).total / 1e9
    numbers = (model.hidden_size, model.num_layers, model.num_attention_heads)
    counts = (f"{n:,}" for n in (count.embedding, count.body, count.head, count.total))
    row = " | ".join([f"| {embedding}_{size}", *map(str, numbers), *counts, f"{gflops:.4f}"])
    assert row in (ROOT / "docs" / "recipes.md").read_text()


def test_describe_prints_the_accounting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run_describe(capsys, monkeypatch, "--data_parallel_size", "8")
    recipe = load(recipe_path("leviathan", "1200m"))
    for expected in (
        "2,252,928",
        "410,370,048",
        f"{accounting.count_parameters(recipe.model).total:,}",
        f"{accounting.flops_per_token(recipe.model, 512).total / 1e9:.4f}",
        f"{accounting.estimate_memory(recipe, 8, 2).total / 2**30:.2f}",
        f"{communication(recipe, 2, 8)['dp', 'all_reduce'] / 1e6:,.1f}",
        "16 × 8 × 4",
        "24,099,946,496",
    ):
        assert expected in printed


def test_describe_follows_overrides(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--zero_stage", "3", "--parallel.tensor_model_parallel_size", "2", "--training.precision", "fp32")
    printed = run_describe(capsys, monkeypatch, *options, "--model.embedding", "dense_tied")
    assert "TP 2, DP 1, ZeRO 3, fp32" in printed
    assert "dense_tied" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "no/such.yaml"], "no/such.yaml"),
        ([], "model.vocab_size"),
        (["--model.vocab_size", "1000", "--data_parallel_size", "3"], "training.global_batch_size"),
        (["--model.vocab_size", "1000", "--data_parallel_size", "0"], "--data_parallel_size"),
        (["--model.vocab_size", "1000", "--zero_stage", "4"], "zero_stage"),
        (["--model.vocab_sise", "1000"], "did you mean --model.vocab_size?"),
    ],
)
def test_describe_answers_mistakes_with_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert describe.main(options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_describe_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys; from launchers.describe import main; main(sys.argv[1:]);"
        "sys.exit(sorted({'torch', 'deepspeed', 'megatron'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, "--config", str(recipe_path("leviathan", "60m"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
