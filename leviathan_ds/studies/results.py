"""The tables of a study: every number read from run directories, kept as CSV files that can be committed."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from data_prep.errors import UserError
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.accounting import count_parameters, flops_per_token
from leviathan_ds.studies.runner import EVALUATION, MEASURES, changed, read_summary, tuned_rates
from leviathan_ds.studies.study import Run, Study

Row = dict[str, Any]
RUNS, EVALUATIONS, FREQUENCY, EMBEDDINGS = "runs.csv", "evaluations.csv", "frequency.csv", "embeddings.json"
MISSING = "missing.csv"
_IDENTITY = ("kind", "arm", "size", "variant", "seed")
# Whatever they look like: a variant may be called 0.3, a commit may be all digits.
_STRINGS = (*_IDENTITY[:-1], "commit", "data", "device", "precision", "embedding", "reason")


def collect(study: Study, folder: Path, output: Path) -> list[Row]:
    """Write the tables of all runs that have ended by the study's recipes, and return that of the runs.

    runs.csv: a row a run; missing.csv: a row a planned run that is not there, and why; evaluations.csv: a row a
    validation; frequency.csv: a row a run and decile of training frequency (evaluation/frequency.py);
    embeddings.json: what the first seed's embeddings look like. Raises UserError without any run.
    """
    rows, missing, evaluations, frequency, embeddings = [], [], [], [], []
    for run in study.runs(tuned_rates(study, folder)):
        run_dir = folder / run.name
        identity = {key: getattr(run, key) for key in _IDENTITY}
        if (reason := _why_missing(run, run_dir)) is not None:
            missing.append(identity | {"reason": reason})
            continue
        rows.append(identity | _row(run_dir))
        tokens_per_step = run.tokens // run.recipe.training.train_steps
        evaluations += [
            identity
            | {"step": line["step"], "tokens": line["step"] * tokens_per_step, "val_loss": line["val_loss"]}
            for line in run_directory.read_lines(run_dir / run_directory.METRICS)
            if line.get("val_loss") is not None
        ]
        if (run_dir / MEASURES).is_file():
            measures = json.loads((run_dir / MEASURES).read_text())
            (evaluation,) = json.loads((run_dir / EVALUATION).read_text())["models"]
            frequency += [
                identity
                | {"decile": decile}
                | {key: each[key] for key in ("ids", "training_share", "share", "loss")}
                for decile, each in enumerate(evaluation["deciles"], 1)
            ]
            if run.kind == "iso_body" and run.seed == study.experiments["iso_body"].seeds[0]:
                embeddings.append(identity | measures)
    if not rows:
        raise UserError(f"{folder} holds no finished run of {study.name}; `study.py run` trains them")
    output.mkdir(parents=True, exist_ok=True)
    for name, table in ((RUNS, rows), (EVALUATIONS, evaluations), (FREQUENCY, frequency)):
        if table:
            csv.write_csv(pa.Table.from_pylist(table), str(output / name))
    columns = pa.schema({key: pa.string() for key in (*_IDENTITY, "reason")} | {"seed": pa.int64()})
    csv.write_csv(pa.Table.from_pylist(missing, columns), str(output / MISSING))
    run_directory.write_text(output / EMBEDDINGS, json.dumps(embeddings) + "\n")
    return rows


def _why_missing(run: Run, run_dir: Path) -> str | None:
    """Why a planned run has no row among the runs; None if it has one."""
    if run.missing is not None:
        return "waits for a tuned learning rate"
    if (difference := changed(run, run_dir)) is not None:
        return difference
    loss = read_summary(run_dir).get("final_val_loss")
    if loss is None:
        return "not finished"
    return None if math.isfinite(loss) else f"diverged: final loss {loss}"


def _row(run_dir: Path) -> Row:
    recipe = recipes.load(run_dir / run_directory.RECIPE)
    summary = read_summary(run_dir)
    metrics = run_directory.read_lines(run_dir / run_directory.METRICS)
    starts = run_directory.read_lines(run_dir / run_directory.STARTS)
    count = count_parameters(recipe.model)
    data = starts[-1]["data"]
    return {
        "embedding": recipe.model.embedding,
        "hidden_size": recipe.model.hidden_size,
        "num_layers": recipe.model.num_layers,
        "vocab_size": recipe.model.vocab_size,
        "parameters": count.total,
        "embedding_parameters": count.embedding,
        "body_parameters": count.body,
        "gflops_per_token": flops_per_token(recipe.model, recipe.data.sequence_length).total / 1e9,
        "lr": recipe.training.lr,
        "precision": recipe.training.precision,
        "tokens": summary["consumed_tokens"],
        "epochs": summary["consumed_tokens"] / sum(each["tokens"] for each in data),
        "val_loss": summary["final_val_loss"],
        "initial_val_loss": summary["initial_val_loss"],
        "bits_per_byte": summary["bits_per_byte"],
        "tokens_per_s": _median_speed(metrics, starts) or summary["tokens_per_s"],
        "memory_gib": max((line["memory_gib"] for line in metrics if line.get("memory_gib")), default=None),
        "skipped_steps": summary["skipped_steps"],
        "starts": len(starts),
        "device": f"{starts[-1]['world_size']} × {starts[-1]['device']}",
        "commit": starts[-1]["git"],
        "data": " ".join(each["fingerprint"][:16] for each in data),
    }


def _median_speed(metrics: list[Row], starts: list[Row]) -> float | None:
    """Tokens per second of the logged intervals, without the first one of each start, which warms up.

    The summary's rate is that of the last start alone, which may have had a few steps left. None without any.
    """
    logged = {line["step"]: line["tokens_per_s"] for line in metrics if line.get("tokens_per_s")}
    firsts = {min((step for step in logged if step > start.get("first_step", 0)), default=0) for start in starts}
    rates = [rate for step, rate in logged.items() if step not in firsts]
    return statistics.median(rates) if rates else None


def read_table(output: Path, name: str) -> list[Row]:
    """The rows of a table that `collect` wrote, [] where there is none. Names and the like are strings."""
    path = output / name
    if name == RUNS and not path.is_file():
        raise UserError(f"{path} is missing; `study.py collect` writes it from the run directories")
    if not path.is_file():
        return []
    # An empty string is written in quotes, a missing value without.
    options = csv.ConvertOptions(
        column_types={key: pa.string() for key in _STRINGS},
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    return csv.read_csv(str(path), convert_options=options).to_pylist()


def read_embeddings(output: Path) -> list[Row]:
    path = output / EMBEDDINGS
    return json.loads(path.read_text()) if path.is_file() else []
