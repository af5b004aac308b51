"""Loss, perplexity and bits per byte against plain computations on the same text; launchers/evaluate.py."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from distributed_cases import Case, evaluation_run
from evaluation_cases import Layout, evaluated
from exports import MODEL, make_run
from megatron.core.datasets.utils import Split
from run_cases import whole_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.preprocess import preprocess
from data_prep.token_counts import load_token_counts
from data_prep.train_tokenizer import train_tokenizer
from launchers import evaluate as launcher
from leviathan_ds import run_directory
from leviathan_ds.config import DataConfig
from leviathan_ds.data.dataset import check_data
from leviathan_ds.data.index import open_part
from leviathan_ds.evaluation.frequency import deciles, training_frequencies
from leviathan_ds.evaluation.scores import Score, blended
from leviathan_ds.export.publish import export as publish
from leviathan_ds.parallel import topology
from leviathan_ds.trained_model import find_trained_model

LENGTH, SAMPLES = 64, 13
SMALL = dataclasses.replace(MODEL, vocab_size=603, num_layers=1)
TEXT = Path(__file__).parent / "data_prep" / "minipile_tiny.jsonl"


@pytest.fixture(scope="module")
def data(corpus: Path) -> DataConfig:
    return DataConfig((str(corpus),), sequence_length=LENGTH, validation_fraction=0.3)


@pytest.fixture(scope="module", autouse=True)
def no_groups_before() -> None:
    """As a command finds it."""
    topology.shutdown()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_tokenizer: Path, data: DataConfig) -> Path:
    """A checkpoint of two tensor-parallel ranks, with three rows beyond the tokenizer."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    with one_rank_alone():
        return make_run(folder, corpus_tokenizer, dataclasses.replace(MODEL, vocab_size=603), 2, data=data)


@pytest.fixture(scope="module")
def other(run: Path, corpus_tokenizer: Path, data: DataConfig) -> Path:
    model = dataclasses.replace(MODEL, vocab_size=600, embedding="dense_tied", init_method_std=0.05)
    with one_rank_alone():
        return make_run(run.parent / "other", corpus_tokenizer, model, data=data)


@pytest.fixture(scope="module")
def export(run: Path) -> Path:
    with one_rank_alone():
        publish(find_trained_model(run), run.parent / "hf", text=Path(__file__))
    return run.parent / "hf"


@contextmanager
def one_rank_alone() -> Iterator[None]:
    topology.initialize(1)
    yield
    topology.shutdown()


def evaluation(tmp_path: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    """What `python launchers/evaluate.py` writes of SAMPLES samples."""
    file = tmp_path / "figures.json"
    options = ["--samples", SAMPLES, "--micro_batch_size", 4, "--json", file, *arguments]
    assert launcher.main([str(option) for option in options]) == code
    return json.loads(file.read_text()) if code == 0 else {}


def plain_figures(export: Path, prefix: Path, data: DataConfig) -> dict[str, Any]:
    """By transformers, torch's cross-entropy and counting, of the same windows of text, one after the other."""
    model = AutoModelForCausalLM.from_pretrained(export)
    pieces = AutoTokenizer.from_pretrained(export)
    counts = Counter(np.fromfile(f"{prefix}.bin", np.uint16).tolist())
    decile_of, before = {}, 0
    for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        decile_of[token] = min(9, 10 * (2 * before + count) // (2 * sum(counts.values())))
        before += count
    (part,) = check_data(data).validation
    samples = open_part(data, part, None, Split.valid)
    nats, tokens, num_bytes = Counter(), Counter(), 0
    for index in range(SAMPLES):
        ids, labels = samples[index]["tokens"], samples[index]["labels"]
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids[None]).logits[0], labels, reduction="none")
        for label, loss in zip(labels.tolist(), losses.double().tolist(), strict=True):
            nats[decile_of.get(label, 9)] += loss
            tokens[decile_of.get(label, 9)] += 1
            piece = pieces.convert_ids_to_tokens(label)
            if label != pieces.eos_token_id:
                num_bytes += 1 if piece.startswith("<0x") else len(piece.replace("▁", " ").encode())
    loss = nats.total() / tokens.total()
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": nats.total() / math.log(2) / num_bytes,
        "tokens": tokens.total(),
        "bytes": num_bytes,
        "deciles": [nats[i] / tokens[i] if tokens[i] else None for i in range(10)],
        "shares": [tokens[i] / tokens.total() for i in range(10)],
    }


def test_equals_a_plain_computation(
    tmp_path: Path, run: Path, export: Path, corpus: Path, data: DataConfig
) -> None:
    """Of the checkpoint, and of the export, which needs the recipe to know what is held out."""
    expected = plain_figures(export, corpus, data)
    ours = evaluation(tmp_path, "--checkpoint", run, "--data", corpus)
    theirs = evaluation(tmp_path, "--checkpoint", export, "--data", corpus, "--config", run / "recipe.yaml")
    for found in (ours["models"][0], theirs["models"][0]):
        for key in ("loss", "perplexity", "bits_per_byte", "tokens", "bytes"):
            assert found["overall"][key] == pytest.approx(expected[key], rel=2e-5), key
        assert [each["share"] for each in found["deciles"]] == pytest.approx(expected["shares"])
        assert [each["loss"] for each in found["deciles"]] == pytest.approx(expected["deciles"], rel=2e-5)
        assert sum(each["ids"] for each in found["deciles"]) == 600
    first, second = ours["models"][0]["overall"], theirs["models"][0]["overall"]
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
def test_equal_on_two_ranks(two_ranks, tmp_path: Path, run: Path, corpus: Path, tp: int) -> None:
    """13 samples in passes of 4: on two data-parallel ranks the last pass is not full."""
    arguments = ["--checkpoint", str(run), "--data", str(corpus), "--samples", str(SAMPLES)]
    alone = evaluation(tmp_path, *arguments)["models"][0]  # builds the index, too
    options = [*arguments, "--micro_batch_size", "4", "--tensor_model_parallel_size", str(tp)]
    for found in two_ranks.run(evaluated, Layout(tp), options):
        overall = found["models"][0]["overall"]
        for key, value in alone["overall"].items():
            assert overall[key] == pytest.approx(value, rel=1e-5), key


def test_two_ranks_share_the_samples_and_sum_their_scores(two_ranks) -> None:
    """15 samples are three passes of 4 and one of 3, or two on each of two ranks."""
    alone = evaluation_run(1, 15)
    assert sum(group.tokens for group in alone) == 15 * 15  # one of 16 has no weight
    for found in two_ranks.run(evaluation_run, 2, 15):
        for group, expected in zip(found, alone, strict=True):
            assert (group.tokens, group.bytes) == (expected.tokens, expected.bytes)
            assert group.nats == pytest.approx(expected.nats, rel=1e-6)


def test_bfloat16_and_attention_within_documents(
    tmp_path: Path, corpus: Path, corpus_tokenizer: Path, data: DataConfig
) -> None:
    """Both formats as the checkpoint; Leviathan's needs no --trust_remote_code.

    The plain one in float32: in bfloat16 its table is a rounding of the generator's, which the losses show.
    """
    own = dataclasses.replace(data, reset_attention_mask=True)
    with one_rank_alone():
        run = make_run(tmp_path / "run", corpus_tokenizer, dtype=torch.bfloat16, model=SMALL, data=own)
        for form, dtype in (("llama", torch.float32), ("leviathan", torch.bfloat16)):
            publish(find_trained_model(run), tmp_path / form, form=form, dtype=dtype, text=Path(__file__))
    recipe = run / run_directory.RECIPE

    def losses(model: Path) -> list[float]:
        (found,) = evaluation(tmp_path, "--checkpoint", model, "--data", corpus, "--config", recipe)["models"]
        return [found["overall"]["loss"], *(each["loss"] for each in found["deciles"])]

    expected = losses(run)
    for form in ("llama", "leviathan"):
        assert losses(tmp_path / form) == pytest.approx(expected, abs=1e-4), form
    recipe.write_text(recipe.read_text().replace("reset_attention_mask: true", "reset_attention_mask: false"))
    across = losses(tmp_path / "leviathan")
    assert across == pytest.approx(losses(run), abs=1e-4) and abs(across[0] - expected[0]) > 1e-3


def test_where_two_models_differ(
    tmp_path: Path, run: Path, other: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluation(tmp_path, "--checkpoint", run, "--compare", other, "--data", corpus)
    first, second = found["models"]
    change = found["difference"]
    assert change["overall"] == pytest.approx(second["overall"]["loss"] - first["overall"]["loss"])
    assert sum(each["part_of_overall"] for each in change["deciles"]) == pytest.approx(change["overall"])
    for one, two, each in zip(first["deciles"], second["deciles"], change["deciles"], strict=True):
        assert each["loss"] == pytest.approx(two["loss"] - one["loss"])
        assert each["part_of_overall"] == pytest.approx(one["share"] * each["loss"])
    printed = capsys.readouterr().out
    assert "part of the whole" in printed and "10 (rare)" in printed and f"{change['overall']:+.4f}" in printed


def test_a_blend_is_scored_by_domain(
    tmp_path: Path, run: Path, corpus: Path, corpus_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two domains with held-out data of their own, one without any; overall by the blend's weights."""
    lines = TEXT.read_text().splitlines()
    for name, part in (("one", lines[:9]), ("other", lines[9:20])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
        preprocess([tmp_path / f"{name}.jsonl"], corpus_tokenizer, tmp_path / name)
    preprocess([TEXT], corpus_tokenizer, tmp_path / "elsewhere")
    entries = [
        {"name": "One", "train": str(corpus), "validation": "one", "test": "other", "weight": 3.0},
        {"name": "Other", "train": "elsewhere", "validation": "other", "weight": 1.0},
        {"name": "Small", "train": "small", "weight": 1.0},
    ]
    preprocess([tmp_path / "one.jsonl"], corpus_tokenizer, tmp_path / "small")
    blend = tmp_path / "blend.yaml"
    blend.write_text(yaml.safe_dump({"datasets": entries}))

    def scored(data: Path, split: str) -> dict[str, Any]:
        return evaluation(tmp_path, "--checkpoint", run, "--data", data, "--split", split)["models"][0]

    one, other = (scored(tmp_path / name, "all")["overall"] for name in ("one", "other"))
    found = scored(blend, "validation")
    assert list(found["datasets"]) == ["One", "Other"]
    assert found["datasets"]["One"] == pytest.approx(one, rel=1e-6)
    assert found["datasets"]["Other"] == pytest.approx(other, rel=1e-6)
    assert found["overall"]["loss"] == pytest.approx(0.75 * one["loss"] + 0.25 * other["loss"], rel=1e-6)
    assert found["overall"]["tokens"] == one["tokens"] + other["tokens"]
    assert scored(blend, "test")["datasets"] == {"One": pytest.approx(other, rel=1e-6)}
    assert scored(blend, "train")["overall"]["tokens"] == scored(blend, "all")["overall"]["tokens"]
    del entries[0]["test"]
    blend.write_text(yaml.safe_dump({"datasets": entries}))
    assert launcher.main(["--checkpoint", str(run), "--data", str(blend), "--split", "test"]) == 2
    assert "blend.yaml: no dataset names test data" in capsys.readouterr().err


def test_tasks_of_a_checkpoint(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluation(tmp_path, "--checkpoint", run, "--tasks", "sample_last_word", "--limit", 3)
    assert found["models"][0]["tasks"]["sample_last_word"]["acc"] in (0, 1 / 3, 2 / 3, 1)
    assert "sample_last_word" in capsys.readouterr().out


def test_mistakes_are_one_line(
    tmp_path: Path, run: Path, export: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer([TEXT], tmp_path / "tok.model", 500)
    preprocess([TEXT], tmp_path / "tok.model", tmp_path / "foreign")
    own = ("--config", run / "recipe.yaml")
    for arguments, message in (
        (("--checkpoint", run), "name what to evaluate on"),
        (("--checkpoint", run, "--data", tmp_path / "none"), "none"),
        (("--checkpoint", tmp_path / "none", "--data", corpus), "does not exist"),
        (("--checkpoint", run, "--data", tmp_path / "foreign"), "was encoded with"),
        (
            ("--checkpoint", export, "--data", tmp_path / "foreign", "--split", "all"),
            "another tokenizer than that",
        ),
        (("--checkpoint", export, "--data", tmp_path / "foreign", *own), "was encoded with"),
        (("--checkpoint", export, "--tasks", "sample_last_word"), "lm_eval --model hf"),
        (("--checkpoint", run, "--data", corpus, "--split", "test"), "--split test is of blend files"),
        (("--checkpoint", run, "--data", corpus, tmp_path / "b.yaml"), "--data takes one blend file"),
        (("--checkpoint", run, "--data", corpus, "--tensor_model_parallel_size", 2), "number of ranks, 1"),
        (("--checkpoint", run, "--data", corpus, "--json", tmp_path / "no" / "x.json"), "there is no folder"),
        (
            ("--checkpoint", run, "--data", corpus, "--train_data", tmp_path / "foreign"),
            "was encoded with another",
        ),
    ):
        evaluation(tmp_path, *arguments, code=2)
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1, error


def test_deciles_hold_a_tenth_of_the_training_tokens(corpus: Path, data: DataConfig) -> None:
    counts = load_token_counts(corpus)
    assert counts.tolist() == np.bincount(np.fromfile(f"{corpus}.bin", np.uint16), minlength=600).tolist()
    of_id = deciles(training_frequencies(check_data(data).train))
    assert (np.diff(of_id[np.argsort(-counts, kind="stable")]) >= 0).all(), "rarer tokens in later deciles"
    held = np.bincount(of_id, weights=counts, minlength=10) / counts.sum()
    assert np.abs(held - 0.1).max() <= counts.max() / counts.sum()
    assert set(of_id[counts == 0]) == {9}
    # By hand: of 20 tokens id 1 has 10, id 3 has 6, ids 0 and 4 have 2: middles at 5, 13, 17 and 19 of 20.
    assert deciles(np.array([2.0, 10.0, 0.0, 6.0, 2.0])).tolist() == [8, 2, 9, 6, 9]


def test_domains_are_drawn_by_their_shares() -> None:
    one, two = [Score(30.0, 10, 40), Score(0.0, 0, 0)], [Score(4.0, 2, 4), Score(12.0, 2, 8)]
    groups = blended([one, two], [0.25, 0.75])
    assert groups[0].nats == pytest.approx(0.25 * 3 + 0.75 * 1)
    assert [group.tokens for group in groups] == pytest.approx([0.25 + 0.375, 0.375])
    assert math.isnan(Score().loss) and math.isnan(Score().bits_per_byte)


RECIPE = """
model:
  {hidden_size: 32, num_layers: 1, num_attention_heads: 2, generator: {seed_size: 8, num_heads: 2, rank: 4}}
data: {prefixes: ["PREFIX"], sequence_length: 256, validation_fraction: 0.2, num_workers: 0}
training: {train_steps: 2, warmup_steps: 1, micro_batch_size: 2, global_batch_size: 4, precision: fp32}
run: {eval_samples: 3, eval_interval: 1, save_interval: 2}
evaluation: {deciles: true, tasks: [sample_last_word, sample_next_sentence], tasks_interval: 2, tasks_limit: 3}
"""


@pytest.mark.parametrize(
    "case",
    [Case(tp=2, zero="zero3", sequence_parallel=True), pytest.param(Case(zero="zero3"), marks=pytest.mark.slow)],
)
def test_validation_measures_deciles_and_tasks(two_ranks, tmp_path: Path, corpus: Path, case: Case) -> None:
    """In a run under ZeRO-3, on ranks that share a model or the data; then the same of its last checkpoint."""
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("PREFIX", str(corpus)))
    options = (
        f"--parallel.tensor_model_parallel_size={case.tp}",
        f"--parallel.sequence_parallel={str(case.sequence_parallel).lower()}",
    )
    for rank in two_ranks.run(whole_run, case, tmp_path / "recipe.yaml", tmp_path / "run", options):
        assert (rank["code"], rank["error"]) == (0, None)
    records = run_directory.read_lines(tmp_path / "run" / run_directory.METRICS)
    tasks = [record for record in records if "task/sample_last_word/acc" in record]
    assert [record["step"] for record in tasks] == [0, 2], "at every second validation"
    losses = [record for record in records if "val_loss" in record]
    by_decile = [record for record in records if "val_loss_decile/01" in record]
    assert [record["step"] for record in by_decile] == [record["step"] for record in losses] == [0, 1, 2]

    arguments = ["--checkpoint", tmp_path / "run", "--data", corpus, "--samples", 3, "--limit", 3]
    names = "sample_last_word,sample_next_sentence"
    (after,) = evaluation(tmp_path, *arguments, "--tasks", names)["models"]
    assert losses[-1]["val_loss"] == pytest.approx(after["overall"]["loss"], rel=1e-5)
    for number, decile in enumerate(after["deciles"], start=1):
        assert by_decile[-1][f"val_loss_decile/{number:02d}"] == pytest.approx(decile["loss"], rel=1e-5)
    for task, metrics in after["tasks"].items():
        for metric, value in metrics.items():
            if "stderr" not in metric:
                assert tasks[-1][f"task/{task}/{metric}"] == pytest.approx(value, rel=1e-4)
