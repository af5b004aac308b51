"""Everything that a run prints or records, on rank 0 alone: console, metrics.jsonl, wandb."""

from __future__ import annotations

import json
import math
import secrets
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_prep.files import written_aside
from leviathan_ds import run_directory
from leviathan_ds.config import RunConfig

# Digits that a reader of the console wants.
_FORMATS = {
    "loss": ".4f",
    "lr": ".2e",
    "grad_norm": ".3f",
    "tokens_per_s": ",.0f",
    "val_loss": ".4f",
    "mfu": ".1%",
}


def format_value(key: str, value: float | None) -> str:
    """A metric for the console; None (a norm that DeepSpeed does not compute) stays visible as a dash."""
    if value is None:
        return "-"
    return format(value, _FORMATS.get(key, ".6g"))


class MetricsFile:
    """metrics.jsonl: one object per step, appended; at a resume, lines of steps that are run again go."""

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = []
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    # From the start nothing stays, not even step 0: its validation is run again.
                    if resume_step > 0 and json.loads(line)["step"] <= resume_step:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    continue  # half a line, written while the run was killed
        with written_aside(path) as file:
            file.write("".join(kept).encode())
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        finite = {
            key: (None if isinstance(value, float) and not math.isfinite(value) else value)
            for key, value in record.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Metrics:
    """The sinks of one run. On other ranks than 0 every method does nothing.

    Args:
        enabled: rank 0.
        wandb_id: the run's id from the checkpoint, or None for a new one: one wandb run per job, over all
            resumes.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        train_steps: int,
        resume_step: int,
        wandb_id: str | None,
        enabled: bool,
        settings: dict[str, Any],
    ) -> None:
        self.enabled = enabled
        self.wandb_id = wandb_id
        if not enabled:
            return
        self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._file = MetricsFile(run_dir / run_directory.METRICS, resume_step)
        self._wandb = _start_wandb(run_dir, config, wandb_id, settings)
        if self._wandb is not None:
            self.wandb_id = self._wandb.id
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=train_steps, completed=resume_step)
        self._progress.start()

    def say(self, message: str) -> None:
        """One line for the reader."""
        if self.enabled:
            self._console.print(message, markup=False)

    def steps(self, records: list[dict[str, Any]], summary: dict[str, Any], remaining_s: float) -> None:
        """Record every step since the last call, and show their summary."""
        if not self.enabled:
            return
        for record in records:
            self._file.write(record)
        status = "  ".join(f"{key} {format_value(key, summary[key])}" for key in summary if key != "step")
        minutes, seconds = divmod(int(remaining_s), 60)
        self.say(f"step {summary['step']:>6}  {status}  left {minutes}:{seconds:02d}")
        self._progress.update(self._task, completed=summary["step"])
        self._log_wandb(summary, summary["step"])

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Record one validation."""
        if not self.enabled:
            return
        self._file.write({"step": step, **values})
        self.say(f"step {step:>6}  " + "  ".join(f"{key} {value:.4f}" for key, value in values.items()))
        self._log_wandb(values, step)

    def close(self) -> None:
        if not self.enabled:
            return
        self._progress.stop()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _log_wandb(self, values: dict[str, Any], step: int) -> None:
        if self._wandb is not None:
            # Always with the step: an offline run that is resumed would count from 0 again.
            self._wandb.log({key: value for key, value in values.items() if value is not None}, step=step)


def _start_wandb(run_dir: Path, config: RunConfig, wandb_id: str | None, settings: dict[str, Any]) -> Any:
    """The job's one wandb run. Its id is on the disk before the run starts, so that even a job killed before
    its first checkpoint goes on in the same run."""
    if config.wandb == "off":
        return None
    import wandb

    remembered = run_dir / run_directory.WANDB_ID
    if remembered.is_file():
        wandb_id = remembered.read_text().strip()
    wandb_id = wandb_id or secrets.token_hex(4)
    run_directory.write_text(remembered, wandb_id + "\n")
    return wandb.init(
        project=config.wandb_project,
        name=run_dir.name,
        dir=str(run_dir),
        id=wandb_id,
        resume="allow",
        mode=config.wandb,
        config=settings,
        settings=wandb.Settings(silent=True),
    )
