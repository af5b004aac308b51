"""Tasks, workers that outgrow their memory, and what a run shows of itself."""

from pathlib import Path
from typing import Any

import psutil
import pytest
from pile_texts import TINY

from data_prep.dry_run import estimate
from data_prep.encode import Progress
from data_prep.errors import UserError
from data_prep.files import bin_path
from data_prep.pool import EncodeShard, HashSource, _Queue, _Worker
from data_prep.preprocess import main, plan_job, preprocess
from data_prep.progress import duration, progress_display
from data_prep.sources import Piece, ReadOptions, Shard, Source
from data_prep.train_tokenizer import train_tokenizer


def tasks_of(name: str, count: int, first: int = 0) -> list[EncodeShard]:
    source = Source(name, "jsonl", 10, 0)
    return [EncodeShard(first + i, Shard((Piece(source, i, i + 1, 1),))) for i in range(count)]


def test_workers_stay_with_their_source():
    queue = _Queue([*tasks_of("a", 2), *tasks_of("b", 5, first=2), HashSource(0, "c")])
    taken = []
    for source in (None, None, "a", "b", "a", None, "c", "b"):
        task = queue.next(source)
        assert task is not None
        taken.append((task.source, task.number))
    assert taken[:4] == [("a", 0), ("b", 2), ("a", 1), ("b", 3)]
    assert taken[4] == ("c", 0)  # a is empty: one that nobody has begun
    assert taken[5:] == [("b", 4), ("b", 5), ("b", 6)]  # then help where most is left
    assert queue.next("b") is None


def test_a_worker_that_grows_is_replaced(
    tmp_path: Path, tokenizer_path: Path, tiny_dataset: Path, monkeypatch: pytest.MonkeyPatch
):
    """Some tokenizers' caches grow with all that they have seen."""
    monkeypatch.setattr("data_prep.sources.shards._LEAST_SHARD_BYTES", 30_000)
    monkeypatch.setattr("data_prep.pool._Worker.outgrown", lambda worker, resident: bool(worker.source))
    started: list[int] = []
    begin = _Worker.__init__

    def counted(worker: _Worker, number: int, options: Any) -> None:
        begin(worker, number, options)
        started.append(worker.process.pid)

    monkeypatch.setattr(_Worker, "__init__", counted)
    preprocess([TINY], tokenizer_path, tmp_path / "tiny", workers=1)
    assert len(started) > 3
    assert bin_path(tmp_path / "tiny").read_bytes() == bin_path(tiny_dataset).read_bytes()
    assert [child for child in psutil.Process().children() if child.pid in started] == []


def test_a_worker_that_cannot_begin_says_why(tmp_path: Path):
    """The parent loads no backend: it does not encode."""
    train_tokenizer([TINY], tmp_path / "unigram.model", vocab_size=600, model_type="unigram")
    with pytest.raises(UserError, match="gigatoken knows no unigram"):
        preprocess([TINY], tmp_path / "unigram.model", tmp_path / "d", tokenizer_backend="gigatoken")
    assert [path.name for path in tmp_path.iterdir()] == ["unigram.model"]


def test_memory_limit_follows_the_tokenizer(monkeypatch: pytest.MonkeyPatch):
    for first, limit in ((100 << 20, 280 << 20), (400 << 20, 600 << 20)):
        worker = object.__new__(_Worker)
        worker.most_resident_bytes = 0
        assert not worker.outgrown(first)
        assert not worker.outgrown(limit) and worker.outgrown(limit + 1)


def test_dry_run_estimates_and_writes_nothing(
    tmp_path: Path, tokenizer_path: Path, tiny_dataset: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "long.jsonl"
    source.write_bytes(TINY.read_bytes() * 40)
    command = ["--input", str(source), "--tokenizer", str(tokenizer_path), "--dry_run"]
    assert main([*command, "--output_prefix", str(tmp_path / "d")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list(tmp_path.iterdir()) == [source]
    words = lines[1].replace(",", "").split()
    documents, text_bytes, tokens = int(words[1]), int(words[3]), int(words[7])
    assert documents == pytest.approx(40 * 35, rel=0.1)
    assert text_bytes == pytest.approx(40 * 146_855, rel=0.1)
    assert tokens == pytest.approx(20 * bin_path(tiny_dataset).stat().st_size, rel=0.1)
    assert "with 2 workers" in lines[2] and "GB on the disk" in lines[3]


def test_dry_run_of_compressed_files(tmp_path: Path, tokenizer_path: Path):
    """Their size says little; the estimate takes the compression of their first megabyte."""
    import zstandard

    source = tmp_path / "long.jsonl.zst"
    source.write_bytes(zstandard.compress(TINY.read_bytes() * 40))
    job = plan_job([source], tokenizer_path, tmp_path / "d", ReadOptions())
    words = estimate(job.sources, job.tokenizer, job.options, 1).splitlines()[1].replace(",", "").split()
    assert int(words[1]) == pytest.approx(40 * 35, rel=0.1)


def test_plain_lines_where_stderr_is_no_terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr("data_prep.progress.time.monotonic", lambda: now[0])
    with progress_display(1000) as report:
        report(Progress(200, 5, 50, 100, 1))  # an earlier run's: in the counts, not in the rates
        for _ in range(6):
            now[0] += 10
            report(Progress(300 + int(now[0] - 1000) * 5, 40, 7_000_050, 20_000_100, 3))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "45.0%: 40 documents, 0.7 MB/s, 0.23 M tokens/s, 3 skipped, remaining 0:01:06"
    assert second.startswith("60.0%: ")


def test_bar_on_a_terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_display(1000) as report:
        report(Progress(0, 0, 0, 0, 0))
        report(Progress(500, 12, 50, 100, 1))
    shown = capsys.readouterr().err
    assert "12 documents" in shown and "50%" in shown


def test_duration():
    assert [duration(seconds) for seconds in (0, 59.6, 3600, 90_061)] == [
        "0:00:00",
        "0:01:00",
        "1:00:00",
        "25:01:01",
    ]
