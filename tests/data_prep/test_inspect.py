"""What inspect prints and draws, of our datasets and of megatron-core's own."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from data_prep.files import bin_path, idx_path, manifest_path
from data_prep.inspect import Dataset, length_bins, main
from data_prep.tokenizers import Tokenizer


def shown(capsys: Any, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_documents_are_printed_with_their_boundaries(
    tiny_dataset: Path, tokenizer: Tokenizer, tiny_records: list[Any], capsys: Any
):
    ids = [[*tokenizer.encode(record["text"]), tokenizer.eod_id] for record in tiny_records]
    start = sum(map(len, ids[:33]))
    output = shown(capsys, tiny_dataset, "--documents", 5, "--first", -2, "--tokens", 100_000)
    assert f"35 documents in 35 sequences, {sum(map(len, ids)):,} tokens, uint16" in output
    assert "sentencepiece, 600 ids, end-of-document 2, padding none" in output
    for name in {record["meta"]["pile_set_name"] for record in tiny_records}:
        assert name.split()[0] in output
    assert output.count("document 3") == 2  # 33 and 34, then the dataset ends
    for number in (33, 34):
        length = len(ids[number])
        assert f"document {number}: tokens {start:,} to {start + length:,}, {length:,} long, ends with" in output
        assert f"  ids   {' '.join(map(str, ids[number]))}\n" in output
        assert f"  text  {tiny_records[number]['text']!r}\n" in output
        start += length


def test_long_documents_are_cut(tiny_dataset: Path, tokenizer: Tokenizer, tiny_records: list[Any], capsys: Any):
    ids = [*tokenizer.encode(tiny_records[0]["text"]), tokenizer.eod_id]
    output = shown(capsys, tiny_dataset, "--documents", 1, "--tokens", 3)
    first, last = " ".join(map(str, ids[:3])), " ".join(map(str, ids[-8:]))
    assert f"  ids   {first} ... {len(ids) - 11:,} more ... {last}\n" in output
    assert f"{tokenizer.decode(ids[:3])!r} ... " in output and "document 1" not in output


def test_a_missing_end_of_document_is_seen(dataset_copy: Path, tokenizer: Tokenizer, capsys: Any):
    tokens = np.fromfile(bin_path(dataset_copy), np.uint16)
    tokens[int(np.flatnonzero(tokens == tokenizer.eod_id)[0])] = 7
    tokens.tofile(bin_path(dataset_copy))
    output = shown(capsys, dataset_copy, "--documents", 2)
    assert "WRONG: 0 end-of-document, the last id is 7" in output and output.count("ends with its only") == 1


@pytest.fixture
def megatron_dataset(tmp_path: Path) -> Path:
    """Documents of several sequences, one of them empty, as only megatron-core's builder makes them."""
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([5, 6, 70_000, 5]), [3, 1])
    builder.end_document()
    builder.add_document(torch.tensor([6, 5]), [2])
    builder.finalize(str(tmp_path / "m.idx"))
    return tmp_path / "m"


def test_dataset_of_megatrons_builder(megatron_dataset: Path, tmp_path: Path, capsys: Any):
    output = shown(capsys, megatron_dataset, "--plots", tmp_path / "plots")
    assert "3 documents in 3 sequences, 6 tokens, int32" in output and "ids only" in output
    assert "document 0: tokens 0 to 4, 4 long\n  ids   5 6 70000 5\n" in output
    assert "document 1: tokens 4 to 4, 0 long\n" in output
    assert "document 2: tokens 4 to 6, 2 long\n  ids   6 5\n" in output
    assert "text" not in output
    dataset = Dataset(megatron_dataset)
    assert np.concatenate(list(dataset.document_lengths())).tolist() == [4, 0, 2]
    counts = dataset.token_counts()
    assert len(counts) == 70_001 and counts[[5, 6, 70_000]].tolist() == [3, 2, 1] and counts.sum() == 6


def test_lengths_in_blocks(tiny_dataset: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = Dataset(tiny_dataset)
    monkeypatch.setattr("data_prep.inspect._BLOCK_DOCUMENTS", 8)
    assert np.concatenate(list(dataset.document_lengths())).tolist() == dataset.reader.lengths.tolist()


def test_plots_are_drawn(tiny_dataset: Path, tmp_path: Path, capsys: Any):
    output = shown(capsys, tiny_dataset, "--documents", 0, "--plots", tmp_path / "new" / "plots")
    paths = sorted((tmp_path / "new" / "plots").iterdir())
    assert [path.name for path in paths] == ["tiny.frequencies.png", "tiny.lengths.png"]
    for path in paths:
        assert str(path) in output
        assert imread(path).std() > 0.05  # something is on it


def test_mistakes(dataset_copy: Path, tiny_dataset: Path, megatron_dataset: Path, capsys: Any):
    def refused(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    assert "the dataset has 35 documents" in refused(tiny_dataset, "--first", 35)
    assert "the dataset has 35 documents" in refused(tiny_dataset, "--first", -36)
    assert "must not be negative" in refused(tiny_dataset, "--documents", -1)
    assert "none.idx: no such file" in refused(dataset_copy.with_name("none"))
    copy = dataset_copy.with_name("tiny.tokenizer.model")
    copy.write_bytes(copy.read_bytes()[:-2])
    assert "tiny.tokenizer.model" in refused(dataset_copy)
    shutil.copy(manifest_path(tiny_dataset), manifest_path(megatron_dataset))
    assert "says 35 documents" in refused(megatron_dataset)
    idx_path(megatron_dataset).write_bytes(b"")
    assert "m.idx: 0 bytes are too few" in refused(megatron_dataset)


@pytest.mark.parametrize("longest", [1, 2, 9, 1000, 127_193, 2**31])
def test_the_longest_document_can_be_seen(longest: int) -> None:
    """127,193: its last edge, rounded down, would leave the longest document a bin of its own, one token wide."""
    edges = length_bins(longest)
    assert edges[0] == 1 and edges[-1] == longest + 1
    assert (np.diff(edges) >= 1).all()
    if longest > 100:
        assert np.diff(np.log10(edges))[-1] > 0.5 / 12
