"""Counts of ids and statistics of lengths against plain counting."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import UserError
from data_prep.files import bin_path, token_counts_path
from data_prep.lengths import length_statistics
from data_prep.manifest import load_manifest
from data_prep.token_counts import load_token_counts
from data_prep.verify import verify


def test_counts_are_those_of_the_ids(dataset_copy: Path, monkeypatch: pytest.MonkeyPatch):
    expected = np.bincount(np.fromfile(bin_path(dataset_copy), np.uint16), minlength=600)
    counts = load_token_counts(dataset_copy)
    assert counts.dtype == np.int64 and counts.tolist() == expected.tolist()
    assert counts[2] == 35  # end-of-document is counted
    manifest = load_manifest(dataset_copy)
    dataclasses.replace(manifest, token_counts=None).save(dataset_copy)  # a dataset from before
    token_counts_path(dataset_copy).unlink()
    monkeypatch.setattr("data_prep.token_counts._BLOCK_TOKENS", 1000)
    assert load_token_counts(dataset_copy).tolist() == expected.tolist()
    assert verify(dataset_copy).token_counts is None


def test_wrong_counts_are_refused(dataset_copy: Path):
    path = token_counts_path(dataset_copy)
    counts = np.load(path)
    np.save(path, counts[:-1])
    with pytest.raises(UserError, match=r"token_counts\.npy: is not of this dataset"):
        load_token_counts(dataset_copy)
    with pytest.raises(UserError, match=r"token_counts\.npy: has \d+ bytes, the manifest says"):
        verify(dataset_copy)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"token_counts\.npy: cannot be read"):
        load_token_counts(dataset_copy)


@pytest.mark.parametrize("seed", range(6))
def test_length_statistics(seed: int):
    generator = np.random.default_rng(seed)
    lengths = (generator.pareto(0.7, 101 + seed) * 5).clip(0, 3_000_000).astype(np.int32) + 1
    found = length_statistics(np.array_split(lengths, 7))
    assert (found.min, found.max) == (lengths.min(), lengths.max())
    assert (found.mean, found.median) == (pytest.approx(lengths.mean()), np.median(lengths))
    expected = np.histogram(lengths, bins=[1 << power for power in range(31)])[0]
    assert found.histogram == {str(1 << power): count for power, count in enumerate(expected) if count}


def test_length_statistics_at_powers_of_two():
    lengths = np.array([1, 2, 3, 4, 7, 8, 2**30, 2**31 - 1], np.int32)
    assert length_statistics([lengths]).histogram == {"1": 1, "2": 2, "4": 2, "8": 1, str(1 << 30): 2}
    assert length_statistics([lengths]).median == 5.5
    assert length_statistics([np.array([5], np.int32)]).median == 5
