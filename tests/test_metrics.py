"""metrics.jsonl over resumes, the console, and the one wandb run of a job."""

from __future__ import annotations

import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from leviathan_ds import run_directory
from leviathan_ds.config import RunConfig
from leviathan_ds.training.metrics import Metrics, MetricsFile, format_value


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


def test_resume_drops_the_steps_that_are_run_again_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for number in range(1, 8):
        file.write(step(number))
    file.write({"step": 4, "val_loss": 2.0})
    file.close()
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[3][:20])  # killed in the middle of a line

    file = MetricsFile(path, 4)
    file.write(step(5, loss=9.0))
    file.close()
    assert lines(path) == [*map(step, range(1, 5)), {"step": 4, "val_loss": 2.0}, step(5, loss=9.0)]


@pytest.mark.parametrize("broken", ['{"step": 1', "null", "[1]", '{"loss": 1}', "\0\0\0"])
def test_broken_lines_go(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(step(1)) + "\n" + broken + "\n" + json.dumps(step(2)) + "\n")
    MetricsFile(path, 5).close()
    assert lines(path) == [step(1), step(2)]


def test_start_from_the_beginning_keeps_nothing(tmp_path: Path) -> None:
    # A run that was killed before its first checkpoint validates at step 0 again.
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "val_loss": 6.0}\n' + json.dumps(step(1)) + "\n")
    MetricsFile(path, 0).close()
    assert path.read_text() == ""


def test_every_line_is_on_the_disk_at_once_and_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "none": None})
    assert lines(path) == [{"step": 1, "loss": None, "grad_norm": None, "none": None}]
    file.close()


# ---- console ----


def test_none_and_non_finite_values_print() -> None:
    assert format_value("grad_norm", None) == "-"
    assert format_value("loss", math.nan) == "nan"
    assert format_value("loss", 1.23456) == "1.2346"
    assert format_value("tokens_per_s", 12345.6) == "12,346"
    assert format_value("other", 0.1) == "0.1"


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


# ---- other ranks ----


def test_other_ranks_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = start(tmp_path, enabled=False, wandb="offline", wandb_id="12345678")
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
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID"):
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


def test_off_does_not_import_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # an import would fail
    metrics = start(tmp_path, wandb="off")
    assert metrics.wandb_id is None
    metrics.close()
    assert not (tmp_path / run_directory.WANDB_ID).exists()
