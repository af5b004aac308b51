"""launchers/generate.py: the same text from checkpoint, export and transformers; sampling, batches, stopping."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exports import MODEL, make_run, trainer_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from launchers import generate as launcher
from leviathan_ds.config import DataConfig
from leviathan_ds.export import generate as texts
from leviathan_ds.export.generate import Sampling, generate
from leviathan_ds.export.llama import to_llama
from leviathan_ds.export.loaded import ExportTokenizer
from leviathan_ds.export.publish import export as publish
from leviathan_ds.trained_model import TrainedModel, find_trained_model

PROMPTS = ["The ", "", "def f(x):\n    ", "a literal </s> in it", "It was the best of times, it was the"]
GREEDY = Sampling(max_new_tokens=20, temperature=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_tokenizer: Path, one_rank: None) -> Path:
    """A checkpoint of two tensor-parallel ranks."""
    model = dataclasses.replace(MODEL, vocab_size=603)  # three rows beyond the tokenizer
    folder = tmp_path_factory.mktemp("generate") / "run"
    return make_run(folder, corpus_tokenizer, model, 2, data=DataConfig(sequence_length=64))


@pytest.fixture(scope="module")
def trained(run: Path) -> TrainedModel:
    return find_trained_model(run)


@pytest.fixture(scope="module")
def llama(trained: TrainedModel) -> Any:
    return to_llama(trained)


@pytest.fixture(scope="module")
def export(trained: TrainedModel) -> Path:
    publish(trained, trained.run.parent / "hf", text=Path(__file__))
    return trained.run.parent / "hf"


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What the command prints of a short greedy continuation, or its error."""
    options = ["--max_new_tokens", 8, "--temperature", 0, *arguments]
    assert launcher.main([str(option) for option in options]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_greedy_generation_is_the_same_everywhere(
    run: Path, trained: TrainedModel, llama: Any, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer's own logits without a cache, transformers on the export; ours alone, in a batch, streamed."""
    theirs, exported = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    trainer, together = trainer_model(run), generate(llama, trained.tokenizer, PROMPTS, GREEDY)
    for prompt, in_batch in zip(PROMPTS, together, strict=True):
        ids = [exported.eos_token_id, *exported.encode(prompt)]
        expected = list(ids)
        while len(expected) < len(ids) + 20 and (len(expected) == len(ids) or expected[-1] != ids[0]):
            expected.append(int(trainer(torch.tensor([expected]))[0, -1, : exported.vocab_size].argmax()))
        assert theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist() == expected
        (alone,) = generate(llama, trained.tokenizer, [prompt], GREEDY)
        assert alone == in_batch
        assert alone.tokens == len(expected) - len(ids)
        assert alone.prompt + alone.text == trained.tokenizer.decode(expected)
        capsys.readouterr()
        generate(llama, trained.tokenizer, [prompt], GREEDY, stream=True)
        assert capsys.readouterr().out == alone.prompt + alone.text + "\n"
        for path, tokenizer in ((run, trained.tokenizer), (export, ExportTokenizer(exported))):
            start, end = (tokenizer.decode(expected[: len(ids) + more]) for more in (0, 8))
            assert said(capsys, "--checkpoint", path, "--prompt", prompt) == prompt + end[len(start) :] + "\n"


def test_repetition_penalty_is_transformers(trained: TrainedModel, llama: Any) -> None:
    ids = [trained.tokenizer.eod_id, *trained.tokenizer.encode(PROMPTS[0])]
    theirs = llama.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, repetition_penalty=1.7, pad_token_id=ids[0]
    )[0].tolist()
    penalty = dataclasses.replace(GREEDY, repetition_penalty=1.7)
    (ours,) = generate(llama, trained.tokenizer, PROMPTS[:1], penalty)
    assert ours.prompt + ours.text == trained.tokenizer.decode(theirs)
    assert ours != generate(llama, trained.tokenizer, PROMPTS[:1], GREEDY)[0]


def test_a_draw_depends_on_seed_and_number_alone(trained: TrainedModel, llama: Any) -> None:
    def text(prompts: list[str], number: int = 0, **options: Any) -> list[str]:
        sampling = Sampling(max_new_tokens=12, **options)
        found = generate(llama, trained.tokenizer, prompts, sampling, first_number=number)
        return [each.text for each in found]

    together = text(PROMPTS, seed=1)
    assert together == [text([prompt], number, seed=1)[0] for number, prompt in enumerate(PROMPTS)]
    assert together != text(PROMPTS, seed=2)
    assert len(set(text(["The "] * 4))) > 1, "equal prompts get texts of their own"
    assert text(["a"], top_k=1) == text(["a"], top_p=1e-6) == text(["a"], temperature=0)


def test_what_is_drawn_has_the_softmax_of_transformers_warpers() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, -1.0, 0.0]])
    sampling = Sampling(temperature=1.7, top_k=4, top_p=0.9, seed=5)
    processors = sampling.processors([0])
    ids = torch.zeros(1, 1, dtype=torch.long)
    draws = Counter(int(processors(ids, logits.clone()).argmax()) for _ in range(10_000))
    # Of the four largest, those that make up 0.9 of their probability.
    four = (torch.tensor([3.0, 2.0, 1.0, 0.0]) / 1.7).softmax(-1)
    assert four[:2].sum() < 0.9 < four[:3].sum()
    assert set(draws) == {0, 2, 1}
    for token, probability in zip((0, 2, 1), (four[:3] / four[:3].sum()).tolist(), strict=True):
        assert draws[token] / 10_000 == pytest.approx(probability, abs=0.02)


def test_stop_strings(trained: TrainedModel, llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = generate(llama, trained.tokenizer, ["The "], GREEDY)
    middle = whole.text[len(whole.text) // 2 :][:3]
    stopping = dataclasses.replace(GREEDY, stop=("never met", middle))
    (stopped,) = generate(llama, trained.tokenizer, ["The "], stopping)
    assert stopped.text == whole.text[: whole.text.index(middle)] and stopped.finish_reason == "stop"
    assert stopped.tokens < whole.tokens
    both = generate(llama, trained.tokenizer, ["The ", "def f(x):\n    "], stopping)
    assert both[0] == stopped, "the other of a batch goes on"
    capsys.readouterr()
    generate(llama, trained.tokenizer, ["The "], stopping, stream=True)
    assert capsys.readouterr().out == "The " + stopped.text + "\n"
    never = generate(llama, trained.tokenizer, ["The "], dataclasses.replace(GREEDY, stop=("never met",)))
    assert never == [whole] and whole.finish_reason == "length"


class Scripted:
    """A model that says given ids, in place of weights that would have to be trained to end a document."""

    device = torch.device("cpu")
    config = SimpleNamespace(max_position_embeddings=8)

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def generate(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([tokens, torch.tensor([self.ids])], 1)


def test_the_end_of_a_document(trained: TrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = trained.tokenizer
    model = Scripted([*tokenizer.encode("whale"), tokenizer.eod_id, tokenizer.eod_id])
    (found,) = generate(model, tokenizer, ["a " * 20], GREEDY)
    assert found.finish_reason == "end" and found.text.strip() == "whale"
    assert found.tokens == len(tokenizer.encode("whale")) + 1, "padding is not counted"
    assert "longer than the 8 of a training sequence" in capsys.readouterr().err


def test_prompts_of_a_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("The \n\nIt was\r\n naïve")
    assert texts.read_prompts(tmp_path / "prompts.txt") == ["The ", "It was", " naïve"]
    (tmp_path / "p.jsonl").write_text('{"text": "The "}\n{"text": "It was\\n", "meta": 1}\n')
    for batch_size in (1, 2):
        out = said(
            capsys, "--checkpoint", run, "--prompts", tmp_path / "p.jsonl", "--json", "--batch_size", batch_size
        )
        first, second = map(json.loads, out.splitlines())
        assert (first["prompt"], second["prompt"]) == ("The ", "It was\n")
        assert first["tokens"] == 8 and first["finish_reason"] == "length"
        assert said(capsys, "--checkpoint", run, "--prompt", "The ") == "The " + first["text"] + "\n"


def test_interactive(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"The \n\xff\nIt was\n")))
    arguments = ["--checkpoint", str(run), "--interactive", "--max_new_tokens", "8", "--temperature", "0"]
    assert launcher.main(arguments) == 0
    out, error = capsys.readouterr()
    assert error == "> > that line is not UTF-8; type it again\n> > "
    alone = [said(capsys, "--checkpoint", run, "--prompt", prompt) for prompt in ("The ", "It was")]
    assert out == "".join(alone)


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (
        ("empty.txt", b"\n \n"),
        ("latin.txt", b"The \nna\xefve\n"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("other.jsonl", b'{"content": "a"}\n'),
        ("number.jsonl", b'{"text": 3}\n'),
    ):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    for arguments, message in (
        (("--prompts", tmp_path / "none.txt"), "none.txt: No such file"),
        (("--prompts", tmp_path / "empty.txt"), "empty.txt: holds no prompt"),
        (("--prompts", tmp_path / "latin.txt"), "latin.txt: line 2 is not UTF-8 text"),
        (("--prompts", tmp_path / "broken.jsonl"), "broken.jsonl: line 2 is not a JSON object"),
        (("--prompts", tmp_path / "other.jsonl"), 'other.jsonl: line 1 has no "text"'),
        (("--prompts", tmp_path / "number.jsonl"), 'line 1: "text" is no string'),
        (("--prompt", "a", "--stop", ""), "--stop must be"),
        (("--prompt", "a", "--stream", "--json"), "--stream prints text"),
        (("--prompt", "\udcff"), "--prompt is not UTF-8"),
        (("--prompt", "a", "--top_p", "2"), "--top_p must be"),
    ):
        error = said(capsys, "--checkpoint", run, *arguments, code=2)
        assert error.startswith("error: ") and message in error and error.count("\n") == 1, error
    for folder, message in (("none", "does not exist"), ("hf", "hf cannot be loaded: ")):
        error = said(capsys, "--checkpoint", tmp_path / folder, "--prompt", "a", code=2)
        assert message in error and error.count("\n") == 1, error
    for wrong in (
        {"temperature": -1},
        {"top_k": -1},
        {"top_p": 0},
        {"max_new_tokens": 0},
        {"seed": 2**63},
        {"repetition_penalty": 0},
    ):
        with pytest.raises(ValueError, match=f"--{next(iter(wrong))} must be"):
            Sampling(**wrong)
