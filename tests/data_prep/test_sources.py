"""Files to documents: formats, order, what is skipped and what is an error."""

import gzip
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from pile_texts import TINY

from data_prep.sample import sample_corpus_path
from data_prep.sources import BadLine, Document, ReadOptions, iter_documents

GOOD = {"text": "good", "meta": {"pile_set_name": "A"}}


def packed(name: str, plain: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(plain)
    if name.endswith(".zst"):
        return zstandard.compress(plain)
    if name.endswith(".xz"):
        return lzma.compress(plain)
    return plain


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz"])
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str, tiny_records: list[Any]):
    path = tmp_path / name
    path.write_bytes(packed(name, TINY.read_bytes()))
    expected = [Document(r["text"], r["meta"]["pile_set_name"]) for r in tiny_records]
    assert list(iter_documents([path])) == expected


def test_sample_corpus_is_whole():
    documents = list(iter_documents([sample_corpus_path()]))
    assert len(documents) == 793
    assert sum(len(document.text.encode()) for document in documents) == 10_939_815
    assert len({document.domain for document in documents}) == 12


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz"])
def test_concatenated_frames_are_one_file(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(b"".join(packed(name, orjson.dumps({"text": text}) + b"\n") for text in "abc"))
    assert [document.text for document in iter_documents([path])] == ["a", "b", "c"]


def test_long_window_zstd(tmp_path: Path):
    """The Pile's shards: a window above the 8 MiB that decoders accept unasked."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    plain = orjson.dumps({"text": "x" * (9 << 20)})
    path = tmp_path / "a.jsonl.zst"
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(compressor.compress(plain) + compressor.flush())
    assert [len(document.text) for document in iter_documents([path])] == [9 << 20]


@pytest.mark.parametrize(
    ("meta", "domain"),
    [
        ({"meta": {"pile_set_name": "A"}}, "A"),
        ({"meta": '{"pile_set_name": "A"}'}, "A"),
        ({"meta": "no json"}, "unknown"),
        ({"meta": None}, "unknown"),
        ({"meta": {"pile_set_name": None}}, "unknown"),
        ({}, "unknown"),
        ({"meta.pile_set_name": "flat"}, "flat"),
    ],
)
def test_domain(write_jsonl: Any, meta: dict[str, Any], domain: str):
    path = write_jsonl([{"text": "x"} | meta])
    assert list(iter_documents([path])) == [Document("x", domain)]


def test_keys_by_name(write_jsonl: Any):
    path = write_jsonl([{"body": {"en": "x"}, "source": "S", "text": "not this"}])
    assert list(iter_documents([path], ReadOptions("body.en", "source"))) == [Document("x", "S")]


BLANKS = [
    ({"text": ""}, "empty_text"),
    ({"text": " \n\t"}, "whitespace_text"),
    ({"txt": "x"}, "missing_text"),
]
BLANKS += [({"text": None}, "null_text"), (b"", "blank_line"), (b"  \r", "blank_line")]


@pytest.mark.parametrize(("record", "reason"), BLANKS)
@pytest.mark.parametrize("position", ["first", "middle", "last", "only"])
def test_documents_without_text_are_counted(write_jsonl: Any, record: Any, reason: str, position: str):
    records = {
        "first": [record, GOOD, GOOD],
        "middle": [GOOD, record, GOOD],
        "last": [GOOD, GOOD, record],
        "only": [record],
    }[position]
    skipped = Counter[str]()
    documents = list(iter_documents([write_jsonl(records)], skipped=skipped))
    assert documents == [Document("good", "A")] * records.count(GOOD)
    assert skipped == {reason: 1}


BAD = [
    (b'{"text": "x"', "broken_json", "broken JSON"),
    (b'{"text": "\\ud800"}', "broken_json", "broken JSON"),  # half a surrogate pair is no text
    (b'{"text": "\xff"}', "invalid_utf8", "invalid UTF-8 at byte 10"),
    (b"[1]", "not_an_object", "no JSON object"),
    (b'{"text": 5}', "text_not_a_string", "no string"),
]


@pytest.mark.parametrize(("line", "reason", "message"), BAD)
def test_unreadable_line_fails_with_file_and_line_or_is_counted(
    write_jsonl: Any, line: bytes, reason: str, message: str
):
    path = write_jsonl([GOOD, line, GOOD])
    with pytest.raises(BadLine, match=f"in.jsonl: line 2.*{message}"):
        list(iter_documents([path]))
    skipped = Counter[str]()
    assert len(list(iter_documents([path], ReadOptions(on_error="skip"), skipped))) == 2
    assert skipped == {reason: 1}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_damaged_compressed_file(tmp_path: Path, name: str, damage: str):
    whole = packed(name, TINY.read_bytes())
    middle = len(whole) // 2
    content = {
        "cut": whole[:-20],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) * 64 + whole[middle + 64 :],
        "foreign": TINY.read_bytes(),
    }[damage]
    path = tmp_path / name
    path.write_bytes(content)
    # Changed bytes may also decompress, to something that is no JSON.
    problem = "" if damage == "flipped" else ": damaged or truncated after line"
    with pytest.raises(BadLine, match=name.replace(".", r"\.") + problem):
        list(iter_documents([path, TINY]))
    skipped = Counter[str]()
    documents = list(iter_documents([path, TINY], ReadOptions(on_error="skip"), skipped))
    assert len(documents) >= 35  # the next file is read
    assert sum(skipped.values()) >= 1


def test_crlf_bom_and_missing_last_line_end(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\n"}\r\n{"text": "b"}\r\n{"text": "c"}')
    assert [document.text for document in iter_documents([path])] == ["a\r\n", "b", "c"]


def test_fifty_megabyte_document(write_jsonl: Any):
    path = write_jsonl([{"text": "word " * 10_000_000}, GOOD])
    assert [len(document.text) for document in iter_documents([path])] == [50_000_000, 4]
