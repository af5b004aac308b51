"""Datasets of Megatron's own tools: described so that the trainer reads them, or refused."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets import indexed_dataset as megatron

from data_prep.adopt import adopt, main
from data_prep.errors import UserError
from data_prep.files import bin_path, dataset_tokenizer_path, idx_path, manifest_path
from data_prep.tokenizers import Tokenizer
from data_prep.verify import verify

TEXTS = ["One document.", "Another, with “quotes”.", "x"]


def build(prefix: Path, documents: Iterable[list[int]], dtype: type = np.uint16, split: bool = False) -> Path:
    builder = megatron.IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    for ids in documents:
        builder.add_document(torch.tensor(ids), [1, len(ids) - 1] if split else [len(ids)])
    builder.finalize(str(idx_path(prefix)))
    return prefix


def encoded(tokenizer: Tokenizer) -> list[list[int]]:
    return [[*tokenizer.encode(text), tokenizer.eod_id] for text in TEXTS]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_adopted_dataset_is_verified_and_counted(tmp_path: Path, tokenizer: Tokenizer, dtype: type) -> None:
    prefix = build(tmp_path / "theirs", encoded(tokenizer), dtype)
    before = bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()
    manifest = adopt(prefix, tokenizer.path)
    assert verify(prefix) == manifest
    assert manifest.dtype == np.dtype(dtype).name
    assert (manifest.documents, manifest.tokens) == (3, sum(map(len, encoded(tokenizer))))
    assert manifest.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert dataset_tokenizer_path(prefix, "sentencepiece").read_bytes() == tokenizer.path.read_bytes()
    assert before == (bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes())
    with pytest.raises(UserError, match=r"exists already"):
        adopt(prefix, tokenizer.path)


@pytest.mark.parametrize(
    ("spoil", "split", "words"),
    [
        (lambda ids, _: ids[:-1], False, r"0 end-of-document ids in 3 documents.*--append-eod"),
        (lambda ids, eod: [eod, *ids], False, r"6 end-of-document ids in 3 documents"),
        (lambda ids, _: [*ids[::-1]], False, r"document 0 does not end with end-of-document"),
        (
            lambda ids, _: [700, *ids],
            False,
            r"id 700 in document 0 is outside the vocabulary.*tok.model",
        ),
        (lambda ids, _: ids, True, r"3 documents of 6 sequences.*--split-sentences"),
    ],
)
def test_refused_dataset_gets_no_manifest(tmp_path: Path, tokenizer: Tokenizer, spoil, split, words) -> None:
    prefix = build(tmp_path / "t", [spoil(ids, tokenizer.eod_id) for ids in encoded(tokenizer)], split=split)
    with pytest.raises(UserError, match=words):
        adopt(prefix, tokenizer.path)
    assert not manifest_path(prefix).exists()
    assert not dataset_tokenizer_path(prefix, "sentencepiece").exists()


def test_command_line(tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = build(tmp_path / "theirs", encoded(tokenizer))
    with pytest.raises(UserError, match=r"theirs\.manifest\.json: no such file; .* python -m data_prep\.adopt"):
        verify(prefix)
    assert main([str(prefix), "--tokenizer", str(tokenizer.path)]) == 0
    assert "3 documents" in capsys.readouterr().out
    assert main([str(tmp_path / "none"), "--tokenizer", str(tokenizer.path)]) == 2
