"""The .bin/.idx against megatron-core's own builder and reader."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets import indexed_dataset as megatron

from data_prep.files import bin_path, idx_path
from data_prep.indexed import IndexedReader, check_dataset, check_documents, token_dtype, write_index

EOD = 2
VOCABULARIES = [300, 65_499, 65_500, 65_535, 65_536, 65_537, 200_000]


def random_documents(vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(vocab_size)
    documents = [generator.integers(3, vocab_size, size) for size in (5, 0, 1, 1000, 17)]
    documents[0][:2] = (3, vocab_size - 1)
    return [np.append(ids, EOD).astype(np.int64) for ids in documents]


def write(prefix: Path, documents: list[np.ndarray], vocab_size: int, split: int = 2) -> None:
    """As preprocess does: checked, cast, indexed block by block."""
    ids, dtype = np.concatenate([np.empty(0, np.int64), *documents]), token_dtype(vocab_size)
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    if documents:
        check_documents(ids, lengths, vocab_size, EOD)
    bin_path(prefix).write_bytes(ids.astype(dtype).tobytes())
    with idx_path(prefix).open("wb") as file:
        write_index(file, [lengths[:split], lengths[split:]], dtype)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_bytes_equal_megatrons_builder_and_both_readers_agree(tmp_path: Path, vocab_size: int):
    documents = random_documents(vocab_size)
    write(tmp_path / "ours", documents, vocab_size)
    dtype = megatron.DType.optimal_dtype(vocab_size)
    assert token_dtype(vocab_size) == dtype
    theirs = tmp_path / "theirs"
    builder = megatron.IndexedDatasetBuilder(str(bin_path(theirs)), dtype=dtype)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(idx_path(theirs)))
    assert bin_path(tmp_path / "ours").read_bytes() == bin_path(theirs).read_bytes()
    assert idx_path(tmp_path / "ours").read_bytes() == idx_path(theirs).read_bytes()

    ours, reference = IndexedReader(theirs), megatron.IndexedDataset(str(tmp_path / "ours"))
    assert len(ours) == len(reference) == len(documents) and ours.dtype == dtype
    for document, mine, reference_ids in zip(documents, ours, reference[0 : len(documents)], strict=True):
        assert mine.tolist() == document.tolist() == reference_ids.tolist()


def test_reader_joins_the_sequences_of_a_document(tmp_path: Path):
    """Megatron's builder may split a document into sentences; ours never does."""
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.int32)
    builder.add_document(torch.arange(6), [2, 4])
    builder.add_document(torch.arange(6, 9), [3])
    builder.finalize(str(tmp_path / "d.idx"))
    reader = IndexedReader(tmp_path / "d")
    assert [ids.tolist() for ids in reader] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    with pytest.raises(IndexError):
        reader[2]


def test_positions_past_2_to_the_31(tmp_path: Path):
    """Six documents of 2^30 tokens: byte offsets pass 2^31 at the second, token positions at the third."""
    lengths = np.full(6, 1 << 30, dtype=np.int32)
    lengths[3] = (1 << 31) - 1
    for dtype in (np.dtype("<u2"), np.dtype("<i4")):
        ours = io.BytesIO()
        write_index(ours, [lengths[:2], lengths[2:]], dtype)
        with megatron._IndexWriter(str(tmp_path / "d.idx"), dtype.type) as writer:
            writer.write(lengths, None, list(range(7)))
        assert ours.getvalue() == (tmp_path / "d.idx").read_bytes()
        with (tmp_path / "d.bin").open("wb") as file:  # sparse: takes no room
            file.truncate(int(lengths.sum(dtype=np.int64)) * dtype.itemsize)
        reader = IndexedReader(tmp_path / "d")
        assert reader.offsets[5] == int(lengths[:5].sum(dtype=np.int64)) * dtype.itemsize > 1 << 33
        assert len(reader[3]) == (1 << 31) - 1


def test_index_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data_prep.indexed._BLOCK_DOCUMENTS", 4)
    for count in (3, 4, 5, 8, 11):
        lengths = np.arange(1, count + 1, dtype=np.int32)
        ours = io.BytesIO()
        write_index(ours, [lengths], np.dtype("<u2"))
        with megatron._IndexWriter(str(tmp_path / "d.idx"), np.uint16) as writer:
            writer.write(lengths, None, list(range(count + 1)))
        assert ours.getvalue() == (tmp_path / "d.idx").read_bytes()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("wrong", [-1, 0, 65_536])
def test_ids_outside_the_vocabulary_never_wrap(vocab_size: int, wrong: int):
    wrong_id = vocab_size + wrong if wrong >= 0 else wrong
    ids, lengths = np.array([5, EOD, 6, wrong_id, EOD]), np.array([2, 3], np.int32)
    with pytest.raises(ValueError, match=f"id {wrong_id} in document 2 is outside the vocabulary"):
        check_documents(ids, lengths, vocab_size, EOD, first=1)


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [([5, 6], [2]), ([5, EOD, 6, EOD], [4]), ([EOD, 5], [2]), ([5, EOD], [3]), ([EOD, EOD], [1, 0])],
)
def test_exactly_one_end_of_document_at_the_end(ids: list[int], lengths: list[int]):
    with pytest.raises(ValueError, match=r"end-of-document|lengths sum"):
        check_documents(np.array(ids), np.array(lengths, np.int32), 300, EOD)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def test_structural_damage_is_named(tmp_path: Path):
    prefix = tmp_path / "d"

    def expect(message: str) -> None:
        for check in (check_dataset, IndexedReader):
            with pytest.raises(ValueError, match=message):
                check(prefix)

    expect(r"d\.idx: no such file")
    documents: list[Any] = random_documents(300)
    write(prefix, documents, 300)
    assert check_dataset(prefix) == (np.dtype("<u2"), 5, 6)
    cut(bin_path(prefix), 1)
    expect(r"d\.bin: has 2055 bytes, .*d\.idx describes 2056")
    bin_path(prefix).unlink()
    expect(r"d\.bin: no such file")
    write(prefix, documents, 300)
    cut(idx_path(prefix), 8)
    expect(r"d\.idx: has 134 bytes, its header describes 142")
    write(prefix, documents, 300)
    idx_path(prefix).write_bytes(b"")
    expect(r"d\.idx: 0 bytes are too few")
    write(prefix, documents, 300)
    content = idx_path(prefix).read_bytes()
    idx_path(prefix).write_bytes(b"X" + content[1:])
    expect(r"d\.idx: is no megatron-core index")
    idx_path(prefix).write_bytes(content[:17] + b"\x07" + content[18:])
    expect(r"d\.idx: dtype code 7")
    write(prefix, [], 300)
    expect(r"d\.bin: the dataset holds no token")


def test_bin_and_idx_of_different_datasets(tmp_path: Path):
    write(tmp_path / "a", random_documents(300), 300)
    write(tmp_path / "b", random_documents(300)[:4], 300)
    bin_path(tmp_path / "b").replace(bin_path(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"a\.bin: has \d+ bytes, .*a\.idx describes \d+"):
        check_dataset(tmp_path / "a")
