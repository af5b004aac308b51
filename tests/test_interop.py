"""A plain export in programs that are not ours: equal ids of real text, equal greedy continuations."""

from pathlib import Path

import ctranslate2
import numpy as np
import onnxruntime
import pytest
import torch
from exports import MODEL, make_run
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from leviathan_ds.export.publish import export
from leviathan_ds.trained_model import TrainedModel, find_trained_model

PROMPTS = (
    "The ",
    "",
    "def f(x):\n    return ",
    "a literal </s> in it",
    "1 + 1 =",
    "naïve 中文 🙂",
    "\n\n",
    "In 1969 the first ",
    "  two  spaces",
    "Dear Sir or Madam,\n",
)
NUM_NEW = 16


@pytest.fixture(scope="module")
def trained(one_rank, tmp_path_factory: pytest.TempPathFactory, sample_tokenizer: Path) -> TrainedModel:
    return find_trained_model(make_run(tmp_path_factory.mktemp("run") / "run", sample_tokenizer, MODEL))


@pytest.fixture(scope="module")
def exported(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "out"
    export(trained, folder)
    return folder


@pytest.fixture(scope="module")
def prompts(trained: TrainedModel) -> list[list[int]]:
    tokenizer = trained.tokenizer
    return [[tokenizer.eod_id, *tokenizer.encode(prompt)] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def continuations(trained: TrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """By the trainer's own model, without a cache; to the end of the document at most."""
    model, eod, found = trained.build(), trained.tokenizer.eod_id, []
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            while len(ids) < len(prompt) + NUM_NEW and (len(ids) == len(prompt) or ids[-1] != eod):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            found.append(ids[len(prompt) :])
    assert len({tuple(ids) for ids in found}) > 5
    return found


def test_transformers(exported: Path, trained: TrainedModel, prompts, continuations, sample_documents) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    generate = pipeline("text-generation", model=str(exported), device="cpu")
    for text, prompt, expected in zip(PROMPTS, prompts, continuations, strict=True):
        assert [tokenizer.bos_token_id, *tokenizer.encode(text)] == prompt
        found = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)[0].tolist()
        assert found == prompt + expected
        # A string is tokenized by the pipeline itself: in front stands what training had there.
        assert tokenizer.decode(found) == tokenizer.decode(prompt + expected)
    (answer,) = generate("The ", max_new_tokens=NUM_NEW, do_sample=False)
    ids = tokenizer.encode("The ")  # a pipeline puts no end-of-document in front
    expected = model.generate(torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False)[0]
    assert answer["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)
    for document in sample_documents[:20]:
        assert tokenizer.encode(document, verbose=False) == trained.tokenizer.encode(document)


def test_ctranslate2(exported: Path, prompts, continuations, tmp_path: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(exported)).convert(str(tmp_path / "ct2"))
    generator = ctranslate2.Generator(str(tmp_path / "ct2"), device="cpu", compute_type="float32")
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for prompt, expected in zip(prompts, continuations, strict=True):
        # One by one: of prompts of different lengths in a batch its results hold a part of the prompt.
        (result,) = generator.generate_batch(
            [tokenizer.convert_ids_to_tokens(prompt)],
            max_length=NUM_NEW,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        assert result.sequences_ids[0] == [token for token in expected if token != tokenizer.eos_token_id]


def test_onnx_runtime(exported: Path, prompts, continuations, tmp_path: Path) -> None:
    """The graph has no cache: every step reads the whole text again."""
    model = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager").eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, use_cache=False).logits

    path = tmp_path / "model.onnx"
    torch.onnx.export(
        Logits(), (torch.zeros(1, 8, dtype=torch.long),), path, dynamo=True,
        input_names=["tokens"], dynamic_shapes={"tokens": {1: torch.export.Dim("length", min=2, max=512)}},
    )  # fmt: skip
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for prompt, expected in zip(prompts, continuations, strict=True):
        ids = list(prompt)
        if len(ids) == 1:  # the graph wants two tokens
            ids, expected = ids + expected[:1], expected[1:]
        length = len(ids)
        while len(ids) < length + len(expected):
            (logits,) = session.run(None, {"tokens": np.array([ids])})
            ids.append(int(logits[0, -1].argmax()))
        assert ids[length:] == expected
