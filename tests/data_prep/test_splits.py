"""Documents by the hash of their text, and datasets by domain, from one pass."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pile_texts import TINY

from data_prep.blend import Weighting, load_blend
from data_prep.errors import UserError
from data_prep.files import bin_path, blend_path
from data_prep.indexed import IndexedReader
from data_prep.manifest import Subset, load_manifest
from data_prep.preprocess import main, plan_job, prepare
from data_prep.sources import ReadOptions
from data_prep.splits import HashSplit, parse_shares, slugs
from data_prep.tokenizers import Tokenizer
from data_prep.verify import verify

SHARES = (0.6, 0.25, 0.15)


def expected_split(text: str) -> str:
    """By the definition, in rational numbers."""
    place = int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) / 2**64
    return "validation" if place < 0.25 else "test" if place < 0.4 else "train"


def texts_of(prefix: Path, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(ids.tolist()) for ids in IndexedReader(prefix)]


def test_the_split_never_changes():
    """These are for ever: training on them after an update of this code would spoil held-out data."""
    split = HashSplit((0.9, 0.05, 0.05))
    found = {number: split.of(f"document {number}".encode()) for number in range(100)}
    held_out = {40: "validation", 44: "test", 59: "test", 70: "validation", 81: "test"}
    assert {number: name for number, name in found.items() if name != "train"} == held_out


def test_shares_of_many_documents():
    counts = Counter(HashSplit(SHARES).of(str(number).encode()) for number in range(20_000))
    for name, share in zip(("train", "validation", "test"), SHARES, strict=True):
        assert abs(counts[name] / 20_000 - share) < 0.015
    assert {HashSplit((0.0, 1.0, 0.0)).of(str(number).encode()) for number in range(100)} == {"validation"}
    assert {HashSplit((1.0, 0.0, 0.0)).of(str(number).encode()) for number in range(100)} == {"train"}


def test_larger_training_share_keeps_validation_apart():
    """Growing the test share, or shrinking it, moves no validation document into training."""
    one, other = HashSplit((0.9, 0.05, 0.05)), HashSplit((0.94, 0.05, 0.01))
    texts = [str(number).encode() for number in range(5000)]
    assert [t for t in texts if one.of(t) == "validation"] == [t for t in texts if other.of(t) == "validation"]


@pytest.mark.parametrize("text", ["", "1", "0.5,0.5", "0.5,0.4,0.2", "a,b,c", "1.1,-0.1,0", "nan,0,0"])
def test_bad_shares(text: str):
    with pytest.raises(UserError, match="three shares"):
        parse_shares(text)


def test_slugs():
    assert slugs(["Pile-CC", "Wikipedia (en)", "Gutenberg (PG-19)", "漢字"]) == {
        "Pile-CC": "pile-cc",
        "Wikipedia (en)": "wikipedia-en",
        "Gutenberg (PG-19)": "gutenberg-pg-19",
        "漢字": "漢字",
    }
    difficult = slugs(["a b", "A-b", "!!", "/../", "x" * 300, "c"])
    assert len(set(difficult.values())) == 6 and difficult["c"] == "c"
    for slug in difficult.values():
        assert slug and "/" not in slug and "." not in slug and len(slug) < 100


def test_splits_of_a_pass(tmp_path: Path, tokenizer_path: Path, tokenizer: Tokenizer, tiny_records: list[Any]):
    arguments = ["--input", str(TINY), "--tokenizer", str(tokenizer_path), "--output_prefix", str(tmp_path / "d")]
    assert main([*arguments, "--split", ",".join(map(str, SHARES))]) == 0
    for name in ("train", "validation", "test"):
        prefix = tmp_path / f"d.{name}"
        expected = [record["text"] for record in tiny_records if expected_split(record["text"]) == name]
        assert len(expected) > 1 and texts_of(prefix, tokenizer) == expected
        manifest = verify(prefix)
        assert manifest.subset == Subset(name, SHARES, None)
        assert manifest.text_bytes == sum(len(text.encode()) for text in expected)
    assert not bin_path(tmp_path / "d").exists() and len(list(tmp_path.iterdir())) == 15
    assert main([*arguments, "--split", ",".join(map(str, SHARES))]) == 2  # exists already


def test_held_out_documents_stay_when_files_are_added(
    tmp_path: Path, tokenizer_path: Path, tokenizer: Tokenizer, tiny_records: list[Any], write_jsonl: Any
):
    first = write_jsonl(tiny_records[::2], "first.jsonl")
    second = write_jsonl(tiny_records[::-1], "second.jsonl")  # the same texts, elsewhere, among others

    def split(inputs: list[Path], prefix: Path) -> dict[str, set[str]]:
        prepare(plan_job(inputs, tokenizer_path, prefix, ReadOptions(), split=SHARES), workers=2)
        return {
            name: set(texts_of(Path(f"{prefix}.{name}"), tokenizer)) for name in ("train", "validation", "test")
        }

    before, after = split([first], tmp_path / "a"), split([second, first], tmp_path / "b")
    for name, texts in before.items():
        assert texts < after[name]
        assert not any(texts & others for other, others in after.items() if other != name)


def test_datasets_by_domain_with_a_blend(
    tmp_path: Path,
    tokenizer_path: Path,
    tokenizer: Tokenizer,
    tiny_records: list[Any],
    monkeypatch: Any,
    capsys: Any,
):
    monkeypatch.setattr("data_prep.sources.shards._LEAST_SHARD_BYTES", 10_000)
    command = [
        "--input",
        str(TINY),
        "--tokenizer",
        str(tokenizer_path),
        "--output_prefix",
        str(tmp_path / "o" / "d"),
    ]
    command += ["--split", ",".join(map(str, SHARES)), "--split_by", "meta.pile_set_name"]
    assert main([*command, "--blend_weights", "temperature", "--temperature", "2"]) == 0
    printed = capsys.readouterr().out
    assert "│ .state-of-the-union.validation " in printed  # not broken within 80 columns
    assert f"{blend_path(tmp_path / 'o' / 'd')}: their weights" in printed
    blend = load_blend(blend_path(tmp_path / "o" / "d"))
    assert blend.weights_by == "temperature"
    seen = []
    roots = {entry.name: load_manifest(entry.train).tokens ** 0.5 for entry in blend.entries}
    for entry in blend.entries:
        manifest = verify(entry.train)
        assert list(manifest.domains) == [entry.name]
        assert manifest.subset == Subset("train", SHARES, entry.name)
        assert entry.weight == pytest.approx(roots[entry.name] / sum(roots.values()), rel=1e-5)
        for split, prefix in (("train", entry.train), ("validation", entry.validation), ("test", entry.test)):
            expected = [
                record["text"]
                for record in tiny_records
                if record["meta"]["pile_set_name"] == entry.name and expected_split(record["text"]) == split
            ]
            assert (prefix is None) == (expected == [])
            if prefix:
                assert texts_of(prefix, tokenizer) == expected
                seen += expected
    assert len(seen) > 30 and len(set(seen)) == len(seen)


def test_a_blend_that_cannot_be_weighted_keeps_the_parts(tmp_path: Path, tokenizer_path: Path):
    job = plan_job([TINY], tokenizer_path, tmp_path / "d", ReadOptions(), by_domain=True)
    with pytest.raises(UserError, match=r"is no component of the Pile; weight by size") as error:
        prepare(job, weighting=Weighting("pile"))
    assert "all parts are finished" in error.value.__notes__[0]
    assert len(prepare(job)) == 12


def test_too_many_domains_are_a_wrong_key(
    tmp_path: Path, tokenizer_path: Path, write_jsonl: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("data_prep.encode.MOST_OUTPUTS", 5)
    source = write_jsonl([{"text": "a", "id": str(number)} for number in range(10)])
    job = plan_job([source], tokenizer_path, tmp_path / "d", ReadOptions(domain_key="id"), by_domain=True)
    with pytest.raises(UserError, match="--split_by id: makes more than 5 datasets"):
        prepare(job)
    assert not list(tmp_path.glob("d.*.bin"))


def test_outputs_without_a_document_are_left_out(tmp_path: Path, tokenizer_path: Path, write_jsonl: Any):
    source = write_jsonl([{"text": "a"}])
    job = plan_job([source], tokenizer_path, tmp_path / "d", ReadOptions(), split=(0.0, 1.0, 0.0))
    assert list(prepare(job)) == [tmp_path / "d.validation"]
    job = plan_job([source], tokenizer_path, tmp_path / "e", ReadOptions(), split=(0.0, 1.0, 0.0), by_domain=True)
    with pytest.raises(UserError, match="no document is left to train on"):
        prepare(job)
    np.testing.assert_array_equal(IndexedReader(tmp_path / "d.validation").lengths, [2])
