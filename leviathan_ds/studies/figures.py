"""The figures of a study, each as PNG and SVG; readable in grey by markers and line styles.

Points are means over seeds, bars their range. A figure whose numbers are not there is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from leviathan_ds.studies.comparison import LEVIATHAN, TIED, UNTIED, Comparison, Outcomes
from leviathan_ds.studies.results import FACTORS, Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

STYLES = (
    {"color": "#000000", "marker": "o", "linestyle": "-"},
    {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    {"color": "#D55E00", "marker": "^", "linestyle": "-."},
    {"color": "#009E73", "marker": "D", "linestyle": ":"},
)
_BAND = {"color": "#000000", "alpha": 0.08, "linewidth": 0}
_WIDTH, _HEIGHT = 4.6, 3.4  # inches of a panel
plt.rcParams.update(
    {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 8, "svg.hashsalt": "study"}
)


def _plain_numbers(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5, written as 0.5: the span is too short for powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def draw(comparison: Comparison, embeddings: Sequence[Row], folder: Path) -> list[str]:
    """Draw all figures that the tables give; returns their names, in the order of the page."""
    drawers: dict[str, Callable[[], Any]] = {
        "loss": lambda: loss(comparison),
        "gain": lambda: gain(comparison),
        "multiplier": lambda: multipliers(comparison),
        "curves": lambda: curves(comparison),
        "frequency": lambda: frequency(comparison),
        "learning_rate": lambda: learning_rate(comparison),
        "ablation": lambda: ablation(comparison),
        "embeddings": lambda: embedding_panels(embeddings),
    }
    drawn = []
    for name, drawer in drawers.items():
        figure = drawer()
        if figure is not None:
            save(figure, folder, name)
            drawn.append(name)
    return drawn


def save(figure: Any, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=130)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def _panels(count: int, width: float = _WIDTH, sharey: bool = False) -> tuple[Any, Any]:
    figure, axes = plt.subplots(1, count, figsize=(width * count, _HEIGHT), squeeze=False, sharey=sharey)
    return figure, axes[0]


def _style(number: int) -> dict[str, Any]:
    return STYLES[number % len(STYLES)]


def _style_of(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """The three arms of every comparison look alike in all figures; others follow."""
    known = (TIED, UNTIED, LEVIATHAN)
    others = [each for each in arms if each not in known]
    return _style(known.index(arm) if arm in known else len(known) + others.index(arm))


def _points(
    axis: Any, x: Sequence[Any], groups: Sequence[Sequence[float]], style: dict[str, Any], label: str
) -> None:
    """Means of groups with their ranges."""
    means = np.array([np.mean(group) for group in groups])
    bars = np.array([[mean - min(group), max(group) - mean] for mean, group in zip(means, groups, strict=True)]).T
    style = {"markersize": 5, "linewidth": 1.2, "capsize": 3} | style
    axis.errorbar(x, means, yerr=np.abs(bars), label=label, **style)


def loss(comparison: Comparison) -> Any:
    """Figures 3 and 4 of the paper: final loss against total parameters, with the dense fits."""
    arms, deeper = comparison.arms("iso_body", "isoparametric"), comparison.arms("isoparametric")
    if not arms:
        return None
    figure, (axis,) = _panels(1, 6)
    for kind, arm in [*(("iso_body", arm) for arm in arms), *(("isoparametric", arm) for arm in deeper)]:
        groups = [comparison.of(kind, arm, size) for size in comparison.sizes(kind, arm)]
        if groups:
            x = [rows[0]["parameters"] for rows in groups]
            deep = kind == "isoparametric"
            style = {**_style_of(arm, arms), **({"markerfacecolor": "none"} if deep else {})}
            label = f"{arm}, isoparametric" if deep else arm
            _points(axis, x, [[row["val_loss"] for row in rows] for rows in groups], style, label)
    everything = [row["parameters"] for row in comparison.runs]
    x = np.geomspace(min(everything), max(everything), 100)
    for arm, fit in comparison.fits.items():
        law = fit.law
        label = f"{arm} fit: {law.irreducible:.2f} + {law.amplitude:.3g}·N^−{law.exponent:.3f}"
        linestyle = (0, (1, 3)) if arm == TIED else (0, (6, 3))
        axis.plot(
            x, [law.loss(each) for each in x], color="#888888", linewidth=1, linestyle=linestyle, label=label
        )
    axis.set(xscale="log", xlabel="total parameters", ylabel="validation loss, nats per token")
    axis.legend()
    return figure


def gain(comparison: Comparison) -> Any:
    """Figure 3 of the paper: perplexity reduction by size, also at equal totals; and what it costs in time."""
    order = _all_sizes(comparison)
    figure, (left, right) = _panels(2)
    for number, each in enumerate(comparison.candidates):
        for base in (TIED, UNTIED):
            for kind in ("iso_body", "isoparametric"):
                equal = "equal body" if kind == "iso_body" else "equal parameters"
                style, label = _pairing(number, base, kind), f"{each.candidate} against {base}, {equal}"
                _by_size(left, [each.gains(size, base, kind) for size in order], style, label)
                if kind == "iso_body":
                    _by_size(right, [each.overheads(size, base) for size in order], style, label)
    if not left.lines:
        plt.close(figure)
        return None
    left.axhspan(6.7, 18.1, **_BAND)
    left.annotate("v1, against tied: 6.7 to 18.1", (0.02, 6.9), xycoords=("axes fraction", "data"), fontsize=7)
    left.set(ylabel="lower perplexity, %")
    right.set(ylabel="more time per token, %")
    for axis in (left, right):
        axis.axhline(0, color="#000000", linewidth=0.8)
        axis.set_xticks(range(len(order)), order)
        axis.legend(fontsize=7)
    return figure


def _all_sizes(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(comparison.sizes("iso_body") + comparison.sizes("isoparametric")))


def _pairing(candidate: int, base: str, kind: str) -> dict[str, Any]:
    """One look for each candidate (marker), baseline (colour) and kind of body (line, filling)."""
    deep = kind == "isoparametric"
    color = STYLES[0 if base == TIED else 1]["color"]
    marker, filling = "o^sDv"[candidate % 5], "none" if deep else color
    return {"marker": marker, "color": color, "linestyle": ":" if deep else "-", "markerfacecolor": filling}


def _by_size(axis: Any, outcomes: Sequence[Outcomes], style: dict[str, Any], label: str) -> None:
    """Shares in percent, a place for each size; what diverged is not drawn: the page says so."""
    groups = [[100 * each for each in found.values() if each is not None] for found in outcomes]
    places = [place for place, group in enumerate(groups) if group]
    if places:
        _points(axis, places, [groups[place] for place in places], style, label)


def multipliers(comparison: Comparison) -> Any:
    """Figure 5 of the paper: dense-equivalent size over own size with 95% intervals; pale where not supported."""
    lines = [
        (number, each, kind, base, found)
        for number, each in enumerate(comparison.candidates)
        for kind in ("isoparametric", "iso_body")
        for base in (TIED, UNTIED)
        if (found := each.equivalents(kind, base))
    ]
    if not any(kind == "isoparametric" for _, _, kind, _, _ in lines):
        return None
    figure, (axis,) = _panels(1, 6)
    order, handles, intervals = _all_sizes(comparison), [], []
    for line, (number, each, kind, base, found) in enumerate(lines):
        style = {**_pairing(number, base, kind), "linestyle": "", "markersize": 5}
        handles.append(Line2D([], [], **style, label=f"{each.candidate}, {kind}, {base} fit"))
        for size, one in found.items():
            place = order.index(size) + 0.08 * (line - (len(lines) - 1) / 2)
            alpha = 1.0 if one.supported else 0.35
            intervals.append((place, *one.interval, style["color"], alpha))
            if math.isfinite(one.multiplier):
                axis.plot(place, one.multiplier, **style, alpha=alpha)
            else:
                axis.annotate("∞", (place, 0.95), xycoords=("data", "axes fraction"), color=style["color"])
    axis.axhspan(1.47, 2.11, **_BAND)
    axis.axhline(1, color="#000000", linewidth=0.8)
    numbers = [each for *_, found in lines for one in found.values() for each in (one.multiplier, *one.interval)]
    finite = [1.0, 2.11, *filter(math.isfinite, numbers)]
    bottom, top = 0.8 * min(finite), 1.2 * max(finite)
    for place, low, high, color, alpha in intervals:  # one without an upper end goes to the edge
        axis.vlines(place, low, min(high, top), color=color, linewidth=1.2, alpha=alpha)
    axis.set_xticks(range(len(order)), order)
    axis.set(xlabel="size (band: v1's 1.47 to 2.11)", ylabel="dense-equivalent over own parameters", yscale="log")
    axis.set_ylim(bottom, top)
    _plain_numbers(axis.yaxis)
    axis.legend(handles=handles, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return figure


def curves(comparison: Comparison) -> Any:
    """Validation loss over tokens; the horizontal line is the tied baseline's end."""
    sizes = comparison.sizes("iso_body")
    if not sizes:
        return None
    figure, axes = _panels(len(sizes), 3.4)
    for axis, size in zip(axes, sizes, strict=True):
        for arm in comparison.arms("iso_body"):
            rows = [row for row in comparison.of("iso_body", arm, size, "evaluations") if row["tokens"] > 0]
            tokens = sorted({row["tokens"] for row in rows})
            groups = [[row["val_loss"] for row in rows if row["tokens"] == each] for each in tokens]
            if groups:
                _points(
                    axis,
                    [each / 1e6 for each in tokens],
                    groups,
                    {**_style_of(arm, comparison.arms("iso_body")), "markersize": 3.5},
                    arm,
                )
        baseline = comparison.of("iso_body", TIED, size)
        if baseline:
            axis.axhline(np.mean([row["val_loss"] for row in baseline]), color="#888888", linewidth=0.8)
        axis.set(title=size, xlabel="million tokens", xscale="log")
        _plain_numbers(axis.xaxis)
    axes[0].set_ylabel("validation loss, nats per token")
    axes[0].legend()
    return figure


def frequency(comparison: Comparison) -> Any:
    """Perplexity against the tied baseline's by how often the dataset has a token."""
    sizes = [size for size in comparison.sizes("iso_body") if comparison.of("iso_body", TIED, size, "frequency")]
    if not sizes:
        return None
    figure, axes = _panels(len(sizes), 3.4)
    for axis, size in zip(axes, sizes, strict=True):
        for arm in comparison.arms("iso_body"):
            by_decile = {decile: comparison.frequency_gains(size, decile, TIED, arm) for decile in range(1, 11)}
            known = {
                decile: [-100 * each for each in gains.values()] for decile, gains in by_decile.items() if gains
            }
            if known and arm != TIED:
                style = _style_of(arm, comparison.arms("iso_body"))
                _points(axis, list(known), list(known.values()), style, arm)
        axis.axhline(0, color="#000000", linewidth=0.8)
        axis.set(title=size, xlabel="decile of the dataset's tokens, 10 rarest", xticks=range(1, 11))
    axes[0].set_ylabel("perplexity against dense_tied, %")
    axes[0].legend()
    return figure


def learning_rate(comparison: Comparison) -> Any:
    """Final loss by learning rate, for each arm the same number of tries.

    Where tries differ in a factor on the rate of a part as well: by the first such factor, a panel each arm.
    """
    tries, arms = comparison.of("learning_rate"), comparison.arms("learning_rate")
    if not tries:
        return None
    sizes = comparison.sizes("learning_rate")
    several = (part for part, key in FACTORS.items() if len({(row["arm"], row[key]) for row in tries}) > len(arms))
    part = next(several, None)
    panels = [(size, arm) for size in sizes for arm in arms] if part else [(size, None) for size in sizes]
    figure, axes = _panels(len(panels), _WIDTH if len(panels) < 3 else 3.6, sharey=part is not None)
    for axis, (size, arm) in zip(axes, panels, strict=True):
        rows = comparison.of("learning_rate", arm, size)
        if part is None:
            for each in arms:
                _tries(axis, [row for row in rows if row["arm"] == each], "lr", _style_of(each, arms), each)
            axis.set(title=size, xlabel="learning rate")
        else:
            for number, rate in enumerate(sorted({row["lr"] for row in tries})):
                of_rate = [row for row in rows if row["lr"] == rate]
                _tries(axis, of_rate, FACTORS[part], _style(number), f"learning rate {rate:g}")
            axis.set(title=f"{arm}, {size}", xlabel=f"factor on the {part}'s rate")
        axis.set_xscale("log")
        if part:
            axis.xaxis.set_major_formatter("{x:g}")
    best, worst = (found(row["val_loss"] for row in tries) for found in (min, max))
    if part and worst > best + 2:  # what is that bad is not to be read, and the rest is
        axes[0].set_ylim(best - 0.1, best + 2)
    axes[0].set_ylabel("validation loss, nats per token")
    axes[0].legend()
    return figure


def _tries(axis: Any, rows: Sequence[Row], key: str, style: dict[str, Any], label: str) -> None:
    """Losses by one thing that was tried; where tries are alike in it, the best of them."""
    by_variant = [[row for row in rows if row["variant"] == name] for name in {row["variant"] for row in rows}]
    best: dict[float, list[float]] = {}
    for group in sorted(by_variant, key=lambda group: -np.mean([row["val_loss"] for row in group])):
        best[group[0][key]] = [row["val_loss"] for row in group]
    if best:
        x = sorted(best)
        _points(axis, x, [best[each] for each in x], style, label)


def ablation(comparison: Comparison) -> Any:
    """Loss and throughput of every variant beside the first one's."""
    rows = comparison.of("ablation")
    if not rows:
        return None
    names = list(dict.fromkeys((row["size"], row["arm"], row["variant"] or "") for row in rows))
    groups = [[row for row in rows if (row["size"], row["arm"], row["variant"] or "") == name] for name in names]
    labels = [" ".join(filter(None, (arm, variant, size))) for size, arm, variant in names]
    figure, axes = plt.subplots(1, 2, figsize=(9, 1.2 + 0.26 * len(names)), sharey=True)
    for axis, key, title in zip(
        axes, ("val_loss", "tokens_per_s"), ("validation loss", "tokens per second"), strict=True
    ):
        for place, group in enumerate(groups):
            _swap(axis, [row[key] for row in group], place)
        axis.axvline(np.mean([row[key] for row in groups[0]]), color="#888888", linewidth=0.8)
        axis.set(xlabel=title)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    return figure


def _swap(axis: Any, values: Sequence[float], place: int) -> None:
    mean = np.mean(values)
    bars = [[mean - min(values)], [max(values) - mean]]
    axis.errorbar([mean], [place], xerr=bars, color="#000000", marker="o", capsize=3, markersize=5)


def embedding_panels(embeddings: Sequence[Row]) -> Any:
    """Of the widest size: spectra, continuity along the last digit; knots in use and map of Leviathan's points."""
    if not embeddings:
        return None
    widest = max(embeddings, key=lambda row: len(row["singular_values"]))["size"]
    rows = [row for row in embeddings if row["size"] == widest]
    figure, axes = _panels(4, 3.6)
    for row in rows:
        style = {**_style_of(row["arm"], [each["arm"] for each in rows]), "marker": ""}
        values = row["singular_values"]
        label = f"{row['arm']}: effective rank {row['effective_rank']:.0f}"
        axes[0].plot(range(1, len(values) + 1), values, label=label, **style)
        distances = [math.nan if each is None else each for each in row["continuity"][-1]]
        axes[1].plot(range(1, len(distances) + 1), distances, label=row["arm"], **style)
    axes[0].set(
        title=f"spectrum, {widest}",
        xlabel="index",
        ylabel="singular value over the largest",
        ylim=(1e-4, 1.5),
        yscale="log",
    )
    axes[1].set(
        title="along the last digit",
        xlabel="digit distance",
        ylabel="embedding distance over random pairs'",
        ylim=(0, None),
    )
    shown = next((row for row in rows if row.get("generator")), None)
    if shown is not None:
        generator = shown["generator"]
        usage = generator["knot_usage"]
        axes[2].bar(range(1, len(usage) + 1), usage, color="#D55E00", edgecolor="#000000", linewidth=0.5)
        title = f"{shown['arm']}: {generator['knots_used']:.0%} of knots in use"
        axes[2].set(title=title, xlabel="knot", ylabel="share of latent coordinates nearest to it")
        axes[2].xaxis.set_major_locator(MaxNLocator(integer=True))
        x, y = np.array(generator["map"]).T
        points = axes[3].scatter(x, y, c=np.log10(generator["map_counts"]), s=9, cmap="cividis")
        figure.colorbar(points, ax=axes[3], label="log₁₀ of training count")
        axes[3].set(title=f"{shown['arm']}: latent points", xlabel="1st component", ylabel="2nd component")
    axes[0].legend()
    axes[1].legend()
    return figure


def theorem(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Error against modes, a line for each number of knots."""
    functions = list(dict.fromkeys(row["function"] for row in rows))
    figure, axes = _panels(len(functions), 3.6)
    for axis, function in zip(axes, functions, strict=True):
        for number, row in enumerate(each for each in rows if each["function"] == function):
            axis.plot(
                list(row["errors"]), list(row["errors"].values()), label=f"{row['knots']} knots", **_style(number)
            )
        axis.set(title=function, xlabel="modes", yscale="log")
    axes[0].set_ylabel("largest error over largest value")
    axes[0].legend()
    save(figure, folder, "theorem")
