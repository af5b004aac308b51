"""Run directories of a study as its trainer would leave them, with losses that a test plants."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.studies.runner import EVALUATION, MEASURES
from leviathan_ds.studies.study import Run, Study, load

STUDY: dict[str, Any] = {
    "recipe": {
        "model": {"vocab_size": 32768, "num_attention_heads": 2, "generator": {"seed_size": 16, "num_heads": 2}},
        "data": {"prefixes": ["text"], "sequence_length": 64, "num_workers": 0},
        "training": {"micro_batch_size": 2, "global_batch_size": 4, "warmup_steps": 2, "precision": "fp32"},
    },
    "tokens": 10_000,
    "arms": {kind: {"model": {"embedding": kind}} for kind in ("dense_tied", "dense_untied", "leviathan")},
    "sizes": {f"d{size}": {"model": {"hidden_size": size, "num_layers": 2}} for size in (32, 64, 96, 128)},
    "experiments": {
        "learning_rate": {
            "sizes": ["d64"],
            "variants": {f"lr{lr}": {"training": {"lr": lr}} for lr in (1e-3, 3e-3)},
        },
        "iso_body": {"seeds": [1, 2]},
        "isoparametric": {"arms": ["leviathan"], "seeds": [1, 2]},
        "ablation": {
            "arms": ["leviathan"],
            "sizes": ["d64"],
            "variants": {"as_is": {}, "rank8": {"model": {"generator": {"rank": 8}}}},
        },
    },
}


def write_study(folder: Path, **changes: Any) -> Study:
    """STUDY with other keys, written and loaded."""
    path = folder / "planted.yaml"
    path.write_text(yaml.safe_dump(STUDY | changes))
    return load(path)


def finish(
    run: Run, run_dir: Path, loss: float, rare_loss: float | None = None, tokens_per_s: float = 1e3
) -> None:
    """A finished, measured run whose validation loss fell to `loss` at the last of ten evaluations."""
    steps, per_step = run.recipe.training.train_steps, run.tokens // run.recipe.training.train_steps
    resolved = replace(
        run.recipe, data=replace(run.recipe.data, tokenizer_fingerprint="f" * 64)
    )  # as a start does
    _write(run_dir / run_directory.RECIPE, recipes.to_yaml(resolved))
    summary = {"final_val_loss": loss, "initial_val_loss": 8.0, "bits_per_byte": loss / 3, "steps": steps}
    summary |= {"tokens_per_s": tokens_per_s, "skipped_steps": 0, "consumed_tokens": steps * per_step}
    _write(run_dir / run_directory.SUMMARY, json.dumps(summary))
    curve = [{"step": round(steps * i / 10), "val_loss": loss + 2 * (1 - i / 10)} for i in range(11)]
    lines = [*curve, {"step": steps, "loss": loss, "memory_gib": 0.5}]
    _write_lines(run_dir / run_directory.METRICS, lines)
    data = [{"tokens": 10**6, "fingerprint": "f" * 64}]
    _write_lines(run_dir / run_directory.STARTS, [{"world_size": 1, "device": "cpu", "git": "abc", "data": data}])
    deciles = [{"ids": 10, "training_share": 0.1, "share": 0.1, "loss": loss} for _ in range(10)]
    deciles[-1]["loss"] = rare_loss or loss
    _write(run_dir / EVALUATION, json.dumps({"models": [{"deciles": deciles}]}))
    width = run.recipe.model.hidden_size
    measures: dict[str, Any] = {
        "singular_values": [1 / (1 + i) for i in range(width)],
        "effective_rank": width / 2,
    }
    measures |= {
        "ids_seen": 9,
        "continuity": [[0.5, None, 1.0]],
        "neighbours": {"the": ["a", "|"], "Monday": None},
    }
    if run.arm == "leviathan":
        points = [[math.cos(i), math.sin(i)] for i in range(40)]
        usage = {"knots_used": 0.9, "knot_usage": [0.25] * 4}
        measures["generator"] = usage | {"map": points, "map_counts": list(range(1, 41))}
    _write(run_dir / MEASURES, json.dumps(measures))


def finish_all(study: Study, folder: Path, loss: Callable[[Run], float], **options: Any) -> None:
    """`finish` every run, the learning rates first, as run_study would order them."""
    from leviathan_ds.studies.runner import tuned_tries

    for pattern in ("learning_rate/*", "*"):
        for run in study.runs(tuned_tries(study, folder), pattern):
            finish(run, folder / run.name, loss(run), **{key: value(run) for key, value in options.items()})


def _write(path: Path, text: str) -> None:
    """Without the product's fsync, of which hundreds would take seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    _write(path, "".join(json.dumps(line) + "\n" for line in lines))
