"""Pieces of inputs: every record in exactly one, whatever the cuts; formats agree; damage is one piece's."""

import gzip
import hashlib
import json
import lzma
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pile_texts import TINY

from data_prep.errors import UserError
from data_prep.sources import (
    BadLine,
    Document,
    Piece,
    ReadOptions,
    Shard,
    Skip,
    expand_inputs,
    plan_shards,
    read_shard,
)

ROOT = Path(__file__).parents[2]
SKIP = ReadOptions(on_error="skip")
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
}


def parsed(shards: list[Shard], options: ReadOptions | None = None) -> list[Document | Skip]:
    return [item for shard in shards for _, item in read_shard(shard, options or ReadOptions())]


def placed(shards: list[Shard], options: ReadOptions | None = None) -> list[tuple[str, Document | Skip]]:
    """(place as in messages, document or skip)."""
    return [(str(place), item) for shard in shards for place, item in read_shard(shard, options or ReadOptions())]


def texts(shards: list[Shard], options: ReadOptions | None = None) -> list[str]:
    return [item.text for item in parsed(shards, options) if isinstance(item, Document)]


def skips(shards: list[Shard], options: ReadOptions | None = None) -> list[str]:
    return [item.reason for item in parsed(shards, options) if isinstance(item, Skip)]


def cut(path: Path, starts: list[int]) -> list[Shard]:
    """Shards of `path` cut at `starts`, 0 among them."""
    [source] = expand_inputs([path])
    return [Shard((Piece(source, start, end, 0),)) for start, end in zip(starts, [*starts[1:], None], strict=True)]


def with_suffix(folder: Path, suffix: str, content: bytes) -> Path:
    path = folder / f"in.jsonl{suffix}"
    path.write_bytes(PACK[suffix](content))
    return path


LINES = [b'\xef\xbb\xbf{"text": "one"}\r\n', b"\n", b'{"text": "\\n"}\n', b'{"text": "two"}\n', b'{"text": "3"}']


@pytest.mark.parametrize("suffix", PACK)
def test_cut_at_any_two_bytes_every_line_comes_once(tmp_path: Path, suffix: str):
    content = b"".join(LINES)
    path = with_suffix(tmp_path, suffix, content)
    expected = [
        (f"{path}: line 1", Document("one", "unknown")),
        (f"{path}: line 2", Skip("blank_line")),
        (f"{path}: line 3", Skip("whitespace_text")),
        (f"{path}: line 4", Document("two", "unknown")),
        (f"{path}: line 5", Document("3", "unknown")),
    ]
    for first in range(1, len(content) + 3):
        for second in range(first + 1, len(content) + 4, 1 if suffix == "" else 7):
            assert placed(cut(path, [0, first, second])) == expected, (first, second)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_pieces_of_a_compressed_file_in_any_order(tmp_path: Path, suffix: str):
    """A worker goes on where it stands, skips forward, or begins again."""
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(200))
    path = with_suffix(tmp_path, suffix, content)
    shards = cut(path, list(range(0, len(content) + 300, 100)))
    expected = [texts([shard]) for shard in shards]
    assert [text for piece in expected for text in piece] == [str(number) for number in range(200)]
    assert expected[-1] == expected[-2] == []  # beyond the end
    for order in (range(0, len(shards), 2), reversed(range(len(shards))), (5, 5, 4, 9, 20, 3)):
        for index in order:
            assert texts([shards[index]]) == expected[index]


def test_a_compressed_file_is_decompressed_once_for_pieces_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = with_suffix(tmp_path, ".gz", b"".join(b'{"text": "%d"}\n' % number for number in range(200)))
    opened = []
    real = gzip.GzipFile
    monkeypatch.setattr(gzip, "GzipFile", lambda **kw: opened.append(1) or real(**kw))
    texts(cut(path, list(range(0, 3000, 100))))
    assert len(opened) == 1


MARKED = "first\r\nline\n<|end|>\n<|end|>\r\n \n<|end|>\nno <|end|> here\n<|end|>\nlast\n<|end|>"


@pytest.mark.parametrize("tail", ["", "\n", "\nmore\n"])
def test_marked_text_cut_at_any_two_bytes(tmp_path: Path, tail: str):
    path = tmp_path / "a.txt"
    path.write_bytes((MARKED + tail).encode())
    options = ReadOptions(document_marker="<|end|>")
    expected = ["first\r\nline", "no <|end|> here", "last", *(["more"] if "more" in tail else [])]
    size = path.stat().st_size
    for first in range(1, size + 2):
        for second in range(first + 1, size + 3, 3):
            found = placed(cut(path, [0, first, second]), options)
            assert [item.text for _, item in found if isinstance(item, Document)] == expected, (first, second)
            assert [entry for entry in found if isinstance(entry[1], Skip)] == [
                (f"{path}: line 5", Skip("whitespace_text"))
            ]


def test_blank_lines_as_marker(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\n\na\nb\n\n\nc\r\n\r\nd")
    shards = cut(tmp_path / "a.txt", [0])
    assert texts(shards, ReadOptions(document_marker="")) == ["a\nb", "c", "d"]
    with pytest.raises(UserError, match="more than one line"):
        ReadOptions(document_marker="\n\n")


def test_text_files_are_documents_and_small_files_share_a_shard(tmp_path: Path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_bytes(b"\xef\xbb\xbf text %d\r\n" % number)
    (tmp_path / "20.txt").write_bytes(b"x" * 5000)
    shards = plan_shards(expand_inputs([tmp_path]), shard_bytes=100)
    assert texts(shards) == [f" text {number}\r\n" for number in range(20)] + ["x" * 5000]
    assert [len(shard.pieces) for shard in shards] == [8, 7, 5, 1]
    for shard in shards:
        reader = read_shard(shard, ReadOptions())
        assert list(reader) and reader.num_bytes == shard.num_bytes


def test_text_that_is_no_utf8(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"good\n--\nb\xffd\n--\ngood")
    with pytest.raises(BadLine, match=r"a\.txt: invalid UTF-8 at byte 9"):
        texts(cut(tmp_path / "a.txt", [0]))
    with pytest.raises(BadLine, match=r"a\.txt: line 3: invalid UTF-8 at byte 1"):
        texts(cut(tmp_path / "a.txt", [0]), ReadOptions(document_marker="--"))
    found = parsed(cut(tmp_path / "a.txt", [0]), ReadOptions(document_marker="--", on_error="skip"))
    assert found == [Document("good", "unknown"), Skip("invalid_utf8"), Document("good", "unknown")]


# --- columns ---

Writer = Callable[[Path, list[dict[str, Any]]], Path]


def write_parquet(folder: Path, records: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet", row_group_size=4)
    return folder / "a.parquet"


def write_arrow_file(folder: Path, records: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_file(str(folder / "file.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return folder / "file.arrow"


def write_arrow_stream(folder: Path, records: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_stream(str(folder / "stream.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return folder / "stream.arrow"


COLUMNS = [write_parquet, write_arrow_file, write_arrow_stream]


@pytest.mark.parametrize("write", COLUMNS)
@pytest.mark.parametrize("meta", ["struct", "json", "absent", "flat"])
@pytest.mark.parametrize("shard_bytes", [1, 10_000, 1 << 30])
def test_columns_give_the_documents_of_jsonl(
    tmp_path: Path, tiny_records: list[Any], write: Writer, meta: str, shard_bytes: int
):
    change: dict[str, Callable[[Any], dict[str, Any]]] = {
        "struct": lambda r: {"meta": r["meta"]},
        "json": lambda r: {"meta": json.dumps(r["meta"])},
        "absent": lambda r: {},
        "flat": lambda r: {"meta.pile_set_name": r["meta"]["pile_set_name"]},
    }
    path = write(tmp_path, [{"id": i, "text": r["text"]} | change[meta](r) for i, r in enumerate(tiny_records)])
    shards = plan_shards(expand_inputs([path]), shard_bytes=shard_bytes)
    assert len(shards) == {1: 9, 1 << 30: 1}.get(shard_bytes, len(shards))
    found = placed(shards)
    domains = ["unknown" if meta == "absent" else r["meta"]["pile_set_name"] for r in tiny_records]
    expected = [Document(r["text"], domain) for r, domain in zip(tiny_records, domains, strict=True)]
    assert [item for _, item in found] == expected
    assert [place for place, _ in found] == [f"{path}: row {i}" for i in range(35)]
    for shard in shards:
        reader = read_shard(shard, ReadOptions())
        assert list(reader) and reader.num_bytes <= shard.num_bytes


@pytest.mark.parametrize("write", COLUMNS)
def test_places_count_rows_over_batches_and_groups(tmp_path: Path, write: Writer):
    path = write(tmp_path, [{"text": f"{number}"} for number in range(1500)])
    for shard_bytes in (100, 1 << 30):
        found = placed(plan_shards(expand_inputs([path]), shard_bytes=shard_bytes))
        assert [(place, item.text) for place, item in found if isinstance(item, Document)] == [
            (f"{path}: row {number}", f"{number}") for number in range(1500)
        ]


@pytest.mark.parametrize("write", COLUMNS)
def test_rows_without_text(tmp_path: Path, write: Writer):
    path = write(tmp_path, [{"text": "a"}, {"text": ""}, {"text": None}, {"text": " "}])
    shards = plan_shards(expand_inputs([path]))
    assert texts(shards) == ["a"]
    assert skips(shards) == ["empty_text", "null_text", "whitespace_text"]
    assert skips(shards, ReadOptions("body")) == ["missing_text"] * 4
    path = write(tmp_path, [{"text": 5}])
    with pytest.raises(BadLine, match="row 0: 'text' is no string"):
        parsed(plan_shards(expand_inputs([path])))


@pytest.mark.parametrize("write", COLUMNS)
@pytest.mark.parametrize("keep", [0, 0.3, 0.6, 0.97, -8, -1])
def test_columns_cut_off_anywhere(tmp_path: Path, tiny_records: list[Any], write: Writer, keep: float):
    path = write(tmp_path, tiny_records)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep) if keep < 0 else int(len(whole) * keep)])
    with pytest.raises(BadLine, match=rf"{path.name}: damaged or truncated"):
        parsed(plan_shards(expand_inputs([path])))
    shards = plan_shards(expand_inputs([path, TINY]), SKIP)
    assert texts(shards, SKIP)[-35:] == texts(cut(TINY, [0]))
    assert skips(shards, SKIP) == ["truncated_file"]


@pytest.mark.parametrize("write", COLUMNS)
def test_columns_of_another_format(tmp_path: Path, write: Writer):
    path = write(tmp_path, [{"text": "a"}])
    path.write_bytes(TINY.read_bytes())
    with pytest.raises(BadLine, match=rf"{path.name}: damaged or truncated"):
        plan_shards(expand_inputs([path]))


def test_damaged_row_group_is_one_pieces_loss(tmp_path: Path, tiny_records: list[Any]):
    path = write_parquet(tmp_path, tiny_records)
    content = bytearray(path.read_bytes())
    with pq.ParquetFile(path) as file:
        start = file.metadata.row_group(3).column(0).data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    shards = plan_shards(expand_inputs([path]), shard_bytes=1)
    with pytest.raises(BadLine, match=r"a\.parquet: damaged or truncated after row"):
        parsed(shards)
    assert len(texts(shards, SKIP)) == 31
    assert skips(shards, SKIP) == ["truncated_file"]


# --- damage, size, change ---


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_damage_is_counted_by_one_piece_and_its_line_known_to_all(tmp_path: Path, suffix: str):
    rng = np.random.default_rng(0)
    lines = [b'{"text": "%s"}\n' % rng.bytes(40).hex().encode() for _ in range(3000)]
    path = with_suffix(tmp_path, suffix, b"".join(lines))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    shards = cut(path, list(range(0, 300_000, 10_000)))
    number = len(texts(shards, SKIP))
    assert 500 < number < 2500
    assert skips(shards, SKIP) == ["truncated_file"]
    messages = set()
    for shard in shards:
        try:
            parsed([shard])
        except BadLine as error:
            messages.add(str(error))
    assert len(messages) == 1 and f"in.jsonl{suffix}: damaged or truncated after line {number} (" in messages.pop()


def test_one_broken_line_far_into_a_plain_file_is_named(tmp_path: Path):
    path = with_suffix(tmp_path, "", b'{"text": "a"}\n' * 100_000 + b"{bad\n" + b'{"text": "a"}\n' * 5)
    shards = plan_shards(expand_inputs([path]), shard_bytes=100_000)
    with pytest.raises(BadLine, match="line 100001: broken JSON"):
        parsed(shards)
    assert len(texts(shards, SKIP)) == 100_005


LONG_DOCUMENT = """
import resource, sys
from data_prep.sources import Piece, ReadOptions, Shard, expand_inputs, read_shard
[source] = expand_inputs(sys.argv[1:])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for start in range(0, 56 << 20, 8 << 20):
    for _, document in read_shard(Shard((Piece(source, start, start + (8 << 20), 0),)), ReadOptions()):
        print(len(document.text))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_fifty_megabyte_document_over_many_pieces(tmp_path: Path, suffix: str):
    """It comes once, from the piece that it begins in, and takes a few times its size."""
    long = b'{"text": "' + b"word " * 10_000_000 + b'"}\n'
    path = with_suffix(tmp_path, suffix, b'{"text": "a"}\n' + long + b'{"text": "b"}\n')
    command = [sys.executable, "-c", LONG_DOCUMENT, str(path)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout.split()
    assert output[:3] == [b"1", b"50000000", b"1"]
    assert int(output[3]) < 350  # MiB


def test_memory_of_reading_does_not_grow_with_the_file(tmp_path: Path):
    path = with_suffix(tmp_path, "", b'{"text": "some words of a document"}\n' * 300_000)
    shards = plan_shards(expand_inputs([path]), shard_bytes=1 << 20)
    tracemalloc.start()
    assert sum(1 for shard in shards[:4] for _ in read_shard(shard, ReadOptions())) > 100_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3e6


def test_a_source_changed_after_the_plan_is_refused(tmp_path: Path):
    path = with_suffix(tmp_path, "", b'{"text": "a"}\n')
    shards = plan_shards(expand_inputs([path]))
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(UserError, match=r"in\.jsonl: changed since the run was planned"):
        parsed(shards)


# --- the plan ---


@pytest.mark.parametrize("suffix", PACK)
def test_plan_covers_the_file_in_pieces_of_the_size_asked_for(tmp_path: Path, suffix: str):
    path = with_suffix(tmp_path, suffix, TINY.read_bytes() * 10)
    [source] = expand_inputs([path])
    shards = plan_shards([source], shard_bytes=30_000)
    assert len(shards) > 10
    assert pickle.loads(pickle.dumps(shards)) == shards == plan_shards([source], None, 30_000)
    assert sum(shard.num_bytes for shard in shards) == source.num_bytes
    assert texts(shards) == [json.loads(line)["text"] for line in TINY.read_bytes().splitlines()] * 10
    readers = [read_shard(shard, ReadOptions()) for shard in shards]
    assert sum(1 for reader in readers for _ in reader) == 350
    assert sum(reader.num_bytes for reader in readers) == source.num_bytes
    # The last piece, which takes what remains, is not the bulk of it.
    assert len(texts(shards[-1:])) <= 350 / len(shards) * 1.5


def test_hash_is_of_the_content(tmp_path: Path):
    plain, packed = (with_suffix(tmp_path, suffix, TINY.read_bytes()) for suffix in ("", ".zst"))
    digests = []
    for path in (plain, packed):
        reader = read_shard(cut(path, [0])[0], ReadOptions())
        list(reader)
        digests.append(reader.sha256)
    assert digests == [hashlib.sha256(TINY.read_bytes()).hexdigest()] * 2


def test_dropped_documents_are_counted_as_duplicates():
    [shard] = cut(TINY, [0])
    drop = np.array([0, 3, 34])
    some = [item for _, item in read_shard(shard, ReadOptions(), drop)]
    expected = parsed([shard])
    for index in drop:
        expected[index] = Skip("duplicate")
    assert some == expected


def test_the_expansion_of_a_stream_that_changes_only_costs_balance(tmp_path: Path):
    """A beginning that packs badly and a rest that packs well: the last piece takes what remains."""
    rng = np.random.default_rng(0)
    lines = [b'{"text": "%s"}\n' % rng.bytes(500).hex().encode() for _ in range(3000)]
    lines += [b'{"text": "%s"}\n' % (b"a" * 1000)] * 3000
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(zstandard.compress(b"".join(lines)))
    shards = plan_shards(expand_inputs([path]), shard_bytes=200_000)
    assert len(texts(shards)) == 6000
