"""The whole command: output against an independent reference, failures that leave nothing behind."""

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
import tokenizers
import torch
from megatron.core.datasets import indexed_dataset as megatron
from pile_texts import TINY, tokenizer_copy
from sentencepiece import SentencePieceProcessor

from data_prep.errors import UserError
from data_prep.files import bin_path, dataset_tokenizer_path, idx_path, manifest_path
from data_prep.indexed import IndexedReader
from data_prep.manifest import load_manifest
from data_prep.preprocess import main, preprocess
from data_prep.tokenizers import load_tokenizer
from data_prep.verify import verify

ROOT = Path(__file__).parents[2]


def files_of(prefix: Path) -> dict[str, bytes]:
    return {make.__name__: make(prefix).read_bytes() for make in (bin_path, idx_path, tokenizer_copy)}


def test_equal_to_megatron_and_sentencepiece(
    tmp_path: Path, tiny_dataset: Path, tokenizer_path: Path, tiny_records: list[Any]
):
    processor = SentencePieceProcessor(model_file=str(tokenizer_path))
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.uint16)
    for record in tiny_records:
        ids = [*processor.encode(record["text"]), processor.eos_id()]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "d.idx"))
    assert bin_path(tiny_dataset).read_bytes() == (tmp_path / "d.bin").read_bytes()
    assert idx_path(tiny_dataset).read_bytes() == (tmp_path / "d.idx").read_bytes()
    assert tokenizer_copy(tiny_dataset).read_bytes() == tokenizer_path.read_bytes()
    assert len([path for path in tiny_dataset.parent.iterdir() if path.is_file()]) == 5


def test_manifest_says_what_is_there(tiny_dataset: Path, tokenizer_path: Path, tiny_records: list[Any]):
    manifest = load_manifest(tiny_dataset)
    source = manifest.sources[0]
    assert (source.name, source.bytes) == (str(TINY), TINY.stat().st_size)
    assert source.sha256 == hashlib.sha256(TINY.read_bytes()).hexdigest()
    info = manifest.tokenizer
    assert (info.kind, info.vocab_size, info.eod_id, info.pad_id) == ("sentencepiece", 600, 2, None)
    assert info.fingerprint == hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    assert (tiny_dataset.parent / info.file).read_bytes() == tokenizer_path.read_bytes()
    assert manifest.documents == len(tiny_records) == 35
    assert manifest.tokens == bin_path(tiny_dataset).stat().st_size // 2
    assert manifest.text_bytes == sum(len(record["text"].encode()) for record in tiny_records)
    for name, counts in manifest.domains.items():
        texts = [r["text"] for r in tiny_records if r["meta"]["pile_set_name"] == name]
        assert (counts.documents, counts.bytes) == (len(texts), sum(len(text.encode()) for text in texts))
    assert sum(counts.tokens for counts in manifest.domains.values()) == manifest.tokens
    assert manifest.skipped == {} and manifest.subset is None
    assert manifest.options["text_key"] == "text" and manifest.options["split"] is None
    lengths = np.fromfile(idx_path(tiny_dataset), "<i4", 35, offset=34)
    assert manifest.lengths is not None
    assert (manifest.lengths.min, manifest.lengths.max) == (lengths.min(), lengths.max())
    assert (manifest.lengths.mean, manifest.lengths.median) == (lengths.mean(), np.median(lengths))
    assert sum(manifest.lengths.histogram.values()) == 35
    for power, count in manifest.lengths.histogram.items():
        assert count == sum(int(power) <= length < 2 * int(power) for length in lengths)
    assert manifest.token_counts is not None
    for file in (manifest.bin, manifest.idx, manifest.token_counts):
        content = (tiny_dataset.parent / file.name).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_output_does_not_depend_on_workers_or_shards(
    tmp_path: Path,
    tiny_dataset: Path,
    tokenizer_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
):
    monkeypatch.setattr("data_prep.sources.shards._LEAST_SHARD_BYTES", 10_000)
    manifest = preprocess([TINY], tokenizer_path, tmp_path / "tiny", workers=workers)
    assert files_of(tmp_path / "tiny") == files_of(tiny_dataset)
    assert manifest == load_manifest(tiny_dataset)
    assert verify(tmp_path / "tiny") == manifest


def test_files_in_order_blanks_counted(tmp_path: Path, tokenizer_path: Path, write_jsonl: Any):
    first = write_jsonl([{"text": ""}, {"text": "one </s>"}, {"text": None}], "first.jsonl")
    second = write_jsonl([{"text": "two"}, {"no": 1}, b"{bad", b"", {"text": "three"}], "second.jsonl")
    arguments = {"workers": 2, "on_error": "skip"}
    manifest = preprocess([first, second], tokenizer_path, tmp_path / "d", **arguments)
    processor = SentencePieceProcessor(model_file=str(tokenizer_path))
    tokens = np.fromfile(bin_path(tmp_path / "d"), np.uint16).tolist()
    assert tokens == [i for text in ("one </s>", "two", "three") for i in [*processor.encode(text), 2]]
    assert manifest.skipped == dict(blank_line=1, broken_json=1, empty_text=1, missing_text=1, null_text=1)
    assert [Path(source.name).name for source in manifest.sources] == ["first.jsonl", "second.jsonl"]
    assert verify(tmp_path / "d") == manifest


def test_a_prefix_without_a_name_is_refused(
    tokenizer_path: Path, write_jsonl: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`--output_prefix "$UNSET"` wrote ..bin and ..idx into the working directory."""
    source = write_jsonl([{"text": "a"}])
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    for prefix in ("", ".", "..", "./"):
        command = ["--input", str(source), "--tokenizer", str(tokenizer_path), "--output_prefix", prefix]
        assert main(command) == 2
        assert "--output_prefix" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


def test_a_full_disk_is_named(
    tokenizer_path: Path, write_jsonl: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("data_prep.joining.os.fsync", full)
    source = write_jsonl([{"text": "a"}])
    command = ["--input", str(source), "--tokenizer", str(tokenizer_path), "--output_prefix", str(tmp_path / "d")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "No space left" in error and str(tmp_path / "d") in error
    assert not list(tmp_path.glob("d*"))


BAD_INPUTS = [
    ([{"text": " "}, {"text": ""}], "no document with text"),
    ([], "no document with text"),
    ([{"text": "a"}, b"{bad", {"text": "b"}], "line 2: broken JSON"),
    ([{"text": "a"}] * 9 + [b'{"text": "\xff"}', b"{bad"], "line 10: invalid UTF-8"),
]


@pytest.mark.parametrize(("records", "message"), BAD_INPUTS)
def test_bad_input_leaves_no_file(
    tokenizer_path: Path, write_jsonl: Any, capsys: Any, records: list[Any], message: str
):
    source = write_jsonl(records)
    output = source.parent / "out" / "d"
    command = ["--input", str(source), "--tokenizer", str(tokenizer_path), "--output_prefix", str(output)]
    assert main(command) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and "in.jsonl" in errors[0]
    assert message in errors[0]
    assert list(output.parent.iterdir()) == []


def test_first_bad_line_of_the_input_is_named(
    tmp_path: Path, tokenizer_path: Path, write_jsonl: Any, monkeypatch: pytest.MonkeyPatch
):
    """Shards are read at once; the later ones here fail sooner."""
    monkeypatch.setattr("data_prep.sources.shards._LEAST_SHARD_BYTES", 20_000)
    long = {"text": "a b c\n" * 3000}
    source = write_jsonl([long] * 9 + [b"{bad"] + [b"{worse"] * 9000)
    with pytest.raises(UserError, match=r"line 10: broken JSON") as error:
        preprocess([source], tokenizer_path, tmp_path / "d", workers=3)
    finished = len(list((tmp_path / "d.parts").glob("0*.json")))
    assert f"{finished} of " in error.value.__notes__[0] and "goes on from there" in error.value.__notes__[0]


def test_truncated_source_fails_or_is_counted(tmp_path: Path, tokenizer_path: Path, tiny_records: list[Any]):
    import gzip

    source = tmp_path / "cut.jsonl.gz"
    source.write_bytes(gzip.compress(TINY.read_bytes())[:-5])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: damaged or truncated after line 35"):
        preprocess([source, TINY], tokenizer_path, tmp_path / "out" / "d")
    assert list((tmp_path / "out").iterdir()) == []
    manifest = preprocess([source, TINY], tokenizer_path, tmp_path / "out" / "d", on_error="skip")
    assert manifest.skipped == {"truncated_file": 1}
    assert manifest.documents == 70
    assert manifest.sources[0].sha256 == hashlib.sha256(source.read_bytes()).hexdigest()


def test_bad_tokenizer_is_refused_before_any_output(tmp_path: Path):
    (tmp_path / "t.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"t\.model: is empty"):
        preprocess([TINY], tmp_path / "t.model", tmp_path / "out" / "d")
    assert not (tmp_path / "out").exists()


def test_overwriting_only_when_asked(dataset_copy: Path, tokenizer_path: Path, write_jsonl: Any):
    before = files_of(dataset_copy)
    with pytest.raises(UserError, match=r"tiny\.bin: exists already; pass --overwrite"):
        preprocess([TINY], tokenizer_path, dataset_copy)
    source = write_jsonl([{"text": "new"}])
    with pytest.raises(UserError, match="no document"):
        preprocess([write_jsonl([], "none.jsonl")], tokenizer_path, dataset_copy, overwrite=True)
    assert files_of(dataset_copy) == before  # a failed replacement takes nothing away
    preprocess([source], tokenizer_path, dataset_copy, overwrite=True)
    assert verify(dataset_copy).documents == 1


def test_tokenizer_used_before_the_pool_starts(
    tmp_path: Path, tokenizer_path: Path, tiny_dataset: Path, tiny_records: list[Any]
):
    """Threads and locks of the parent's tokenizer must not reach the workers."""
    processor = SentencePieceProcessor(model_file=str(tokenizer_path))
    processor.encode([record["text"] for record in tiny_records], num_threads=4)
    preprocess([TINY], tokenizer_path, tmp_path / "tiny", workers=2)
    assert files_of(tmp_path / "tiny") == files_of(tiny_dataset)


def test_summary_and_skipped_are_printed(tmp_path: Path, tokenizer_path: Path, write_jsonl: Any, capsys: Any):
    source = write_jsonl([{"text": "x y", "meta": '{"pile_set_name": "Domain A"}'}, {"text": ""}])
    command = f"--input {source} --tokenizer {tokenizer_path} --output_prefix {tmp_path / 'd'} --workers 1"
    assert main(command.split()) == 0
    output = capsys.readouterr().out
    assert "Domain A" in output and "total" in output and "skipped 1: empty_text" in output


def test_fifty_megabyte_document(tmp_path: Path, tokenizer_path: Path, write_jsonl: Any):
    """Far beyond a shard, a batch and a pipe's buffer, with other documents around it."""
    source = write_jsonl([{"text": "a"}, {"text": "a\n" * 5_000_000}, {"text": "b"}])
    assert preprocess([source], tokenizer_path, tmp_path / "d", workers=2).text_bytes == 10_000_002
    assert verify(tmp_path / "d").documents == 3


@pytest.mark.parametrize("backend", ["reference", "gigatoken"])
def test_o200k_from_text_to_dataset(tmp_path: Path, tiny_dataset: Path, tiny_records: list[Any], backend: Any):
    """Ids past 65,535, a copy of the ranks beside it, and no trace of the dataset that it replaces."""
    shutil.copytree(tiny_dataset.parent, tmp_path / "copy")
    prefix = tmp_path / "copy" / tiny_dataset.name
    source = tmp_path / "more.jsonl"
    rare = "<|endoftext|> 漢字 🙂 \u0e44\u0e17\u0e22" + " " * 1_000_000 + "x"
    source.write_bytes(TINY.read_bytes() + orjson.dumps({"text": rare}) + b"\n")
    with pytest.raises(UserError, match=r"exists already"):
        preprocess([source], "o200k_base", prefix, tokenizer_backend=backend)
    manifest = preprocess([source], "o200k_base", prefix, tokenizer_backend=backend, overwrite=True)
    assert verify(prefix) == manifest
    info = manifest.tokenizer
    assert (info.kind, info.vocab_size, info.eod_id) == ("tiktoken", 200_019, 199_999)
    assert info.file == "tiny.tokenizer.tiktoken" and not tokenizer_copy(prefix).exists()
    assert manifest.dtype == "int32"
    reader = IndexedReader(prefix)
    tokenizer = load_tokenizer(dataset_tokenizer_path(prefix, "tiktoken"))
    texts = [record["text"] for record in tiny_records] + [rare]
    for ids, text in zip(reader, texts, strict=True):
        assert tokenizer.decode(ids.tolist()) == text and ids[-1] == 199_999
    assert (reader.tokens > 65_535).sum() > len(texts)


def test_a_tokenizer_that_does_not_load_leaves_nothing(tmp_path: Path, capsys: Any):
    output = tmp_path / "out"
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bare.json").write_text(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    for arguments, message in (
        (["--tokenizer", "p50k_base"], "no such tokenizer"),
        (["--tokenizer", str(tmp_path / "empty")], "is empty"),
        (["--tokenizer", str(tmp_path / "bare.json")], "has no end-of-document token"),
        (["--tokenizer", str(tmp_path / "bare.json"), "--eod_token", "</s>"], "is not in it"),
    ):
        assert main(["--input", str(TINY), "--output_prefix", str(output / "d"), *arguments]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1 and message in errors[0] and not output.exists()


# --- processes that die ---


@pytest.fixture
def endless_source(tmp_path: Path) -> Path:
    """Enough text to keep two workers busy for longer than a test waits."""
    path = tmp_path / "long.jsonl"
    path.write_bytes(TINY.read_bytes() * 1000)
    return path


def _listen_to_ctrl_c() -> None:
    """A job in the background of a shell, as the whole test run may be, ignores SIGINT; so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# The command with large shards: one worker is not to end its first before the other has begun.
COMMAND = """
import sys
import data_prep.sources.shards
data_prep.sources.shards._LEAST_SHARD_BYTES = 64 << 20
from data_prep.preprocess import main
sys.exit(main())
"""


@pytest.fixture
def running(tmp_path: Path, tokenizer_path: Path, endless_source: Path) -> Iterator[subprocess.Popen[str]]:
    """The command line in the middle of its first shards, with two workers."""
    command = [sys.executable, "-c", COMMAND, "--input", str(endless_source), "--workers", "2"]
    command += ["--tokenizer", str(tokenizer_path), "--output_prefix", str(tmp_path / "out" / "d")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=_listen_to_ctrl_c,  # noqa: PLW1509 - it calls nothing that a thread could hold
    ) as process:
        deadline = time.monotonic() + 20
        while len(list((tmp_path / "out" / "d.parts").glob("*.part.partial"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("send", "status", "message"),
    [
        (signal.SIGINT, 130, "error: interrupted; nothing was left behind\n"),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_stopped_command_leaves_nothing(
    running: subprocess.Popen[str], tmp_path: Path, send: signal.Signals, status: int, message: str
):
    workers = psutil.Process(running.pid).children()
    running.send_signal(send)
    assert running.communicate(timeout=10)[1] == message
    assert running.returncode == status
    assert list((tmp_path / "out").iterdir()) == []
    assert not any(worker.is_running() for worker in workers)


def test_command_whose_worker_is_killed(running: subprocess.Popen[str], tmp_path: Path):
    victim = psutil.Process(running.pid).children()[1]
    start = time.monotonic()
    victim.kill()
    errors = running.communicate(timeout=10)[1].splitlines()
    assert time.monotonic() - start < 3
    assert len(errors) == 1
    assert re.match(
        rf"error: worker . \(process {victim.pid}\) was killed by SIGKILL while encoding shard \d+ "
        r"\(.*long\.jsonl from [\d,]+\); out of memory\? try fewer --workers",
        errors[0],
    )
    assert running.returncode == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_killed_command_leaves_no_worker_and_the_next_run_succeeds(
    running: subprocess.Popen[str], tmp_path: Path, tokenizer_path: Path
):
    workers = psutil.Process(running.pid).children()
    running.kill()
    running.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
    assert not manifest_path(tmp_path / "out" / "d").exists()
    with pytest.raises(
        UserError, match=r"d\.parts: holds parts of another run, which differs in the inputs: .*long"
    ):
        preprocess([TINY], tokenizer_path, tmp_path / "out" / "d")
    preprocess([TINY], tokenizer_path, tmp_path / "out" / "d", overwrite=True)
    assert len(list((tmp_path / "out").iterdir())) == 5
    assert orjson.loads(manifest_path(tmp_path / "out" / "d").read_bytes())["documents"] == 35
