"""One self-contained HTML page of a run: curves, figures, where it ran, on what data, by which recipe.

Reads the run directory alone; the page loads nothing from anywhere. Charts are inline SVG whose colours follow the
reader's light or dark setting.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, MaxNLocator

from data_prep.errors import UserError
from leviathan_ds import run_directory

Point = tuple[float, float]  # step, value

# Points of a curve; where a run has more, each is the mean of a bin and a band shows the bin's range.
MAX_POINTS = 400
MAX_FAULTS = 100  # lines of the table
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 200, 56, 24, 10, 26  # pixels at the usual width of a card


@dataclass(frozen=True)
class Chart:
    """A plot of columns of metrics.jsonl over the step."""

    title: str
    columns: dict[str, str]  # column: its name in the legend
    unit: str = ""
    log: bool = False
    from_zero: bool = False


CHARTS = (
    Chart("Training loss", {"loss": "loss"}, "nats per token"),
    Chart("Validation loss", {"val_loss": "val_loss"}, "nats per token"),
    Chart("Learning rate", {"lr": "lr"}),
    Chart(
        "Gradient norm before clipping",
        {"grad_norm": "whole"} | {f"grad_norm_{c}": c for c in ("generator", "embedding", "body", "head")},
        log=True,
    ),
    Chart("Throughput", {"tokens_per_s_per_gpu": "per GPU"}, "tokens per second", from_zero=True),
    Chart("Model FLOPs utilisation", {"mfu": "mfu"}, from_zero=True),
    Chart("Waiting for data", {"data_wait_share": "share of time"}, from_zero=True),
    Chart("Memory", {"memory_gib": "largest of any rank"}, "GiB", from_zero=True),
    Chart("Skipped steps", {"skipped_steps": "since the start"}, from_zero=True),
    Chart("Generator: range of the product", {"product_min": "smallest", "product_max": "largest"}),
    Chart("Generator: shares", {"knots_used": "knots in use", "t_saturated": "saturated t"}),
    Chart("Generator: cosine between embeddings", {"embedding_cosine": "mean over pairs"}),
)


def page(run_dir: Path) -> str:
    """The page. Raises UserError naming the directory if it is no run or has no metrics yet."""
    for name in (run_directory.RECIPE, run_directory.METRICS):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} has no {name}: not a run of this trainer, or none that has begun")
    records = run_directory.read_lines(run_dir / run_directory.METRICS)
    starts = run_directory.read_lines(run_dir / run_directory.STARTS)
    summary_path = run_dir / run_directory.SUMMARY
    summary = json.loads(summary_path.read_text()) if summary_path.is_file() else {}
    name = html.escape(run_dir.resolve().name)
    sections = [
        f"<h1>{name}</h1>",
        _figures(records, summary),
        f'<div class="charts">{"".join(_chart(chart, records) for chart in CHARTS)}</div>',
        _starts(starts),
        _faults(run_directory.read_lines(run_dir / run_directory.FAULTS)),
        *((_environment(starts[-1]), _data_mix(starts[-1])) if starts else ()),
        _file("Recipe", run_dir / run_directory.RECIPE),
        _file("DeepSpeed's configuration", run_dir / run_directory.DS_CONFIG),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n' + (
        "\n".join(sections) + "\n</body></html>\n"
    )


# ---- charts ----


def _series(column: str, records: list[dict[str, Any]], log: bool) -> list[Point]:
    points = ((record["step"], record[column]) for record in records if record.get(column) is not None)
    return [point for point in points if point[1] > 0 or not log]


def _binned(points: Sequence[Point]) -> list[tuple[float, float, float, float]]:
    """(step, mean, smallest, largest) of at most MAX_POINTS bins of neighbouring points."""
    size = -(-len(points) // MAX_POINTS)
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (
            sum(step for step, _ in each) / len(each),
            sum(value for _, value in each) / len(each),
            min(value for _, value in each),
            max(value for _, value in each),
        )
        for each in bins
    ]


def _ticks(low: float, high: float, log: bool) -> list[float]:
    locator = LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=8) if log else MaxNLocator(5)
    return [float(tick) for tick in locator.tick_values(low, high)]


def _axis(low: float, high: float, log: bool, start: float, end: float) -> tuple[list[float], Callable]:
    """Ticks within the axis, and the map from a value to its place between `start` and `end`."""
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - abs(low) / 2, high + (abs(high) / 2 or 1))
    scale: Callable[[float], float] = math.log10 if log else float
    bottom, top = scale(low), scale(high)

    def place(value: float) -> float:
        return round(start + (scale(value) - bottom) / (top - bottom) * (end - start), 1)

    return [tick for tick in _ticks(low, high, log) if low <= tick <= high], place


def _chart(chart: Chart, records: list[dict[str, Any]]) -> str:
    """A figure, or nothing where the run has none of the columns."""
    series = {label: _series(column, records, chart.log) for column, label in chart.columns.items()}
    series = {label: points for label, points in series.items() if points}
    if not series:
        return ""
    curves = [_binned(points) for points in series.values()]
    everything = [point for points in curves for point in points]
    steps = [record["step"] for record in records]  # the same axis for all charts
    x_ticks, x = _axis(min(steps), max(steps), False, _LEFT, _WIDTH - _RIGHT)
    low, high = min(each[2] for each in everything), max(each[3] for each in everything)
    low = min(low, 0) if chart.from_zero else low
    y_ticks, y = _axis(low, high, chart.log, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>'
        f'<text x="{_LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:.4g}</text>'
        for tick in y_ticks
    ]
    parts += [
        f'<text x="{x(tick)}" y="{_HEIGHT - 8}" text-anchor="middle">{tick:,.0f}</text>'
        for tick in x_ticks
        if tick == int(tick)
    ]
    for number, points in enumerate(curves):
        if any(lowest < highest for _, _, lowest, highest in points):
            upper = [f"{x(step)},{y(highest)}" for step, _, _, highest in points]
            lower = [f"{x(step)},{y(lowest)}" for step, _, lowest, _ in reversed(points)]
            parts.append(f'<polygon class="band c{number}" points="{" ".join(upper + lower)}"/>')
        line = " ".join(f"{x(step)},{y(mean)}" for step, mean, *_ in points)
        parts.append(f'<polyline class="c{number}" points="{line}"/>')
        if len(points) <= 30:
            parts += [f'<circle class="c{number}" r="3" cx="{x(s)}" cy="{y(m)}"/>' for s, m, *_ in points]
    legend = " ".join(
        f'<span><i class="c{number}"></i>{label}: {points[-1][1]:.4g}</span>'
        for number, (label, points) in enumerate(series.items())
    )
    unit = f" <small>{chart.unit}</small>" if chart.unit else ""
    return (
        f"<figure><figcaption>{chart.title}{unit}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{chart.title}">{"".join(parts)}</svg>'
        f'<p class="legend">last: {legend}</p></figure>'
    )


# ---- tables ----


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(_shown(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _figures(records: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    last = max((record["step"] for record in records), default=0)
    figures = [f"<div><b>{_shown(last)}</b>last logged step</div>"]
    figures += [
        f"<div><b>{html.escape(_shown(value))}</b>{html.escape(key)}</div>" for key, value in summary.items()
    ]
    return f'<div class="figures">{"".join(figures)}</div>'


def _starts(starts: list[dict[str, Any]]) -> str:
    rows = [
        [start["time"], start["first_step"], start["host"], start["world_size"], *_layout(start), start["git"]]
        for start in starts
    ]
    head = ["time (UTC)", "from step", "host", "ranks", "TP", "DP", "ZeRO", "commit"]
    troubles = [f"<li>{html.escape(reason)}</li>" for start in starts for reason in start["passed_over"]]
    passed_over = f"<p>Checkpoints passed over:</p><ul>{''.join(troubles)}</ul>" if troubles else ""
    return f"<h2>Starts: 1, restarts: {len(rows) - 1}</h2>{_table(head, rows)}{passed_over}" if rows else ""


def _faults(faults: list[dict[str, Any]]) -> str:
    """Skipped steps, rollbacks and stops as training/faults.py records them."""
    if not faults:
        return ""
    hidden = len(faults) - MAX_FAULTS
    note = f"<p>The last {MAX_FAULTS}; {hidden} before them.</p>" if hidden > 0 else ""
    rows = [[fault.get(key) for key in ("step", "kind", "reason")] for fault in faults[-MAX_FAULTS:]]
    return f"<h2>Faults: {len(faults)}</h2>{note}{_table(['step', 'kind', 'reason'], rows)}"


def _layout(start: dict[str, Any]) -> list[Any]:
    return [start["layout"].get(key) for key in ("tensor_model_parallel_size", "data_parallel_size", "zero_stage")]


def _environment(start: dict[str, Any]) -> str:
    rows = [(key, start[key]) for key in ("device", "cuda", "platform")] + list(start["versions"].items())
    rows.append(("command", " ".join(start["command"])))
    return f"<h2>Environment of the last start</h2>{_table(['what', 'value'], rows)}"


def _data_mix(start: dict[str, Any]) -> str:
    rows = []
    for dataset in start["data"]:
        sizes = [dataset["documents"], dataset["tokens"], dataset["fingerprint"][:12]]
        rows.append([dataset["prefix"], f"{dataset['share']:.1%}", *sizes])
        for name, counts in sorted(dataset["domains"].items(), key=lambda item: -item[1]["tokens"]):
            share = dataset["share"] * counts["tokens"] / dataset["tokens"]
            rows.append([f"\u2003{name}", f"{share:.1%}", counts["documents"], counts["tokens"], ""])
    head = ["dataset and its domains", "of the samples", "documents", "tokens", "fingerprint"]
    return f"<h2>Data mix</h2>{_table(head, rows)}"


def _file(title: str, path: Path) -> str:
    if not path.is_file():
        return ""
    return f"<h2>{title}</h2><pre>{html.escape(path.read_text())}</pre>"


_STYLE = """
:root { color-scheme: light dark; --text: #1d2026; --soft: #667; --page: #fff; --card: #f6f7f9; --line: #dde0e6;
  --c0: #2563c9; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #a16207; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ec; --soft: #a0a6b2; --page: #14161a; --card: #1d2026;
  --line: #343944; --c0: #7aa7ff; --c1: #ff9d66; --c2: #6fd08c; --c3: #cf9bff; --c4: #e3c04f; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 1180px;
  margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: .4rem 0; } h2 { font-size: 1.15rem; margin: 1.8rem 0 .5rem; }
.figures { display: flex; flex-wrap: wrap; gap: .5rem; margin: .8rem 0; }
.figures div { background: var(--card); border-radius: 6px; padding: .4rem .8rem; color: var(--soft);
  font-size: .8rem; }
.figures b { display: block; color: var(--text); font-size: 1.15rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: .8rem; }
figure { margin: 0; background: var(--card); border-radius: 6px; padding: .7rem; min-width: 0; }
figcaption { font-weight: 600; } small { font-weight: 400; color: var(--soft); }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 1.6; stroke: currentColor; }
.band { fill: currentColor; opacity: .18; } circle { fill: currentColor; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); }
.legend { margin: .2rem 0 0; font-size: .8rem; color: var(--soft); }
.legend span { margin-right: .8rem; white-space: nowrap; }
.legend i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; background: currentColor;
  margin-right: .3em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td { overflow-wrap: anywhere; } td:first-child { white-space: nowrap; }
pre { background: var(--card); border-radius: 6px; padding: .8rem; overflow: auto; max-height: 26rem;
  font-size: .82rem; }
"""
