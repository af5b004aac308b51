"""The page of a run: complete, readable without a network, and safe with hostile or missing content."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launchers import report as launcher
from leviathan_ds import report, run_directory

START = {
    "time": "2026-01-01T00:00:00+00:00",
    "first_step": 0,
    "passed_over": [],
    "command": ["pretrain.py", "--note", "<script>alert(1)</script>"],
    "host": "node-a",
    "device": "cpu",
    "world_size": 4,
    "layout": {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1},
    "git": "abc123",
    "platform": "Linux",
    "cuda": None,
    "versions": {"python": "3.11", "torch": "2.13"},
    "data": [
        {
            "prefix": "data/pile",
            "share": 0.5,
            "fingerprint": "f" * 64,
            "documents": 10,
            "tokens": 100,
            "domains": {"Wiki": {"documents": 4, "tokens": 25, "bytes": 60}},
        }
    ],
}


class Elements(HTMLParser):
    """Tags with their attributes, and that every one is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "small & fast"
    path.mkdir()
    (path / run_directory.RECIPE).write_text("model:\n  hidden_size: 8  # <b>\n")
    (path / run_directory.DS_CONFIG).write_text("{}")
    records: list[dict[str, Any]] = [{"step": 0, "val_loss": 5.0}]
    records += [{"step": s, "loss": 5 - s / 1000, "lr": 1e-3, "grad_norm": 2.0 + s % 2} for s in range(1, 2001)]
    records[7]["loss"] = None  # was not finite
    records.append({"step": 2000, "val_loss": 3.0, "product_min": 1.0, "product_max": 1.0})
    lines = [json.dumps(record) + "\n" for record in records]
    (path / run_directory.METRICS).write_text("".join(lines) + '{"step": 20')
    resumed = START | {"first_step": 100, "host": "node-b", "passed_over": ["step_00000200: missing"]}
    (path / run_directory.STARTS).write_text(json.dumps(START) + "\n" + json.dumps(resumed) + "\n")
    faults = [{"kind": "skip", "step": s, "reason": f"the loss of {s} is not finite"} for s in range(101, 206)]
    (path / run_directory.FAULTS).write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    (path / run_directory.SUMMARY).write_text('{"final_val_loss": 3.0}')
    return path


def test_page_is_whole_and_loads_nothing(run_dir: Path) -> None:
    text = report.page(run_dir)
    elements = Elements(text)
    assert elements.open == []
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "link", "img", "iframe", "a", "image", "use"}
    assert not any({"src", "href", "onload", "style"} & attributes.keys() for _, attributes in elements.found)
    assert "http" not in text and "url(" not in text and "@import" not in text
    titles = [attributes["aria-label"] for tag, attributes in elements.found if tag == "svg"]
    assert titles == [
        "Training loss",
        "Validation loss",
        "Learning rate",
        "Gradient norm before clipping",
        "Generator: range of the product",
    ], "a chart for what the run has, none for what it lacks"
    for word in (
        "node-a",
        "node-b",
        "restarts: 1",
        "step_00000200: missing",
        "data/pile",
        "Wiki",
        "12.5%",
        "abc123",
    ):
        assert word in text, word
    assert "Faults: 105" in text and "5 before them" in text
    assert "the loss of 106 is" in text and "the loss of 105 is" not in text
    assert "small &amp; fast" in text and "&lt;script&gt;alert" in text and "# &lt;b&gt;" in text


def test_a_curve_is_drawn_where_its_values_are(run_dir: Path) -> None:
    svg = re.findall(r'<svg[^>]*aria-label="Training loss">(.*?)</svg>', report.page(run_dir))[0]
    points = [
        tuple(map(float, pair.split(",")))
        for pair in re.findall(r'polyline class="c0" points="(.*?)"', svg)[0].split()
    ]
    assert len(points) <= report.MAX_POINTS
    xs, ys = [x for x, _ in points], [y for _, y in points]
    assert xs == sorted(xs) and ys == sorted(ys), "falling loss: downwards on the page"
    inner = report._WIDTH - report._LEFT - report._RIGHT
    assert xs[0] == pytest.approx(report._LEFT, abs=inner / 100)
    assert xs[-1] == pytest.approx(report._WIDTH - report._RIGHT, abs=inner / 100)
    middle = points[len(points) // 2]
    assert middle[1] == pytest.approx((report._TOP + report._HEIGHT - report._BOTTOM) / 2, abs=3)


def test_bins_keep_their_extremes() -> None:
    points = [(float(step), 1.0) for step in range(5000)]
    points[1234] = (1234.0, 9.0)
    bins = report._binned(points)
    assert len(bins) <= report.MAX_POINTS
    assert max(highest for *_, highest in bins) == 9.0
    assert math.isclose(sum(mean for _, mean, *_ in bins) / len(bins), 1 + 8 / 5000, rel_tol=1e-3)


def test_a_run_that_only_began_has_a_page(run_dir: Path) -> None:
    (run_dir / run_directory.METRICS).write_text('{"step": 0, "val_loss": 5.0}\n')
    for name in (run_directory.STARTS, run_directory.FAULTS, run_directory.SUMMARY):
        (run_dir / name).unlink()
    assert Elements(report.page(run_dir)).open == []


def test_the_command(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main([str(run_dir)]) == 0
    assert (run_dir / "report.html").read_text() == report.page(run_dir)
    assert launcher.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} has no recipe.yaml")
