"""verify finds every damage, also the kinds that hashes taken after the damage would hide."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from pile_texts import TINY, tokenizer_copy

from data_prep.files import (
    bin_path,
    file_digest,
    idx_path,
    manifest_path,
    token_counts_path,
)
from data_prep.indexed import write_index
from data_prep.manifest import DataFile, Manifest, content_fingerprint, load_manifest
from data_prep.train_tokenizer import train_tokenizer
from data_prep.verify import main, verify


def resign(prefix: Path, **changes: object) -> Manifest:
    """Give the manifest the hashes of the files as they are now, and `changes`."""
    files = [DataFile(path.name, *file_digest(path)) for path in (bin_path(prefix), idx_path(prefix))]
    manifest = load_manifest(prefix)
    fingerprint = content_fingerprint(files[0].sha256, files[1].sha256, manifest.tokenizer.fingerprint)
    changed = dataclasses.replace(
        manifest, **({"fingerprint": fingerprint, "bin": files[0], "idx": files[1]} | changes)
    )
    changed.save(prefix)
    return changed


def edit_tokens(prefix: Path, edit: Callable[[np.ndarray], None]) -> None:
    tokens = np.fromfile(bin_path(prefix), np.uint16)
    edit(tokens)
    tokens.tofile(bin_path(prefix))


def lengths_of(prefix: Path) -> np.ndarray:
    return np.fromfile(idx_path(prefix), "<i4", load_manifest(prefix).documents, offset=34)


def test_a_whole_dataset_passes(tiny_dataset: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tiny_dataset)]) == 0
    output = capsys.readouterr().out
    for path in (bin_path, idx_path, tokenizer_copy, token_counts_path, manifest_path):
        assert str(path(tiny_dataset)) in output
    assert "35 documents" in output


def test_failure_is_one_line_and_status_2(dataset_copy: Path, capsys: pytest.CaptureFixture[str]):
    edit_tokens(dataset_copy, lambda tokens: tokens.__setitem__(10, 300))
    assert main([str(dataset_copy)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and "tiny.bin: its sha256" in errors[0]


@pytest.mark.parametrize("make", [bin_path, idx_path, tokenizer_copy, token_counts_path, manifest_path])
def test_missing_and_cut_files_are_named(dataset_copy: Path, make: Callable[[Path], Path]):
    path = make(dataset_copy)
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=f"{path.name}: "):
        verify(dataset_copy)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name}: no such"):
        verify(dataset_copy)


def test_files_of_another_dataset_with_the_same_sizes(dataset_copy: Path):
    lengths = lengths_of(dataset_copy)
    with idx_path(dataset_copy).open("wb") as file:
        write_index(file, [lengths[::-1]], np.dtype("<u2"))
    with pytest.raises(ValueError, match=r"tiny\.idx: its sha256"):
        verify(dataset_copy)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (-1, 5, "34 end-of-document ids in 35 documents"),  # the last document does not end
        (3, 2, "36 end-of-document ids in 35 documents"),  # text that became an end
        (7, 600, "id 600 in document 0 is outside the vocabulary of 600"),
        (-2, 65_535, "id 65535 in document 34"),
    ],
)
def test_wrong_ids_with_right_hashes(dataset_copy: Path, position: int, value: int, message: str):
    edit_tokens(dataset_copy, lambda tokens: tokens.__setitem__(position, value))
    resign(dataset_copy)
    with pytest.raises(ValueError, match=rf"tiny\.bin: {message}"):
        verify(dataset_copy)


def test_misplaced_end_of_document(dataset_copy: Path):
    first = int(lengths_of(dataset_copy)[0])

    def swap(tokens: np.ndarray) -> None:
        tokens[[first - 1, first]] = tokens[[first, first - 1]]

    edit_tokens(dataset_copy, swap)
    resign(dataset_copy)
    with pytest.raises(ValueError, match=r"tiny\.bin: document 0 does not end with end-of-document"):
        verify(dataset_copy)


def test_no_end_of_document_at_all(dataset_copy: Path):
    edit_tokens(dataset_copy, lambda tokens: tokens.__setitem__(tokens == 2, 5))
    resign(dataset_copy)
    with pytest.raises(ValueError, match="0 end-of-document ids"):
        verify(dataset_copy)


def test_index_that_does_not_follow_from_its_lengths(dataset_copy: Path):
    content = bytearray(idx_path(dataset_copy).read_bytes())
    documents = load_manifest(dataset_copy).documents
    for position, message in (
        (34 + 4 * documents + 8, "byte offsets"),
        (34 + 12 * documents + 8, "document indices"),
        (34, "byte offsets"),
    ):
        damaged = bytearray(content)
        damaged[position] ^= 2
        idx_path(dataset_copy).write_bytes(damaged)
        resign(dataset_copy)
        with pytest.raises(ValueError, match=rf"tiny\.idx: .*{message}"):
            verify(dataset_copy)


def test_another_tokenizer_beside_it(dataset_copy: Path):
    train_tokenizer([TINY], tokenizer_copy(dataset_copy), vocab_size=590)
    with pytest.raises(ValueError, match=r"tiny\.tokenizer\.model: its fingerprint is"):
        verify(dataset_copy)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("documents", 36, "documents is 36, its domains sum to 35"),
        ("text_bytes", 1, "text_bytes is 1"),
        ("fingerprint", hashlib.sha256(b"").hexdigest(), "fingerprint does not follow"),
        ("dtype", "uint8", "dtype uint8 does not suit"),
        ("format_version", 2, "format version 2"),
        ("nonsense", 2, "is broken"),
    ],
)
def test_edited_manifest(dataset_copy: Path, field: str, value: object, message: str):
    fields = orjson.loads(manifest_path(dataset_copy).read_bytes())
    manifest_path(dataset_copy).write_bytes(orjson.dumps(fields | {field: value}))
    with pytest.raises(ValueError, match=rf"tiny\.manifest\.json: .*{message}"):
        verify(dataset_copy)


def test_renamed_dataset_is_told(dataset_copy: Path):
    for path in list(dataset_copy.parent.iterdir()):
        path.rename(path.with_name(path.name.replace("tiny", "other")))
    with pytest.raises(ValueError, match=r"other\.manifest\.json: .*was it renamed"):
        verify(dataset_copy.with_name("other"))


def test_blocks_smaller_than_the_dataset(tiny_dataset: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data_prep.verify._BLOCK_TOKENS", 1000)
    monkeypatch.setattr("data_prep.verify._BLOCK_DOCUMENTS", 4)
    assert verify(tiny_dataset).documents == 35
