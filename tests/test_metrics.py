"""metrics.jsonl over resumes, the console, TensorBoard, and the one wandb run of a job."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from leviathan_ds import run_directory
from leviathan_ds.config import RunConfig
from leviathan_ds.training.metrics import LinesFile, Metrics, format_value


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(
    run_dir: Path, resume_step: int = 0, wandb_id: str | None = None, enabled: bool = True, **run: Any
) -> Metrics:
    return Metrics(run_dir, RunConfig(**run), 100, resume_step, wandb_id, enabled, {"a": 1})


def step(number: int, **values: Any) -> dict[str, Any]:
    return {"step": number, "loss": 1.0 / number, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 1234.5} | values


def log(metrics: Metrics, *numbers: int, **values: Any) -> None:
    records = [step(number, **values) for number in numbers]
    metrics.steps(records, records[-1], remaining_s=61.0)


# ---- metrics.jsonl ----


def append(path: Path, *records: dict[str, Any]) -> None:
    file = LinesFile(path)
    file.add(*records)
    file.close()


def test_resume_drops_the_steps_that_are_run_again_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *map(step, range(1, 8)), {"step": 4, "val_loss": 2.0})
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[3][:20])  # killed in the middle of a line

    run_directory.drop_later_lines(path, 4)
    append(path, step(5, loss=9.0))
    assert lines(path) == [*map(step, range(1, 5)), {"step": 4, "val_loss": 2.0}, step(5, loss=9.0)]


@pytest.mark.parametrize("broken", ['{"step": 1', "null", "[1]", '{"loss": 1}', "\0\0\0"])
def test_broken_lines_go(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(step(1)) + "\n" + broken + "\n" + json.dumps(step(2)) + "\n")
    run_directory.drop_later_lines(path, 5)
    assert lines(path) == [step(1), step(2)]


def test_start_from_the_beginning_keeps_nothing(tmp_path: Path) -> None:
    # A run that was killed before its first checkpoint validates at step 0 again.
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "val_loss": 6.0}\n' + json.dumps(step(1)) + "\n")
    run_directory.drop_later_lines(path, 0)
    assert path.read_text() == ""


def test_every_line_is_on_the_disk_at_once_and_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LinesFile(path)
    file.add({"step": 1, "loss": math.nan, "grad_norm": math.inf, "none": None, "losses": [[1.0, math.nan]]})
    file.flush()
    expected = {"step": 1, "loss": None, "grad_norm": None, "none": None, "losses": [[1.0, None]]}
    assert lines(path) == [expected]
    file.close()


def test_what_finds_no_room_waits_and_no_line_is_torn(tmp_path: Path) -> None:
    """The disk is full in the middle of a line."""
    path = tmp_path / "metrics.jsonl"
    append(path, step(1))
    room = path.stat().st_size + 20
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    file = LinesFile(path)
    try:
        for number in (2, 3):
            file.add(step(number))
            with pytest.raises(OSError, match=f"File too large.*{path}"):
                file.flush()
        assert path.stat().st_size == room
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.add(step(4))
    file.close()
    assert lines(path) == [*map(step, range(1, 5))]


def test_trouble_is_said_once_until_it_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [tmp_path / name for name in (run_directory.METRICS, run_directory.FAULTS, run_directory.SUMMARY)]
    metrics = start(tmp_path)

    def record(number: int) -> list[str]:
        log(metrics, number)
        metrics.fault({"step": number})
        metrics.summarize(**{f"after_{number}": number})
        said = capsys.readouterr().out.splitlines()
        return [line.split()[0] for line in said if "could not be written: " in line and "the run goes on" in line]

    for path in blocks:
        path.mkdir()  # in the way
    assert record(1) == [path.name for path in blocks]
    assert record(2) == []
    for path in blocks:
        path.rmdir()
    assert record(3) == []
    metrics.close()
    for path in blocks[:2]:
        assert [each["step"] for each in lines(path)] == [1, 2, 3]
    assert run_directory.update_summary(tmp_path) == {"after_1": 1, "after_2": 2, "after_3": 3}


def test_a_log_on_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        metrics = start(tmp_path)
        log(metrics, 1)
        metrics.close()
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what it still holds
    assert [each["step"] for each in lines(tmp_path / run_directory.METRICS)] == [1]


def test_a_wandb_id_that_finds_no_room_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / (run_directory.WANDB_ID + ".partial")).mkdir()  # in the way
    metrics = start(tmp_path, wandb="offline")
    log(metrics, 1)
    metrics.close()
    assert "wandb did not start and is off until the next start" in capsys.readouterr().out


# ---- console ----


def test_none_and_non_finite_values_print() -> None:
    assert format_value("grad_norm", None) == "-"
    assert format_value("loss", math.nan) == "nan"
    assert format_value("loss", 1.23456) == "1.2346"
    assert format_value("tokens_per_s", 12345.6) == "12,346"
    assert format_value("other", 0.1) == "0.1000"
    assert format_value("data_wait_share", 0.031) == "3.1%"


def test_a_step_without_gradient_norm_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = start(tmp_path)
    log(metrics, 1, 2, grad_norm=None)
    metrics.evaluation(2, {"val_loss": 2.5, "val_perplexity": math.exp(2.5)})
    metrics.say("markup [like this] stays")
    metrics.close()
    printed = capsys.readouterr().out.splitlines()
    words = " ".join(printed[0].split())
    assert words == "step 2 loss 0.5000 lr 1.00e-03 grad_norm - tokens_per_s 1,234 left 1:01"
    assert " ".join(printed[1].split()) == "step 2 val_loss 2.5000 val_perplexity 12.1825"
    assert printed[2] == "markup [like this] stays"
    assert [line["step"] for line in lines(tmp_path / run_directory.METRICS)] == [1, 2, 2]


def test_the_console_shows_a_part_and_the_file_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = start(tmp_path)
    log(metrics, 1, grad_norm_body=0.25, memory_gib=1.5, data_wait_share=0.5, skipped_steps=0)
    log(metrics, 2, skipped_steps=3)
    metrics.close()
    first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert first.endswith("tokens_per_s 1,234 memory_gib 1.50 data_wait_share 50.0% left 1:01")
    assert second.endswith("tokens_per_s 1,234 skipped_steps 3 left 1:01")
    assert lines(tmp_path / run_directory.METRICS)[0]["grad_norm_body"] == 0.25


# ---- TensorBoard ----


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / run_directory.TENSORBOARD), size_guidance={"scalars": 0}).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_each_step_once_over_resumes(tmp_path: Path) -> None:
    first = start(tmp_path, tensorboard=True)
    first.evaluation(0, {"val_loss": 4.0})
    for number in (1, 2, 3):
        log(first, number, grad_norm=None, loss=1.0)
    first.evaluation(3, {"val_loss": 3.0})
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 1.0)], "on the disk before the run ends"
    first.close()

    second = start(tmp_path, resume_step=2, tensorboard=True)
    for number in (3, 4):
        log(second, number, loss=2.0)
    second.close()
    found = scalars(tmp_path)
    assert found["loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert found["val_loss"] == [(0, 4.0)]
    assert found["grad_norm"] == [(3, 0.5), (4, 0.5)]
    assert "step" not in found

    third = start(tmp_path, resume_step=0, tensorboard=True)  # killed before its first checkpoint
    third.evaluation(0, {"val_loss": 5.0})
    third.close()
    assert scalars(tmp_path)["val_loss"] == [(0, 5.0)]
    assert scalars(tmp_path).get("loss", []) == []


# ---- other ranks ----


def test_other_ranks_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = start(tmp_path, enabled=False, wandb="offline", tensorboard=True, wandb_id="12345678")
    log(metrics, 1)
    metrics.evaluation(1, {"val_loss": 1.0})
    metrics.say("hello")
    metrics.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


# ---- wandb ----


def wandb_records(path: Path) -> list[Any]:
    """The protobuf records of an offline .wandb file: LevelDB's log format after a 7-byte header."""
    from wandb.proto import wandb_internal_pb2

    block_bytes, data, position, parts, records = 32768, path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = block_bytes - position % block_bytes
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])  # checksum, length, part
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def history(path: Path) -> tuple[set[str], list[dict[str, Any]]]:
    """Run ids and logged rows in an offline file."""
    ids, logged = set(), []
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            logged.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return ids, logged


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # WANDB_SERVICE is set by wandb itself: a process started from here would share this one's service.
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # refuses every connection
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("no_network")
def test_offline_is_one_run_over_two_starts_with_the_steps_as_they_were(tmp_path: Path) -> None:
    run_dir = tmp_path / "job"
    run_dir.mkdir()
    first = start(run_dir, wandb="offline")
    log(first, 1, 2)
    log(first, 3, grad_norm=None)
    first.evaluation(3, {"val_loss": 2.0})
    first.close()
    time.sleep(1.1)  # wandb names the folder by the second
    # The id in the run directory decides, even for a job that was killed before its first checkpoint.
    second = start(run_dir, resume_step=2, wandb="offline")
    log(second, 3, 4)
    second.close()
    assert first.wandb_id == second.wandb_id == (run_dir / run_directory.WANDB_ID).read_text().strip()

    files = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    (ids, before), (other_ids, after) = map(history, files)
    assert ids == other_ids == {first.wandb_id}
    assert [row["_step"] for row in before] == [2, 3]
    assert before[0]["loss"] == 0.5
    assert "grad_norm" not in before[1]
    assert before[1]["val_loss"] == 2.0
    assert [(row["_step"], row["loss"]) for row in after] == [(4, 0.25)]


@pytest.mark.usefixtures("no_network")
def test_what_was_logged_is_on_the_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    """A kill takes wandb's own process along, with what it had in memory."""
    metrics = start(tmp_path, wandb="offline")
    log(metrics, 1)
    log(metrics, 2)  # ends the row of step 1
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    while not (rows := history(file)[1]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [row["_step"] for row in rows] == [1]
    metrics.close()


def test_off_does_not_import_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # an import would fail
    metrics = start(tmp_path, wandb="off")
    assert metrics.wandb_id is None
    metrics.close()
    assert not (tmp_path / run_directory.WANDB_ID).exists()


# Run apart: what wandb leaves behind in a process (services, exit handlers) is part of the question.
_ONLINE = """
import sys, time
from pathlib import Path
from leviathan_ds.config import RunConfig
from leviathan_ds.training import wandb_run
from leviathan_ds.training.metrics import Metrics

wandb_run.TIMEOUT_S = 2
metrics = Metrics(Path(sys.argv[1]), RunConfig(wandb="online"), 100, 0, None, True, {})
for step in (1, 2):
    metrics.steps([], {"step": step, "loss": 1.0 / step}, 0.0)
    if step == 1:
        input()
metrics.close()
print("trained")
"""


def online(run_dir: Path, url: str) -> subprocess.Popen[str]:
    """A run of two steps that waits for a line of input between them."""
    run_dir.mkdir()
    environment = {**os.environ, "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", _ONLINE, str(run_dir)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("server", ["refuses", "never answers"])
def test_an_unreachable_server_makes_the_run_offline(tmp_path: Path, server: str) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if server == "never answers":
            hole.listen()
        run_dir = tmp_path / "job"
        output, _ = online(run_dir, f"http://127.0.0.1:{hole.getsockname()[1]}").communicate("\n", timeout=60)
    assert "wandb is offline until the next start" in output
    assert output.rstrip().endswith("trained")
    (file,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    ids, logged = history(file)
    assert ids == {(run_dir / run_directory.WANDB_ID).read_text().strip()}
    assert [(row["_step"], row["loss"]) for row in logged] == [(1, 1.0), (2, 0.5)]


class _Server(BaseHTTPRequestHandler):
    """As much of wandb's server as a run needs to start."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        data: dict[str, Any] = {}
        if b"RunResumeStatus" in body:
            data = {"model": project | {"bucket": None}}
        elif b"UpsertBucket" in body:
            bucket = {"id": "x", "name": "n", "displayName": "n", "config": "{}", "project": project}
            data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("dies", ["server", "wandb-core"])
def test_what_dies_in_mid_run_neither_stalls_nor_ends_it(tmp_path: Path, dies: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    process = online(tmp_path / "job", f"http://127.0.0.1:{server.server_address[1]}")
    (started,) = wait_for(lambda: list((tmp_path / "job" / "wandb").glob("run-*/run-*.wandb")), process)
    read_until(process, "step      1")
    server.shutdown()
    server.server_close()
    if dies == "wandb-core":
        for child in psutil.Process(process.pid).children():
            child.kill()
    output, _ = process.communicate("\n", timeout=60)
    assert "trained" in output and process.returncode == 0, output
    assert ("wandb failed and is off" in output) == (dies == "wandb-core"), output
    if dies == "server":  # kept for `wandb sync`
        assert [row["_step"] for row in history(started)[1]] == [1, 2]


def wait_for(found: Callable[[], list[Path]], process: subprocess.Popen[str]) -> list[Path]:
    deadline = time.monotonic() + 60
    while not found():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    return found()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came")
