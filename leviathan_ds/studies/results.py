"""The tables of a study: every number read from run directories, kept as CSV files that can be committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from data_prep.errors import UserError
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.accounting import count_parameters, flops_per_token
from leviathan_ds.studies.runner import EVALUATION, MEASURES, changed, read_summary, tuned_rates
from leviathan_ds.studies.study import Study

Row = dict[str, Any]
RUNS, EVALUATIONS, FREQUENCY, EMBEDDINGS = "runs.csv", "evaluations.csv", "frequency.csv", "embeddings.json"


def collect(study: Study, folder: Path, output: Path) -> list[Row]:
    """Write the tables of all runs that have ended by the study's recipes, and return that of the runs.

    runs.csv: a row a run; evaluations.csv: a row a validation; frequency.csv: a row a run and decile of training
    frequency (evaluation/frequency.py); embeddings.json: what the first seed's embeddings look like. Raises
    UserError without any run.
    """
    rows, evaluations, frequency, embeddings = [], [], [], []
    for run in study.runs(tuned_rates(study, folder)):
        run_dir = folder / run.name
        if "final_val_loss" not in read_summary(run_dir) or changed(run, run_dir):
            continue
        identity = {key: getattr(run, key) for key in ("kind", "arm", "size", "variant", "seed")}
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
    run_directory.write_text(output / EMBEDDINGS, json.dumps(embeddings) + "\n")
    return rows


def _row(run_dir: Path) -> Row:
    recipe = recipes.load(run_dir / run_directory.RECIPE)
    summary = read_summary(run_dir)
    metrics = run_directory.read_lines(run_dir / run_directory.METRICS)
    starts = run_directory.read_lines(run_dir / run_directory.STARTS)
    count = count_parameters(recipe.model)
    data = starts[-1]["data"]
    return {
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
        "tokens_per_s": summary["tokens_per_s"],
        "memory_gib": max((line["memory_gib"] for line in metrics if line.get("memory_gib")), default=None),
        "skipped_steps": summary["skipped_steps"],
        "starts": len(starts),
        "device": f"{starts[-1]['world_size']} × {starts[-1]['device']}",
        "commit": starts[-1]["git"],
        "data": " ".join(each["fingerprint"][:16] for each in data),
    }


def read_table(output: Path, name: str) -> list[Row]:
    """The rows of a table that `collect` wrote, [] where there is none."""
    path = output / name
    if name == RUNS and not path.is_file():
        raise UserError(f"{path} is missing; `study.py collect` writes it from the run directories")
    return csv.read_csv(str(path)).to_pylist() if path.is_file() else []


def read_embeddings(output: Path) -> list[Row]:
    path = output / EMBEDDINGS
    return json.loads(path.read_text()) if path.is_file() else []
