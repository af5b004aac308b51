"""The tables of a study: every number read from run directories, kept as CSV files that can be committed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from data_prep.errors import UserError
from leviathan_ds import run_directory
from leviathan_ds.accounting import count_parameters, flops_per_token
from leviathan_ds.studies.runner import (
    EVALUATION,
    MEASURES,
    diverged,
    finished,
    measured,
    read_summary,
    recipe_difference,
    tuned_tries,
)
from leviathan_ds.studies.study import Run, Study, run_name

Row = dict[str, Any]
RUNS, EVALUATIONS, FREQUENCY, EMBEDDINGS = "runs.csv", "evaluations.csv", "frequency.csv", "embeddings.json"
DONE, DIVERGED, MISSING = "done", "diverged", "missing"  # a planned run's status
FACTORS = {"input embedding": "input_lr_scale", "head": "head_lr_scale"}
"""Parts whose learning rate is a factor times the body's: the factor's column. A tied head has its table's."""
_INT, _FLOAT, _TEXT = pa.int64(), pa.float64(), pa.string()
_IDENTITY = {"kind": _TEXT, "arm": _TEXT, "size": _TEXT, "variant": _TEXT, "seed": _INT}
_PLAN = {
    "embedding": _TEXT,
    "hidden_size": _INT,
    "num_layers": _INT,
    "vocab_size": _INT,
    "parameters": _INT,
    "embedding_parameters": _INT,
    "body_parameters": _INT,
    "gflops_per_token": _FLOAT,
    "lr": _FLOAT,
    "input_lr_scale": _FLOAT,
    "head_lr_scale": _FLOAT,
    "precision": _TEXT,
}
_MEASURED = {
    "tokens": _INT,
    "epochs": _FLOAT,
    "val_loss": _FLOAT,
    "initial_val_loss": _FLOAT,
    "bits_per_byte": _FLOAT,
    "tokens_per_s": _FLOAT,
    "memory_gib": _FLOAT,
    "skipped_steps": _INT,
    "starts": _INT,
    "device": _TEXT,
    "commit": _TEXT,
    "data": _TEXT,
}
# Types by name and not by looks: a variant may be called 0.3, a commit may be all digits.
_TABLES = {
    RUNS: {**_IDENTITY, "status": _TEXT, "reason": _TEXT, **_PLAN, **_MEASURED},
    EVALUATIONS: {**_IDENTITY, "step": _INT, "tokens": _INT, "val_loss": _FLOAT},
    FREQUENCY: {
        **_IDENTITY,
        "decile": _INT,
        "ids": _INT,
        "training_share": _FLOAT,
        "share": _FLOAT,
        "loss": _FLOAT,
    },
}


def collect(study: Study, folder: Path, output: Path) -> list[Row]:
    """Write the tables of a study as it stands, and return that of the runs.

    runs.csv: a row a planned run, its status done, diverged or missing and why; evaluations.csv: a row a
    validation; frequency.csv: a row a run and decile of training frequency (evaluation/frequency.py);
    embeddings.json: what the first seed's embeddings look like. Raises UserError where no run has ended.
    """
    rows, evaluations, frequency, embeddings = [], [], [], []
    for run in study.runs(tuned_tries(study, folder)):
        run_dir = folder / run.name
        identity = {key: getattr(run, key) for key in _IDENTITY}
        status, reason = _status(run, run_dir)
        rows.append(identity | {"status": status, "reason": reason} | _plan(run))
        if status != DONE:
            continue
        rows[-1] |= _measured(run_dir)
        tokens_per_step = run.tokens // run.recipe.training.train_steps
        evaluations += [
            identity
            | {"step": line["step"], "tokens": line["step"] * tokens_per_step, "val_loss": line["val_loss"]}
            for line in run_directory.read_lines(run_dir / run_directory.METRICS)
            if line.get("val_loss") is not None
        ]
        if measured(run_dir):
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
    if all(row["status"] == MISSING for row in rows):
        raise UserError(f"{folder} holds no finished run of {study.name}; `study.py run` trains them")
    output.mkdir(parents=True, exist_ok=True)
    run_directory.write_text(output / EMBEDDINGS, json.dumps(embeddings) + "\n")
    for name, table in ((EVALUATIONS, evaluations), (FREQUENCY, frequency), (RUNS, rows)):
        with run_directory.written_aside(output / name) as file:
            csv.write_csv(pa.Table.from_pylist(table, pa.schema(_TABLES[name])), file)
    return rows


def name_of(row: Row) -> str:
    """The run's, of a row of any table."""
    return run_name(*(row[key] for key in _IDENTITY))


def _status(run: Run, run_dir: Path) -> tuple[str, str]:
    if run.missing is not None:
        return MISSING, "waits for a tuned learning rate"
    if (difference := recipe_difference(run, run_dir)) is not None:
        return MISSING, difference
    if diverged(run, run_dir):
        return DIVERGED, "no finite loss"
    return (DONE, "") if finished(run, run_dir) else (MISSING, "not finished")


def _plan(run: Run) -> Row:
    model, training = run.recipe.model, run.recipe.training
    count = count_parameters(model)
    scale = training.generator_lr_scale if model.embedding == "leviathan" else training.table_lr_scale
    head_scale = scale if model.embedding == "dense_tied" else training.head_lr_scale
    return {
        "embedding": model.embedding,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "parameters": count.total,
        "embedding_parameters": count.embedding,
        "body_parameters": count.body,
        "gflops_per_token": flops_per_token(model, run.recipe.data.sequence_length).total / 1e9,
        "lr": None if run.missing else training.lr,
        "input_lr_scale": None if run.missing else scale,
        "head_lr_scale": None if run.missing else head_scale,
        "precision": training.precision,
    }


def _measured(run_dir: Path) -> Row:
    summary = read_summary(run_dir)
    metrics = run_directory.read_lines(run_dir / run_directory.METRICS)
    starts = run_directory.read_lines(run_dir / run_directory.STARTS)
    data = starts[-1]["data"]
    return {
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
        "commit": ", ".join(dict.fromkeys(str(start["git"]) for start in starts)),
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
    """The rows of a table that `collect` wrote. Raises UserError where it is missing or not whole."""
    path, types = output / name, _TABLES[name]
    # An empty string is written in quotes, a missing value without.
    options = csv.ConvertOptions(column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False)
    try:
        table = csv.read_csv(str(path), convert_options=options)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; `study.py collect` writes it from the run directories") from None
    except pa.ArrowInvalid:
        table = pa.table({})
    if table.column_names != list(types):
        raise UserError(f"{path} is cut short or of another version; `study.py collect` writes it anew")
    return table.to_pylist()


def read_embeddings(output: Path) -> list[Row]:
    """What `collect` wrote of embeddings. Raises UserError where it is missing or not whole."""
    path = output / EMBEDDINGS
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        raise UserError(f"{path} is missing or cut short; `study.py collect` writes it") from None
