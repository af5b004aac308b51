"""Exact and near duplicates against plain Python; memory; the first one stays, however the input is cut."""

import functools
import itertools
import json
import random
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.duplicates import DuplicateOptions, find_duplicates, write_signatures
from data_prep.errors import UserError
from data_prep.files import bin_path, idx_path
from data_prep.manifest import load_manifest
from data_prep.preprocess import main, plan_job, prepare, preprocess
from data_prep.sources import Document, ReadOptions, Shard, expand_inputs, plan_shards, read_shard

EXACT, NEAR = DuplicateOptions("exact"), DuplicateOptions("near", threshold=0.7)


def dropped_of(shards: list[Shard], folder: Path, read: ReadOptions, options: DuplicateOptions) -> list[Any]:
    paths = [folder / f"{number}.signatures" for number in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        write_signatures(path, shard, read, options)
    return find_duplicates(paths, options)


def kept(path: Path, options: DuplicateOptions, shard_bytes: int, read: ReadOptions | None = None) -> list[str]:
    read = read or ReadOptions(on_error="skip")
    shards = plan_shards(expand_inputs([path]), read, shard_bytes)
    drops = dropped_of(shards, path.parent, read, options)
    items = [item for shard, drop in zip(shards, drops, strict=True) for _, item in read_shard(shard, read, drop)]
    return [item.text for item in items if isinstance(item, Document)]


def words(seed: int, count: int = 200) -> list[str]:
    rng = random.Random(seed)
    return [f"w{rng.randrange(5000)}" for _ in range(count)]


def jaccard(a: str, b: str) -> float:
    first, second = ngrams(a), ngrams(b)
    return len(first & second) / len(first | second)


@functools.cache
def ngrams(text: str) -> set[tuple[str, ...]]:
    every = text.split()
    return {tuple(every[i : i + 5]) for i in range(max(1, len(every) - 4))}


@pytest.mark.parametrize("shard_bytes", [50, 1000, 1 << 20])
def test_exact_duplicates(write_jsonl: Any, shard_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Over several comparisons, with records that are no documents between."""
    monkeypatch.setattr("data_prep.duplicates._COMPARED_DOCUMENTS", 70)
    rng = random.Random(0)
    records: list[Any] = [{"text": f"text {rng.randrange(100)}"} for _ in range(300)]
    records[::7] = [{"text": ""}] * len(records[::7])
    records[::50] = [b"{bad"] * len(records[::50])
    expected = list(dict.fromkeys(r["text"] for r in records if isinstance(r, dict) and r["text"]))
    path = write_jsonl(records)
    assert kept(path, EXACT, shard_bytes) == expected
    assert kept(path, DuplicateOptions("near"), shard_bytes) == expected  # equal is near; 2 words are one n-gram


@pytest.mark.parametrize("shard_bytes", [500, 1 << 20])
def test_near_duplicates_are_those_of_a_similarity_above_the_threshold(write_jsonl: Any, shard_bytes: int):
    """Every pair is far from the threshold, so that the estimate must decide as the similarity does."""
    texts = []
    for seed in range(40):
        base = words(seed)
        texts.append(" ".join(base))
        texts.append(" ".join([*base[:-3], *words(1000 + seed, 3)]))  # near
        texts.append(" ".join([*base[:80], *words(2000 + seed, 120)]))  # not near
    random.Random(1).shuffle(texts)
    expected: list[str] = []
    for text in texts:
        similarities = [jaccard(text, other) for other in expected]
        assert all(value < 0.4 or value > 0.9 for value in similarities)
        if not any(value > NEAR.threshold for value in similarities):
            expected.append(text)
    assert len(expected) == 80
    path = write_jsonl([{"text": text} for text in texts])
    assert kept(path, NEAR, shard_bytes) == expected
    assert kept(path, EXACT, shard_bytes) == texts


def test_candidates_below_the_threshold_stay(write_jsonl: Any):
    """At 0.9 the index proposes about every seventh pair of similarity 0.75."""
    texts = []
    for seed in range(60):
        base = words(seed)
        texts += [" ".join(base), " ".join([*base[:-28], *words(1000 + seed, 28)])]
    assert all(0.7 < jaccard(*pair) < 0.8 for pair in zip(texts[::2], texts[1::2], strict=True))
    assert kept(write_jsonl([{"text": text} for text in texts]), DuplicateOptions("near", 0.9), 1 << 20) == texts


def test_what_the_filter_refuses_does_not_stand_for_its_duplicates(write_jsonl: Any, tmp_path: Path):
    (tmp_path / "choose.py").write_text("def later(text, domain, record): return record['n'] > 0\n")
    path = write_jsonl([{"text": "a", "n": n} for n in range(3)])
    read = ReadOptions(filter=f"{tmp_path}/choose.py:later")
    assert kept(path, EXACT, 1 << 20, read) == ["a"]


def test_memory_of_comparing_exact_hashes_is_bounded(tmp_path: Path):
    """Five million documents; 1% of them occurred before."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(10):
        hashes = rng.integers(0, 2**63, (500_000, 2), np.uint64)
        if number > 0:
            hashes[:5000] = np.arange(10_000).reshape(5000, 2)
        paths.append(tmp_path / str(number))
        hashes.tofile(paths[-1])
    del hashes
    tracemalloc.start()
    drops = find_duplicates(paths, EXACT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(drop) for drop in drops] == [0, 0] + [5000] * 8
    assert all(np.array_equal(drop, np.arange(5000)) for drop in drops[2:])
    assert peak < 200e6


def test_a_long_document_is_signed_in_bounded_memory(tmp_path: Path):
    path = tmp_path / "long.txt"
    path.write_text(" ".join(map(str, range(150_000))))
    shards = plan_shards(expand_inputs([path]))
    write_signatures(tmp_path / "warm", shards[0], ReadOptions(document_marker="x"), EXACT)
    tracemalloc.start()
    write_signatures(tmp_path / "s", shards[0], ReadOptions(), DuplicateOptions("near", num_permutations=16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "s").stat().st_size == 64
    assert peak < 5 * path.stat().st_size


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for threshold in (0, 1.1):
        with pytest.raises(UserError, match="--near_threshold"):
            DuplicateOptions("near", threshold=threshold)
    with pytest.raises(UserError, match="--near_permutations"):
        DuplicateOptions("near", num_permutations=1)
    (tmp_path / "s").write_bytes(b"x" * 17)
    with pytest.raises(UserError, match="17 bytes are no multiple of 16"):
        find_duplicates([tmp_path / "s"], EXACT)
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(UserError, match=r"pip install leviathan_ds\[data\]"):
        DuplicateOptions("near")
    DuplicateOptions("exact")


def test_word_ngrams_are_all_windows():
    from data_prep.duplicates import _word_ngrams

    text = " a b\n c\td  e f g "
    expected = [" ".join(window) for window in itertools.pairwise(text.split())]
    assert list(_word_ngrams(text, 2)) == expected
    assert list(_word_ngrams(text, 7)) == list(_word_ngrams(text, 99)) == ["a b c d e f g"]


# --- the whole command ---

REPEATED = [{"text": text} for text in ("one two", "three", "one two", "", "four", "three", "one two", "five")]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("method", ["exact", "near"])
def test_preprocess_without_duplicates_is_that_of_the_distinct_documents(
    write_jsonl: Any, tokenizer_path: Path, tmp_path: Path, workers: int, method: Any
):
    (tmp_path / "in").mkdir()
    for number in range(3):  # two small files share a shard; the third is cut in two
        own = [{"text": f"of its own {number} " * (1000 if number == 2 else 1)}] * (300 if number == 2 else 1)
        write_jsonl(REPEATED + own, f"in/{number}.jsonl")
    texts = [json.loads(line)["text"] for path in sorted((tmp_path / "in").iterdir()) for line in path.open()]
    distinct = write_jsonl([{"text": text} for text in dict.fromkeys(texts) if text], "distinct.jsonl")
    preprocess([distinct], tokenizer_path, tmp_path / "expected")
    command = (
        f"--input {tmp_path}/in --tokenizer {tokenizer_path} --output_prefix {tmp_path}/d --workers {workers}"
    )
    assert main([*command.split(), "--deduplicate", method]) == 0
    for make in (bin_path, idx_path):
        assert make(tmp_path / "d").read_bytes() == make(tmp_path / "expected").read_bytes()
    manifest = load_manifest(tmp_path / "d")
    assert manifest.skipped == {"duplicate": len(texts) - 3 - 7, "empty_text": 3}
    assert manifest.options["duplicates"]["method"] == method
    assert not list(tmp_path.glob("d.parts*"))


def test_a_run_that_failed_goes_on_with_its_signatures(
    write_jsonl: Any, tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_jsonl(REPEATED)
    job = partial(plan_job, [path], tokenizer_path, tmp_path / "d", ReadOptions(), duplicates=EXACT)
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.preprocess.find_duplicates", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(job())
    [signatures] = (tmp_path / "d.parts").glob("*.signatures")
    before = signatures.stat().st_mtime_ns
    seen = []
    monkeypatch.setattr(
        "data_prep.preprocess.find_duplicates",
        lambda paths, options: seen.append(paths[0].stat().st_mtime_ns) or find_duplicates(paths, options),
    )
    [manifest] = prepare(job()).values()
    assert seen == [before] and manifest.documents == 4


def test_machines_cannot_share_it(write_jsonl: Any, tokenizer_path: Path, tmp_path: Path, capsys: Any):
    command = f"--input {write_jsonl(REPEATED)} --tokenizer {tokenizer_path} --output_prefix {tmp_path}/d"
    assert main([*command.split(), "--deduplicate", "exact", "--shard_index", "0", "--num_shards", "2"]) == 2
    assert "--deduplicate compares all documents" in capsys.readouterr().err
