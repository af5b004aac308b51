"""Where a run keeps its files, and how a finished checkpoint is told from an unfinished one.

RUN/recipe.yaml              the recipe as it was resolved; refuses another one
RUN/ds_config.json           DeepSpeed's configuration as it was filled in
RUN/tokenizer.model          the tokenizer of its data
RUN/starts.jsonl             one line per start or resume: host, devices, versions, commit, data
RUN/wandb_id                 of the run's one wandb run, where wandb is on
RUN/tensorboard/             where run.tensorboard is on
RUN/traces/                  torch profiler traces of run.profile_steps
RUN/metrics.jsonl            one line per step and per validation
RUN/summary.json             what the run reached
RUN/checkpoints/step_00000100/     written aside, renamed when whole
    manifest.json            sizes of all files: its presence after the rename means complete
    recipe.yaml              as above
    trainer_state.json       step, consumed samples, data, parallel layout, wandb id
    weights_tp00.safetensors weights of each tensor-parallel rank, whatever the ZeRO stage
    ...                      DeepSpeed's own files: optimizer states, random states
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.files import written_aside

RECIPE, DS_CONFIG, TOKENIZER = "recipe.yaml", "ds_config.json", "tokenizer.model"
METRICS, SUMMARY, WANDB_ID = "metrics.jsonl", "summary.json", "wandb_id"
FAULTS = "faults.jsonl"
STARTS, TENSORBOARD, TRACES = "starts.jsonl", "tensorboard", "traces"
CHECKPOINTS, MANIFEST, TRAINER_STATE = "checkpoints", "manifest.json", "trainer_state.json"


@dataclass(frozen=True)
class TrainerState:
    """What the trainer must know to go on, beside the engine's own state."""

    step: int
    consumed_samples: int
    layout: dict[str, Any]  # tensor and data parallel sizes, ZeRO stage, precision
    data_fingerprints: list[str]
    wandb_id: str | None


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state in a complete checkpoint."""
    return TrainerState(**json.loads((checkpoint / TRAINER_STATE).read_text()))


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def checkpoints(run_dir: Path) -> list[tuple[Path, str | None]]:
    """Every checkpoint of a run, oldest first, with why it cannot be used (None: it can)."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    named = sorted(path for path in folder.iterdir() if re.fullmatch(r"step_\d{8,}", path.name))
    return [(path, incompleteness(path)) for path in named]


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints whose files are all there with the sizes that were written, oldest first."""
    return [path for path, reason in checkpoints(run_dir) if reason is None]


def incompleteness(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if it can."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())["bytes"]
    except (OSError, ValueError, KeyError) as error:
        return f"{checkpoint / MANIFEST}: {error}"
    for name, size in sizes.items():
        try:
            found = (checkpoint / name).stat().st_size
        except OSError:
            return f"{checkpoint / name}: missing"
        if found != size:
            return f"{checkpoint / name}: {found} bytes, {size} were written"
    return None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a user means by a run directory (its last complete one) or by its own folder.

    Raises UserError naming the path when there is none.
    """
    if (path / TRAINER_STATE).is_file():
        reason = incompleteness(path)
        if reason is not None:
            raise UserError(f"the checkpoint {path} is not complete ({reason}); choose another one")
        return path
    complete = complete_checkpoints(path)
    if not complete:
        raise UserError(f"{path} holds no complete checkpoint; give a run directory or one of its checkpoints")
    return complete[-1]


def run_of(checkpoint: Path) -> Path:
    """The run directory that a checkpoint lies in."""
    return checkpoint.resolve().parent.parent


def write_text(path: Path, content: str) -> None:
    """Write a small text file so that a reader sees the old one or the new one, never a part."""
    with written_aside(path) as file:
        file.write(content.encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, [] without one. Half a line, left by a kill, is passed over."""
    objects = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            objects.append(json.loads(line))
        except ValueError:
            continue
    return [each for each in objects if isinstance(each, dict)]


def update_summary(run_dir: Path, **values: Any) -> dict[str, Any]:
    """Merge values into RUN/summary.json and return it."""
    path = run_dir / SUMMARY
    summary = json.loads(path.read_text()) if path.is_file() else {}
    summary.update(values)
    write_text(path, json.dumps(summary, indent=2) + "\n")
    return summary
