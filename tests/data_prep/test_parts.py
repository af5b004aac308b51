"""Runs that are ended and go on, shares of several machines, and what parts may be joined."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
from pile_texts import TINY

from data_prep.errors import UserError
from data_prep.files import bin_path, manifest_path
from data_prep.joining import find_parts
from data_prep.manifest import DomainCounts
from data_prep.merge import merge
from data_prep.parts import (
    WHOLE,
    Output,
    PartWriter,
    Run,
    claim_parts,
    copy_run,
    load_part,
    load_plan,
    locked_parts,
    part_numbers,
    part_path,
    parts_folder,
    read_run,
    signatures_path,
    tokenizer_copy_path,
)
from data_prep.preprocess import Share, main, make_parts, plan_job, prepare, preprocess
from data_prep.sources import Document, ReadOptions, read_shard
from data_prep.train_tokenizer import train_tokenizer
from data_prep.verify import verify

ROOT = Path(__file__).parents[2]
SMALL_SHARDS = 20_000

# The command with small shards, so that a small corpus has many.
COMMAND = f"""
import sys
import data_prep.sources.shards
data_prep.sources.shards._LEAST_SHARD_BYTES = {SMALL_SHARDS}
from data_prep.preprocess import main
sys.exit(main())
"""


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.sources.shards._LEAST_SHARD_BYTES", SMALL_SHARDS)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def start(source: Path, tokenizer: Path, prefix: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, "--input", str(source), "--tokenizer", str(tokenizer)]
    return subprocess.Popen(
        [*command, "--output_prefix", str(prefix), "--workers", "2", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - a background job ignores it
    )


# --- kills ---


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A source of some 150 small shards, and the files of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = folder / "long.jsonl"
    source.write_bytes(TINY.read_bytes() * 20)
    with start(source, tokenizer_path, folder / "out" / "d") as run:
        assert run.wait(60) == 0, run.stderr and run.stderr.read()
    return source, contents(folder / "out")


def wait_for_parts(folder: Path, count: int, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while run.poll() is None and len(list(folder.glob("0*.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_one(run: subprocess.Popen[str], parent: bool) -> None:
    """Kill -9 the parent or one of its workers; what is left of the run ends by itself."""
    process = psutil.Process(run.pid)
    workers = process.children()
    victim = process if parent or not workers else random.choice(workers)
    victim.kill()
    begun = time.monotonic()
    _, errors = run.communicate(timeout=10)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == [] and time.monotonic() - begun < 5
    assert run.returncode == (-signal.SIGKILL if victim is process else 1), errors
    if victim is not process:
        assert f"(process {victim.pid}) was killed by SIGKILL" in errors and "goes on from there" in errors


def test_ten_kills_and_the_same_bytes(
    tmp_path: Path, tokenizer_path: Path, undisturbed: tuple[Path, dict[str, bytes]]
):
    """Each run goes on from the parts of the one before, gets a little further, and is killed in turn."""
    source, expected = undisturbed
    generator = random.Random(4)
    prefix, folder = tmp_path / "out" / "d", tmp_path / "out" / "d.parts"
    shutil.rmtree(folder, ignore_errors=True)
    finished: dict[str, int] = {}
    for moment in range(10):
        run = start(source, tokenizer_path, prefix)
        wait_for_parts(folder, len(finished) + generator.randint(1, 6), run)
        time.sleep(generator.uniform(0, 0.02))
        kill_one(run, parent=moment % 2 == 0)
        now = {path.name: path.stat().st_mtime_ns for path in folder.glob("0*.json")}
        assert finished.items() <= now.items() and len(now) > len(finished)  # what was finished is not done again
        finished = now
    with start(source, tokenizer_path, prefix) as run:
        assert run.wait(60) == 0
    assert contents(tmp_path / "out") == expected


# Ends the process for good at the n-th change of a file's name.
DYING = f"""
import os, sys
from pathlib import Path
import data_prep.sources.shards
data_prep.sources.shards._LEAST_SHARD_BYTES = {SMALL_SHARDS}
from data_prep import preprocess
left = int(sys.argv.pop(1))
def dying(call):
    def wrapped(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return call(*arguments, **options)
    return wrapped
for name in ("rename", "replace", "unlink"):
    setattr(Path, name, dying(getattr(Path, name)))
for name in ("unlink", "rmdir"):
    setattr(os, name, dying(getattr(os, name)))
sys.exit(preprocess.main())
"""


@pytest.mark.slow
def test_kills_at_every_file_operation_of_the_join(
    tmp_path: Path, tokenizer_path: Path, undisturbed: tuple[Path, dict[str, bytes]]
):
    source = tmp_path / "short.jsonl"
    source.write_bytes(TINY.read_bytes())
    arguments = ["--input", str(source), "--tokenizer", str(tokenizer_path), "--workers", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with start(source, tokenizer_path, tmp_path / "whole" / "d") as run:
        assert run.wait(60) == 0
    expected = contents(tmp_path / "whole")
    for moment in range(1, 200):
        prefix = tmp_path / f"{moment}" / "d"
        command = [*arguments, "--output_prefix", str(prefix)]
        killed = subprocess.run(
            [sys.executable, "-c", DYING, str(moment), *command], check=False, capture_output=True, env=environment
        )
        if killed.returncode == 0:
            break
        assert killed.returncode == 9, killed.stderr
        if manifest_path(prefix).exists() and not parts_folder(prefix).exists():
            assert contents(prefix.parent) == expected  # killed while the parts were removed
            continue
        with start(source, tokenizer_path, prefix) as run:
            assert run.wait(60) == 0, run.stderr and run.stderr.read()
        assert contents(prefix.parent) == expected
    assert killed.returncode == 0 and moment > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 6, 7, 8])
def test_kills_at_any_time(
    tmp_path: Path, tokenizer_path: Path, undisturbed: tuple[Path, dict[str, bytes]], seed: int
):
    """Start-up and join included."""
    source, expected = undisturbed
    generator = random.Random(seed)
    began = time.monotonic()
    with start(source, tokenizer_path, tmp_path / "once" / "d") as run:
        assert run.wait(60) == 0
    whole_s = time.monotonic() - began
    for moment in range(10):
        prefix = tmp_path / str(moment) / "d"
        run = start(source, tokenizer_path, prefix)
        time.sleep(generator.uniform(0, whole_s))
        children = psutil.Process(run.pid).children()
        victim = generator.choice([psutil.Process(run.pid), *children])
        victim.kill()
        run.communicate(timeout=30)
        with start(source, tokenizer_path, prefix) as rerun:
            status = rerun.wait(60)
        complete = status == 2 and manifest_path(prefix).exists()  # killed after the end
        assert status == 0 or complete
        assert contents(prefix.parent) == expected


# --- going on ---


def test_a_rerun_does_what_is_missing_only(tmp_path: Path, tokenizer_path: Path, small_shards: None):
    expected = tmp_path / "expected" / "d"
    preprocess([TINY], tokenizer_path, expected)
    job = plan_job([TINY], tokenizer_path, tmp_path / "d", ReadOptions())
    assert len(job.shards) > 6
    with locked_parts(job.folder, 0, 1):
        make_parts(job, workers=2)
    assert part_numbers(job.folder) == set(range(len(job.shards)))
    part_path(job.folder, 1).unlink()  # not there
    part_path(job.folder, 2).write_bytes(b'{"plan": "x"')  # cut off
    data = job.folder / "000003.part"
    data.write_bytes(data.read_bytes()[:-1])  # shorter than its description says
    seen: list[int] = []
    prepare(job, workers=1, report=lambda done: seen.append(done.documents))
    assert seen[0] == 35 - sum(documents_in_shard(job, number) for number in (1, 2, 3)) and seen[-1] == 35
    assert not parts_folder(tmp_path / "d").exists()
    assert contents(tmp_path / "expected") == contents(tmp_path)


def documents_in_shard(job: Any, number: int) -> int:
    return sum(isinstance(parsed, Document) for _, parsed in read_shard(job.shards[number], ReadOptions()))


@pytest.fixture
def half_done(tmp_path: Path, tokenizer_path: Path, small_shards: None) -> Path:
    """A prefix with some finished parts of a run over a copy of the tiny corpus."""
    source = tmp_path / "in.jsonl"
    shutil.copyfile(TINY, source)
    job = plan_job([source], tokenizer_path, tmp_path / "d", ReadOptions())
    with locked_parts(job.folder, 0, 1):
        make_parts(job)
    part_path(job.folder, 1).unlink()
    return tmp_path / "d"


def test_what_differs_is_said(tmp_path: Path, tokenizer_path: Path, half_done: Path):
    source = tmp_path / "in.jsonl"

    def fails(message: str, inputs: list[Path], tokenizer: Path = tokenizer_path, **options: Any) -> None:
        with pytest.raises(UserError, match=rf"d\.parts: .*differs in {message}.*pass --overwrite"):
            preprocess(inputs, tokenizer, half_done, **options)

    train_tokenizer([TINY], tmp_path / "other.model", vocab_size=590)
    before = contents(parts_folder(half_done))
    fails("the tokenizer: ", [source], tmp_path / "other.model")
    fails("text_key: text, now t", [source], text_key="t")
    fails("domain_key: ", [source], domain_key="d")
    fails(r"the inputs: 1 files, now 2", [source, TINY])
    fails(r"the inputs: .*in\.jsonl, now .*tiny\.jsonl", [TINY])
    assert contents(parts_folder(half_done)) == before
    status = source.stat()
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    fails(r".*in\.jsonl: was modified", [source])
    source.write_bytes(source.read_bytes() + b"\n")
    fails(r".*in\.jsonl: \d+ bytes, now", [source])
    manifest = preprocess([source], tokenizer_path, half_done, overwrite=True)
    assert manifest.skipped == {"blank_line": 1} and not parts_folder(half_done).exists()


def test_on_error_may_be_loosened(tmp_path: Path, tokenizer_path: Path, small_shards: None, write_jsonl: Any):
    """The way out that a bad line's message names: parts that are finished hold no bad line."""
    records = [{"text": "a b c\n" * 3000}] * 9
    source = write_jsonl([*records, b"{bad", *records])
    with pytest.raises(UserError, match="line 10") as stopped:
        preprocess([source], tokenizer_path, tmp_path / "d")
    assert "parts are finished" in stopped.value.__notes__[0]
    job = plan_job([source], tokenizer_path, tmp_path / "d", ReadOptions(on_error="skip"))
    seen: list[int] = []
    (manifest,) = prepare(job, report=lambda done: seen.append(done.documents)).values()
    assert seen[0] > 0  # nothing of it was lost
    assert (manifest.documents, manifest.skipped) == (18, {"broken_json": 1})
    assert verify(tmp_path / "d") == manifest


def test_a_note_says_how_to_go_on(
    tmp_path: Path, tokenizer_path: Path, undisturbed: tuple[Path, dict[str, bytes]]
):
    source, expected = undisturbed
    prefix, folder = tmp_path / "out" / "d", tmp_path / "out" / "d.parts"
    for stop, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        run = start(source, tokenizer_path, prefix)
        wait_for_parts(folder, len(list(folder.glob("0*.json"))) + 3, run)
        run.send_signal(stop)
        errors = run.communicate(timeout=10)[1].splitlines()
        assert run.returncode == status
        assert errors[-1].startswith("note: ") and f"stay in {folder}; the same command goes on" in errors[-1]
        assert errors[:-1] == (["error: interrupted"] if stop == signal.SIGINT else [])
        assert not list(folder.glob("*.partial"))
    with start(source, tokenizer_path, prefix) as run:
        assert run.wait(60) == 0
    assert contents(tmp_path / "out") == expected


def test_nothing_partial_is_left_of_workers_that_ended(
    half_done: Path, tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed in the midst of any of the files that they write, and what a whole run that was killed left."""
    folder = parts_folder(half_done)
    names = ["source_00000.json", "000001.part", "000001.json"]

    def killed(tasks: Any, options: Any, *_: Any) -> None:
        assert not list(folder.glob("*.partial")), "those of the run before"
        for name in [*names, signatures_path(folder, options.plan, 1).name]:
            (folder / f"{name}.partial").write_bytes(b"half")
        raise KeyboardInterrupt

    (folder / "source_00000.json").unlink()
    source = tmp_path / "in.jsonl"
    monkeypatch.setattr("data_prep.preprocess.run_tasks", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            preprocess([source], tokenizer_path, half_done)
        assert not list(folder.glob("*.partial"))
        for name in names:  # a run that was killed itself
            (folder / f"{name}.partial").write_bytes(b"half")


def test_two_runs_at_once_are_refused(half_done: Path, tokenizer_path: Path, tmp_path: Path):
    with locked_parts(parts_folder(half_done), 0, 1):
        with pytest.raises(UserError, match=r"d\.parts: another run is working on it"):
            preprocess([tmp_path / "in.jsonl"], tokenizer_path, half_done)
    preprocess([tmp_path / "in.jsonl"], tokenizer_path, half_done)


def test_a_damaged_part_is_named(half_done: Path, tokenizer_path: Path, tmp_path: Path):
    data = parts_folder(half_done) / "000002.part"
    content = bytearray(data.read_bytes())
    content[7] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match=r"000002\.part: is damaged; remove .*000002\.json and run again") as error:
        preprocess([tmp_path / "in.jsonl"], tokenizer_path, half_done)
    assert "all parts are finished" in error.value.__notes__[0]
    assert not bin_path(half_done).exists() and not list(tmp_path.glob("*.partial"))
    part_path(parts_folder(half_done), 2).unlink()
    preprocess([tmp_path / "in.jsonl"], tokenizer_path, half_done)
    assert verify(half_done).documents == 35


# --- several machines ---


def run_share(prefix: Path, tokenizer: Path, index: int, count: int, source: Path = TINY, *more: str) -> int:
    command = ["--input", str(source), "--tokenizer", str(tokenizer), "--output_prefix", str(prefix)]
    return main([*command, "--shard_index", str(index), "--num_shards", str(count), "--workers", "1", *more])


@pytest.mark.parametrize("shared_disk", [True, False])
def test_shares_joined_equal_a_single_run(
    tmp_path: Path, tokenizer_path: Path, small_shards: None, shared_disk: bool, capsys: Any
):
    whole, prefix = tmp_path / "whole" / "d", tmp_path / "out" / "d"
    preprocess([TINY], tokenizer_path, whole)
    machines = [prefix if shared_disk else tmp_path / str(index) / "d" for index in range(3)]
    for index in (2, 0, 1):
        assert run_share(machines[index], tokenizer_path, index, 3) == 0
        assert not manifest_path(machines[index]).exists()
    assert "data_prep.merge --output_prefix" in capsys.readouterr().out
    folders = [] if shared_disk else [parts_folder(machine) for machine in machines]
    merge(prefix, folders)
    assert contents(prefix.parent) == contents(whole.parent)
    assert not any(parts_folder(machine).exists() for machine in machines)


def test_merge_refuses_missing_double_and_foreign_parts(
    tmp_path: Path, tokenizer_path: Path, small_shards: None, write_jsonl: Any
):
    first, second, other = tmp_path / "a" / "d", tmp_path / "b" / "d", tmp_path / "c" / "d"
    assert run_share(first, tokenizer_path, 0, 2) == 0 and run_share(second, tokenizer_path, 1, 2) == 0
    folders = [parts_folder(first), parts_folder(second)]
    total = load_plan(folders[0]).num_shards
    with pytest.raises(
        UserError, match=rf"{total - total // 2} of {total} parts are missing: {total // 2}-{total - 1};"
    ):
        merge(first)
    with pytest.raises(UserError, match=r"part 0 is there twice, in .*a/d\.parts and .*a/d\.parts"):
        merge(first, [folders[0], folders[0]])
    assert run_share(other, tokenizer_path, 1, 2, write_jsonl([{"text": "a"}])) == 0
    with pytest.raises(UserError, match=r"c/d\.parts: holds parts of another run than .*a/d\.parts, .*the inputs"):
        merge(first, [folders[0], parts_folder(other)])
    with pytest.raises(UserError, match=r"nowhere/plan\.json: no such file"):
        merge(first, [folders[0], tmp_path / "nowhere"])
    foreign = part_path(folders[1], total - 1)
    good = foreign.read_bytes()
    foreign.write_bytes(orjson.dumps(orjson.loads(good) | {"plan": "another"}))
    with pytest.raises(UserError, match=r"\.json: is a part of another run"):
        merge(first, folders)
    foreign.write_bytes(good)
    source = orjson.loads((folders[0] / "source_00000.json").read_bytes())
    (folders[1] / "source_00000.json").write_bytes(orjson.dumps(source | {"sha256": "0" * 64}))
    with pytest.raises(UserError, match="was not the same file on all machines"):
        merge(first, folders)
    (folders[1] / "source_00000.json").unlink()
    bin_path(first).write_bytes(b"mine")
    with pytest.raises(UserError, match=r"d\.bin: exists already; pass --overwrite"):
        merge(first, folders)
    merge(first, folders, overwrite=True)
    assert verify(first).documents == 35


def test_merge_refuses_another_tokenizer_beside_the_parts(tmp_path: Path, tokenizer_path: Path):
    assert run_share(tmp_path / "d", tokenizer_path, 0, 1) == 0
    tokenizer_copy_path(parts_folder(tmp_path / "d")).write_bytes(b"another")
    with pytest.raises(UserError, match=r"d\.parts/tokenizer: is not the tokenizer that made the parts"):
        merge(tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["d.parts"]


def test_options_of_shares(tmp_path: Path, tokenizer_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["--input", str(TINY), "--tokenizer", str(tokenizer_path), "--output_prefix", str(tmp_path / "d")]
    for options, message in (
        (["--shard_index", "0"], "go together"),
        (["--num_shards", "2"], "go together"),
        (["--shard_index", "2", "--num_shards", "2"], "--shard_index 2: must be 0 to 1"),
        (["--split", "0.9,0.2,0.1"], "--split 0.9,0.2,0.1: three shares"),
        (["--split", "0.9,0.1"], "three shares"),
        (["--split_by", "meta.x", "--domain_key", "meta.y"], "leave --domain_key out"),
        (["--blend_weights", "pile"], "acts with --split_by only"),
        (["--split_by", "meta.x", "--temperature", "2"], "acts with --blend_weights temperature only"),
        (["--filter", "nothing"], "expected module:function"),
    ):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_shares_cover_everything_once():
    for total in (0, 1, 5, 12, 13):
        for count in (1, 2, 5, 7):
            assert [n for index in range(count) for n in Share(index, count).of(total)] == list(range(total))


# --- the files of a part ---


def documents(generator: np.random.Generator, count: int, vocab_size: int, eod: int) -> tuple[Any, Any]:
    lengths = generator.integers(1, 50, count).astype(np.int32)
    ids = generator.integers(0, eod, int(lengths.sum())).astype(np.int32)
    ids[np.cumsum(lengths) - 1] = eod
    return ids, lengths


@pytest.mark.parametrize("vocab_size", [600, 65_499, 65_500, 65_536, 200_000])
def test_part_gives_back_what_was_added(tmp_path: Path, vocab_size: int, monkeypatch: pytest.MonkeyPatch):
    """Flushed now and then, two outputs in turn."""
    monkeypatch.setattr("data_prep.parts._FLUSH_BYTES", 3000)
    generator, eod = np.random.default_rng(vocab_size), vocab_size - 1
    outputs = [WHOLE, Output("a", "test")]
    batches = [(outputs[i % 2], *documents(generator, 20, vocab_size, eod)) for i in range(11)]
    with PartWriter(tmp_path, 5, "plan", vocab_size, eod) as writer:
        for output, ids, lengths in batches:
            writer.add(output, ids, lengths, {"d": DomainCounts(len(lengths), len(ids), 7)})
        written = writer.finish(Counter(empty_text=3), "hash", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000005.json", "000005.part"]
    part = load_part(tmp_path, 5)
    assert part == written and part is not None and part.skipped == {"empty_text": 3}
    data = tmp_path / "000005.part"
    dtype = "<u2" if vocab_size < 65_500 else "<i4"
    for output in outputs:
        ids = np.concatenate([each[1] for each in batches if each[0] == output])
        lengths = np.concatenate([each[2] for each in batches if each[0] == output])
        share = part.outputs[output]
        assert len(share.ids) > 1
        assert np.concatenate([read_run(data, run, dtype) for run in share.ids]).tolist() == ids.tolist()
        assert np.concatenate([read_run(data, run, "<i4") for run in share.lengths]).tolist() == lengths.tolist()
        assert (share.documents, share.tokens) == (len(lengths), len(ids))
        assert share.domains == {"d": DomainCounts(len(lengths), len(ids), 7 * (6 if output == WHOLE else 5))}
        counts = np.zeros(vocab_size, np.int64)
        for run in share.token_counts:
            present, numbers = read_run(data, run, "<i4").reshape(2, -1)
            counts[present] += numbers
        assert counts.tolist() == np.bincount(ids, minlength=vocab_size).tolist()


def test_a_failed_part_leaves_nothing(tmp_path: Path):
    with pytest.raises(ValueError, match="id 600 in document 0 is outside the vocabulary of 600"):
        with PartWriter(tmp_path, 0, "plan", 600, 2) as writer:
            writer.add(WHOLE, np.array([600, 2], np.int32), np.array([2], np.int32), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refusing", [None, "copy_file_range"])
def test_ranges_are_copied_within_the_kernel(
    tmp_path: Path, refusing: str | None, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EXDEV, "between file systems")

    if refusing:
        monkeypatch.setattr(f"data_prep.parts.os.{refusing}", refuse)
    content = np.random.default_rng(0).bytes(300_000)
    (tmp_path / "a").write_bytes(content)
    with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("wb") as target:
        copy_run(source.fileno(), target.fileno(), Run(1000, 200_001))
        copy_run(source.fileno(), target.fileno(), Run(0, 10))
        with pytest.raises(OSError, match="ends 1 bytes early"):
            copy_run(source.fileno(), target.fileno(), Run(299_990, 11))
    assert (tmp_path / "b").read_bytes()[:200_011] == content[1000:201_001] + content[:10]


def test_numbers_of_missing_parts_are_short(tmp_path: Path, tokenizer_path: Path, small_shards: None):
    job = plan_job([TINY], tokenizer_path, tmp_path / "d", ReadOptions())
    claim_parts(job.folder, job.plan, job.tokenizer.content, overwrite=False)
    for number in (0, 3, 4):
        part_path(job.folder, number).write_bytes(b"")
    last = len(job.shards) - 1
    with pytest.raises(UserError, match=rf"parts are missing: 1-2, 5-{last};"):
        find_parts(job.plan, [job.folder])
