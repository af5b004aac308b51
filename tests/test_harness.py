"""The native adapter of EleutherAI's harness against hand computations, and its own `hf` model on the export."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_cases import Layout, answers, requests_of
from exports import MODEL, make_run

from leviathan_ds.config import DataConfig
from leviathan_ds.evaluation import harness, sample_tasks
from leviathan_ds.evaluation.scores import evaluating
from leviathan_ds.export.llama import to_llama
from leviathan_ds.export.publish import export as publish
from leviathan_ds.trained_model import TrainedModel, find_trained_model

LENGTH = 192
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
PAIRS = [
    ("It was the best of times, it was the worst of", " times"),
    ("", "The whale is a mammal."),
    ("The people of the United States ", "of America"),  # the harness moves the space
    (TEXT * 8, " Call me Ishmael."),  # the context begins before the training length
    ("a", " b"),
    ("", "a"),
    ("naïve 漢字 ", "𝔘nicode"),  # bytes
]
TASKS = ["sample_last_word", "sample_next_sentence"]


@pytest.fixture(scope="module", autouse=True)
def offline(one_rank: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_tokenizer: Path) -> Path:
    model = dataclasses.replace(MODEL, vocab_size=603)  # three rows beyond the tokenizer
    folder = tmp_path_factory.mktemp("harness") / "run"
    return make_run(folder, corpus_tokenizer, model, 2, data=DataConfig(sequence_length=LENGTH))


@pytest.fixture(scope="module")
def trained(run: Path) -> TrainedModel:
    return find_trained_model(run)


@pytest.fixture(scope="module")
def export(trained: TrainedModel) -> Path:
    folder = trained.run.parent / "hf"
    publish(trained, folder, text=Path(__file__))
    return folder


def by_hand(trained: TrainedModel) -> list[tuple[float, bool]]:
    """Each pair on the Llama form, alone, by softmax over whole logits."""
    llama, tokenizer, found = to_llama(trained), trained.tokenizer, []
    for context, continuation in PAIRS:
        whole = [tokenizer.eod_id, *tokenizer.encode(context + continuation)]
        start = len(tokenizer.encode(context.rstrip())) + 1
        cut = max(0, len(whole) - LENGTH - 1)
        with torch.no_grad():
            logits = llama(torch.tensor([whole[cut:-1]])).logits[0].double()
        assert len(whole) > LENGTH + 1 or not cut
        scored = whole[start:]
        rows = logits[-len(scored) :]
        chosen = rows.log_softmax(-1).gather(1, torch.tensor(scored)[:, None])
        found.append((chosen.sum().item(), rows.argmax(-1).tolist() == scored))
    return found


def greedy_pair(trained: TrainedModel) -> tuple[str, str]:
    """A context and the one token that the model finds likeliest, as text that encodes to that token."""
    llama, tokenizer = to_llama(trained), trained.tokenizer
    for word in TEXT.split():
        ids = [tokenizer.eod_id, *tokenizer.encode(word)]
        with torch.no_grad():
            best = int(llama(torch.tensor([ids])).logits[0, -1].argmax())
        text = tokenizer.decode([*ids, best])[len(word) :]
        if tokenizer.encode(word + text) == [*ids[1:], best]:
            return word, text
    raise AssertionError("no such pair")


def same(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=2e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_loglikelihood_equals_a_hand_computation(run: Path, trained: TrainedModel) -> None:
    (found,) = answers(Layout(1), run, 3, {"loglikelihood": PAIRS}).values()
    same(found, by_hand(trained))
    assert len(trained.tokenizer.encode(TEXT * 8)) > LENGTH
    pair = greedy_pair(trained)
    ((value, greedy),) = answers(Layout(1), run, 1, {"loglikelihood": [pair]})["loglikelihood"]
    assert greedy and value > -math.log(603), "likelier than a guess"


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_share_the_work_and_agree(two_ranks, run: Path, trained: TrainedModel, tp: int) -> None:
    """Two data-parallel ranks, and two that share the model; seven requests in batches of two."""
    asked = {
        "loglikelihood": PAIRS,
        "loglikelihood_rolling": [(TEXT * 10,), ("a",), ("",)],
        "generate_until": [("It was ", {"until": ["."], "max_gen_toks": 9}), (TEXT, {"max_gen_toks": 5})],
    }
    alone = answers(Layout(1), run, 2, asked)
    same(alone["loglikelihood"], by_hand(trained))
    for found in two_ranks.run(answers, Layout(tp), run, 2, asked):
        same(found["loglikelihood"], alone["loglikelihood"])
        assert found["loglikelihood_rolling"] == pytest.approx(alone["loglikelihood_rolling"], abs=2e-4)
        assert found["generate_until"] == alone["generate_until"]


def hf_model(export: Path, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(export), device="cpu", dtype="float32", batch_size=4, **options)


def test_equals_the_harness_own_model_on_the_export(run: Path, export: Path, trained: TrainedModel) -> None:
    asked = {
        "loglikelihood": PAIRS,
        "generate_until": [
            ("It was the ", {"until": ["\n", "e"], "max_gen_toks": 12}),
            ("", {"until": [], "max_gen_toks": 6}),
            (TEXT * 8, {"until": ["."], "max_gen_toks": 7, "do_sample": False}),
        ],
    }
    found = answers(Layout(1), run, 4, asked)
    theirs = hf_model(export, add_bos_token=True)
    same(found["loglikelihood"], theirs.loglikelihood(requests_of(asked["loglikelihood"])))
    # Random weights write bytes that are no text; what stands for those is not the adapter's to say.
    theirs.tok_decode = lambda ids, **_: "</s>" if isinstance(ids, int) else trained.tokenizer.decode(list(ids))
    alone = [theirs.generate_until(requests_of([each]))[0] for each in asked["generate_until"]]
    assert found["generate_until"] == alone

    texts = [(TEXT * 10,), ("The whale",)]
    rolling = answers(Layout(1), run, 4, {"loglikelihood_rolling": texts})["loglikelihood_rolling"]
    assert rolling == pytest.approx(hf_model(export).loglikelihood_rolling(requests_of(texts)), abs=5e-4)


def test_tasks_score_as_on_the_export(run: Path, export: Path, trained: TrainedModel) -> None:
    from lm_eval import simple_evaluate

    model = trained.build()
    adapter = harness.LeviathanLM(model, trained.tokenizer, LENGTH, batch_size=8)
    before = torch.random.get_rng_state()
    with evaluating(model):
        ours = harness.run_tasks(adapter, TASKS, None, limit=8, bootstrap_iters=100)
    assert torch.equal(torch.random.get_rng_state(), before), "training's random numbers are its own"
    manager = harness.task_manager(TASKS, None)
    theirs: Any = simple_evaluate(
        hf_model(export, add_bos_token=True), tasks=TASKS, task_manager=manager, limit=8, bootstrap_iters=0
    )
    assert ours.keys() == set(TASKS)
    for task in TASKS:
        for metric, value in ours[task].items():
            if not metric.endswith("_stderr"):
                assert value == pytest.approx(theirs["results"][task][f"{metric},none"], rel=1e-4)
    assert ours["sample_next_sentence"].keys() == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert 0 < ours["sample_last_word"]["perplexity"] < math.inf
    by_name: Any = simple_evaluate(
        "leviathan", {"checkpoint": str(run)}, tasks=TASKS[:1], task_manager=manager, limit=8, bootstrap_iters=0
    )
    found = by_name["results"][TASKS[0]]["perplexity,none"]
    assert found == pytest.approx(ours[TASKS[0]]["perplexity"], rel=1e-4)


def test_shipped_tasks_come_from_the_sample_corpus() -> None:
    for name, content in sample_tasks.made().items():
        assert (harness.SAMPLE_TASKS / name).read_bytes() == content, f"{name}: python -m {sample_tasks.__name__}"
    for line in (harness.SAMPLE_TASKS / "sample_last_word.jsonl").read_text().splitlines():
        *before, word = json.loads(line)["text"].split(" ")
        assert word in " ".join(before)
    examples = [
        json.loads(line) for line in (harness.SAMPLE_TASKS / "sample_next_sentence.jsonl").read_text().splitlines()
    ]
    assert all(len(set(each["choices"])) == 4 and each["label"] in range(4) for each in examples)
    assert {each["label"] for each in examples} == {0, 1, 2, 3}


def test_what_cannot_work_is_one_line(
    run: Path, trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = harness.LeviathanLM(trained.build(), trained.tokenizer, LENGTH)
    for method, arguments, message in (
        ("loglikelihood", ("a", TEXT * 8), "scores a continuation of"),
        ("generate_until", ("a", {"do_sample": True, "temperature": 1.0}), "samples its answers"),
        ("generate_until", ("a", {"max_gen_toks": LENGTH}), f"generates {LENGTH} tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            getattr(adapter, method)(requests_of([arguments]))
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        harness.check_tasks(TASKS, str(tmp_path / "nowhere"))
    (tmp_path / "broken.yaml").write_text("task: broken\ncustom_dataset: !function nowhere.data\n")
    with pytest.raises(ValueError, match="the task broken cannot be loaded: "):
        harness.check_tasks(["broken"], str(tmp_path))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "leviathan_ds.evaluation.harness")
    with pytest.raises(ValueError, match=r"pip install 'leviathan_ds\[eval\]'"):
        __import__("leviathan_ds.evaluation.harness")


@pytest.mark.slow
def test_the_harness_own_tasks_are_found_by_name() -> None:
    """Reading its index takes seconds, and without a network its data cannot be had."""
    with pytest.raises(ValueError, match=r"no task 'lambda' in .*tasks"):
        harness.check_tasks(["lambda"], None)
    with pytest.raises(ValueError, match="the task lambada_openai cannot be loaded: "):
        harness.check_tasks(["lambada_openai"], None)
