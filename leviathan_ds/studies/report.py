"""docs/results.md: every number from the tables of results.collect, verdicts computed from them."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from leviathan_ds import run_directory
from leviathan_ds.accounting import count_parameters
from leviathan_ds.studies import figures, results
from leviathan_ds.studies.comparison import NAMES, TIED, UNTIED, Comparison, multiplier, percents, times
from leviathan_ds.studies.results import Row, name_of
from leviathan_ds.studies.study import Run, Study, gflops_per_token, tokens_per_s

CAPTIONS = {
    "loss": "Final validation loss against total parameters (v1, Figures 3 and 4); grey: dense fits.",
    "gain": "Perplexity reduction at equal body and at equal parameters; right: time, at equal body.",
    "multiplier": "Size of the dense model with Leviathan's loss, over its own, 95% intervals (v1, Figure 5); "
    "pale: not supported.",
    "curves": "Validation loss over tokens; grey: where the tied baseline ends.",
    "frequency": "Perplexity against the tied arm's by deciles of the dataset's tokens, 10 the rarest.",
    "learning_rate": "Learning rates tried, the same for every arm.",
    "ablation": "Variants: loss and throughput; grey: the first.",
    "embeddings": "What the embeddings became (first seed, widest size).",
}
_HEADER = """# Results

Written by `python launchers/study.py report`; edit nothing here. What each figure means and how a verdict is
reached is in [studies.md](studies.md). Values are means over seeds, in brackets their range. A claim *holds* if it
does in every pair of runs of equal size and seed, *fails* if in none, and is *undecided* otherwise; that of an
equivalent size goes by the 95% intervals of the fit. At the sizes and budgets below, and no others. What holds is
a claim's direction; how near its size comes to the paper's, the two columns beside it say. Bars in the figures are
ranges over seeds, and 95% intervals of the fit where they stand for a size.
"""


def write(studies: Sequence[Study], root: Path, page: Path) -> None:
    """Draw the figures of studies below `root` and write the page. Raises UserError where a study has no table."""
    sections = [_HEADER]
    for study in studies:
        folder = root / study.name
        comparison = Comparison.read(folder)
        embeddings = results.read_embeddings(folder)
        names = figures.draw(comparison, embeddings, folder)
        link = Path(os.path.relpath(folder, page.parent))
        sections += [f"## {study.name}", study.note, *_section(comparison, embeddings, names, link)]
    if (root / THEOREM / "theorem.md").is_file():
        link = Path(os.path.relpath(root / THEOREM, page.parent)) / "theorem.png"
        text = (root / THEOREM / "theorem.md").read_text()
        sections += ["## Theorem 1.1", f"![Error against modes]({link})", text]
    run_directory.write_text(page, "\n\n".join(section.strip() for section in sections if section) + "\n")


THEOREM = "theorem"


def demonstrate_theorem(root: Path) -> str:
    """Compute the demonstration; write its table and figure below `root`; returns the table."""
    from leviathan_ds.studies.theorem import demonstration

    rows = demonstration()
    modes = list(rows[0]["errors"])
    lines = [[row["function"], row["knots"], *(f"{row['errors'][count]:.1e}" for count in modes)] for row in rows]
    table = markdown(["function", "knots", *(f"{count} modes" for count in modes)], lines)
    figures.theorem(rows, root / THEOREM)
    run_directory.write_text(root / THEOREM / "theorem.md", table + "\n")
    return table


def _section(comparison: Comparison, embeddings: Sequence[Row], names: Sequence[str], link: Path) -> list[str]:
    parts = [_circumstances(comparison)]
    for each in comparison.candidates:
        cells = [[found.claim, found.paper, found.here, f"**{found.verdict}**"] for found in each.verdicts()]
        if cells:
            head = ["claim", "the paper", "here", "verdict"]
            parts += [f"### Verdicts on {each.candidate}", markdown(head, cells)]
        else:
            parts.append(f"No verdict on {each.candidate}: no {TIED} or {UNTIED} has ended at its sizes.")
    tables = {
        "loss": lambda: _runs_table(comparison, ("iso_body", "isoparametric")) + "\n\n" + _fits_table(comparison),
        "multiplier": lambda: _equivalents_table(comparison),
        "curves": lambda: _savings_table(comparison),
        "frequency": lambda: _frequency_table(comparison),
        "learning_rate": lambda: _runs_table(comparison, ("learning_rate",)) + "\n\n" + _edges(comparison),
        "ablation": lambda: _runs_table(comparison, ("ablation",)),
        "embeddings": lambda: _embeddings_table(embeddings),
    }
    for name, caption in CAPTIONS.items():
        if name in names:
            parts += [f"### {caption}", f"![{caption}]({link / name}.png)"]
            parts += [tables[name]()] if name in tables else []
    return [part for part in parts if part]


def _circumstances(comparison: Comparison) -> str:
    """How many runs, where, by which code, on which data; which are not there, and why."""

    def all_of(key: str) -> str:
        return ", ".join(f"`{each}`" for each in sorted({str(row[key]) for row in runs}))

    runs, planned = comparison.runs, comparison.planned
    text = f"{len(runs)} of {len(planned)} runs"
    if runs:
        commits = {each for row in runs for each in str(row["commit"]).split(", ")}  # of all starts
        tokens, epochs = [row["tokens"] for row in runs], [row["epochs"] for row in runs]
        text += (
            f", {_between(tokens)} tokens each ({_between(epochs, '.3g')} epochs), vocabulary "
            f"{all_of('vocab_size')}, {all_of('precision')}, on {all_of('device')}; skipped steps: "
            f"{sum(row['skipped_steps'] for row in runs)}.\n"
            f"Commits: {', '.join(f'`{each}`' for each in sorted(commits))}. Data: {all_of('data')}."
        )
    measured = {name_of(row) for row in comparison.frequency}
    lines = [[name_of(row), row["status"], row["reason"]] for row in planned if row["status"] != results.DONE]
    lines += [[name_of(row), row["status"], "not measured"] for row in runs if name_of(row) not in measured]
    return text + ("\n\n" + markdown(["run", "status", "why"], lines) if lines else "")


def _between(values: Sequence[float], form: str = ",.0f") -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def _runs_table(comparison: Comparison, kinds: Sequence[str]) -> str:
    groups: dict[tuple, list[Row]] = {}
    for row in comparison.runs:
        if row["kind"] in kinds:
            rates = tuple(row["lr"] * scale for scale in (1, row["input_lr_scale"], row["head_lr_scale"]))
            groups.setdefault((row["kind"], row["size"], row["arm"], row["variant"] or "", rates), []).append(row)
    lines = []
    for (kind, size, arm, variant, rates), rows in groups.items():
        losses = [row["val_loss"] for row in rows]
        perplexity = math.exp(sum(losses) / len(losses))
        speed = sum(row["tokens_per_s"] for row in rows) / len(rows)
        name = f"{arm}, isoparametric" if kind == "isoparametric" else " ".join(filter(None, (arm, variant)))
        shape = f"{rows[0]['hidden_size']} × {rows[0]['num_layers']}"
        counts = [f"{rows[0][key]:,}" for key in ("parameters", "embedding_parameters")]
        numbers = [_mean_and_range(losses), f"{perplexity:.1f}", f"{speed:,.0f}", len(rows)]
        lines.append([size, name, shape, *counts, *(f"{rate:g}" for rate in rates), *numbers])
    head = [
        "size",
        "arm",
        "width × layers",
        "parameters",
        "of them embedding",
        "lr",
        "input lr",
        "head lr",
        "loss",
        "perplexity",
        "tokens/s",
        "seeds",
    ]
    return markdown(head, lines) if lines else ""


def _mean_and_range(values: Sequence[float]) -> str:
    spread = f" [{min(values):.4f}, {max(values):.4f}]" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.4f}{spread}"


def _fits_table(comparison: Comparison) -> str:
    lines = []
    for arm, fit in comparison.fits.items():
        cells = [arm]
        for key in ("irreducible", "amplitude", "exponent"):
            low, high = fit.interval([getattr(law, key) for law in fit.resampled])
            cells.append(f"{getattr(fit.law, key):.4g} [{low:.4g}, {high:.4g}]")
        lines.append([*cells, "; ".join(fit.warnings) or "none"])
    if not lines:
        return "No power law is fitted: that takes three sizes of a dense arm, and four to test it."
    return markdown(["fit of L(N) = E + A·N^−α", "E", "A", "α", "warnings"], lines)


def _equivalents_table(comparison: Comparison) -> str:
    lines = [
        [size, each.candidate, kind, arm, multiplier(found), "; ".join(found.warnings) or "none"]
        for each in comparison.candidates
        for kind in ("iso_body", "isoparametric")
        for arm in each.fits
        for size, found in each.equivalents(kind, arm).items()
    ]
    return markdown(["size", "arm", "bodies", "fit", "dense-equivalent over own size", "warnings"], lines)


def _savings_table(comparison: Comparison) -> str:
    lines = [
        [size, each.candidate, base, times(savings.values()), percents(each.gains(size, base).values())]
        for each in comparison.candidates
        for size in each.sizes("iso_body", each.candidate)
        for base in NAMES
        if (savings := each.savings(size, base))
    ]
    head = ["size", "arm", "baseline", "fewer tokens to its final loss, by seed", "lower perplexity at the end"]
    return markdown(head, lines) if lines else ""


def _frequency_table(comparison: Comparison) -> str:
    """Perplexity of each arm, the mean loss of its seeds, by decile."""
    deciles = range(1, 11)
    lines = []
    for size in comparison.sizes("iso_body"):
        for arm in comparison.arms("iso_body"):
            losses = [list(comparison.frequency_losses(size, arm, decile).values()) for decile in deciles]
            if any(losses):
                cells = [f"{math.exp(sum(each) / len(each)):,.1f}" if each else "" for each in losses]
                lines.append([size, arm, *cells])
    head = (
        "Perplexity, decile 10 the rarest; above the size of the vocabulary it is worse than a uniform guess:\n\n"
    )
    return head + markdown(["size", "arm", *map(str, deciles)], lines)


def _edges(comparison: Comparison) -> str:
    """The arms whose best rates lie at an end of the tries, so that a better one may lie beyond."""
    found = []
    for size in comparison.sizes("learning_rate"):
        for arm in comparison.arms("learning_rate"):
            rows = comparison.of("learning_rate", arm, size, "ended")
            losses: dict[str, list[float]] = {}
            for row in rows:
                loss = row["val_loss"] if row["status"] == results.DONE else math.inf
                losses.setdefault(row["variant"], []).append(loss)
            if not losses:
                continue
            best = min(losses, key=lambda variant: statistics.fmean(losses[variant]))
            own = [part for part in results.FACTORS if (part, rows[0]["embedding"]) != ("head", "dense_tied")]
            factors = {f"factor of the {part}": results.FACTORS[part] for part in own}
            for name, key in {"rate": "lr", **factors}.items():
                by_variant = {row["variant"]: row[key] for row in rows}
                value, tried = by_variant[best], set(by_variant.values())
                if value in (min(tried), max(tried)) and (name == "rate" or len(tried) > 1):
                    found.append(f"**{arm} at {size}: the best {name}, {value:g}, is at an end of the tries.**")
    return "\n\n".join(found) or "No arm's best rate is at an end of the tries."


def _embeddings_table(embeddings: Sequence[Row]) -> str:
    lines = []
    for row in embeddings:
        generator = row.get("generator") or {}
        used = f"{generator['knots_used']:.1%}" if generator else ""
        width = len(row["singular_values"])
        lines.append([row["size"], row["arm"], f"{row['effective_rank']:.1f} of {width}", used])
    found = markdown(["size", "arm", "effective rank", "knots in use"], lines)
    widest = max(embeddings, key=lambda row: len(row["singular_values"]))["size"]
    rows = [row for row in embeddings if row["size"] == widest]
    words = [word for word in rows[0]["neighbours"] if rows[0]["neighbours"][word]]
    lines = [[word, *(", ".join(map(_code, row["neighbours"][word])) for row in rows)] for word in words]
    return (
        found + f"\n\nNearest neighbours at {widest}:\n\n" + markdown(["of", *(row["arm"] for row in rows)], lines)
    )


def _code(text: str) -> str:
    """A token as code within a table's cell."""
    return "`" + text.replace("`", "'").replace("\n", "⏎") + "`"


def markdown(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def plan_table(study: Study, runs: Sequence[Run]) -> Table:
    """The runs with their sizes, budgets and predicted time on the study's cluster."""
    nodes = study.world_size / study.cluster.gpus_per_node
    table = Table(title=f"{study.name}: {len(runs)} runs", caption=f"predicted, on {study.world_size} ranks")
    table.add_column("run", no_wrap=True, min_width=max(len(run.name) for run in runs))
    for name in ("parameters", "layers", "GFLOPs/token", "tokens", "lr", "tokens/s", "hours", "node hours"):
        table.add_column(name, justify="right")
    total = 0.0
    for run in runs:
        hours = study.predicted_s(run) / 3600
        total += hours
        recipe = run.recipe
        numbers = [f"{count_parameters(recipe.model).total:,}", f"{recipe.model.num_layers}"]
        numbers += [
            f"{gflops_per_token(run):.4f}",
            f"{run.tokens:,}",
            "tuned" if run.missing else f"{recipe.training.lr:g}",
        ]
        numbers += [f"{tokens_per_s(study, run):,.0f}", f"{hours:.2f}", f"{hours * nodes:.2f}"]
        table.add_row(run.name, *numbers)
    table.add_section()
    table.add_row("total", *[""] * 6, f"{total:.2f}", f"{total * nodes:.2f}")
    return table
