"""Everything that a run prints or records, on rank 0 alone: console, metrics.jsonl, wandb, TensorBoard.

docs/metrics.md describes every column.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_prep.files import written_aside
from leviathan_ds import run_directory
from leviathan_ds.config import RunConfig
from leviathan_ds.training.wandb_run import WandbRun

# What the console shows of a step, and the digits that a reader wants; files and dashboards get every column.
_CONSOLE = {
    "loss": ".4f",
    "lr": ".2e",
    "grad_norm": ".3f",
    "tokens_per_s": ",.0f",
    "mfu": ".1%",
    "memory_gib": ".2f",
    "data_wait_share": ".1%",
    "skipped_steps": "d",  # 0 is no news
}


def format_value(key: str, value: float | None) -> str:
    """A metric for the console; None (a norm that DeepSpeed does not compute) stays visible as a dash."""
    return "-" if value is None else format(value, _CONSOLE.get(key, ".4f"))


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
        self._wandb = None
        if config.wandb != "off":
            self._wandb = WandbRun(run_dir, config, wandb_id, settings, self.say)
            self.wandb_id = self._wandb.id
        self._tensorboard = _start_tensorboard(run_dir, resume_step) if config.tensorboard else None
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
        shown = [key for key in _CONSOLE if key in summary and (key != "skipped_steps" or summary[key])]
        status = "  ".join(f"{key} {format_value(key, summary[key])}" for key in shown)
        minutes, seconds = divmod(int(remaining_s), 60)
        self.say(f"step {summary['step']:>6}  {status}  left {minutes}:{seconds:02d}")
        self._progress.update(self._task, completed=summary["step"])
        self._log(summary, summary["step"])

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Record what was measured between two steps: a validation, the generator's health."""
        if not self.enabled:
            return
        self._file.write({"step": step, **values})
        self.say(
            f"step {step:>6}  " + "  ".join(f"{key} {format_value(key, value)}" for key, value in values.items())
        )
        self._log(values, step)

    def close(self) -> None:
        if not self.enabled:
            return
        self._progress.stop()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._wandb is not None:
            self._wandb.log(values, step)
        if self._tensorboard is not None:
            for key, value in values.items():
                if value is not None and key != "step":
                    self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()


def _start_tensorboard(run_dir: Path, resume_step: int) -> Any:
    """Steps that are run again replace those of the first time; without a checkpoint that is all of them."""
    from torch.utils.tensorboard import SummaryWriter

    purge_step = resume_step + 1 if resume_step > 0 else 0
    return SummaryWriter(run_dir / run_directory.TENSORBOARD, purge_step=purge_step)
