"""Everything that a run prints or records, on rank 0 alone: console, metrics.jsonl, wandb, TensorBoard.

docs/metrics.md describes every column. None of them ends a run: what a full disk refuses is said once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_prep.files import naming
from leviathan_ds import run_directory
from leviathan_ds.config import RunConfig
from leviathan_ds.training.checkpoint_writer import attempt
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


class LinesFile:
    """A JSON-lines file that grows: each object is on the disk at once, or waits in memory until it finds room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = None
        self._waiting = bytearray()  # may begin within a line: its first part was the last that found room

    def add(self, *records: dict[str, Any]) -> None:
        """To be written by `flush`. NaN and infinities become null."""
        for record in records:
            finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
            self._waiting += json.dumps(finite).encode() + b"\n"

    def flush(self) -> None:
        """Write what waits. Raises OSError with the file's name; what was not written still waits."""
        with naming(self._path):
            while self._waiting:
                if self._file is None:
                    self._file = self._path.open("ab", buffering=0)
                del self._waiting[: self._file.write(self._waiting)]

    def close(self) -> None:
        """Raises OSError as `flush` does."""
        self.flush()
        if self._file is not None:
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
        self._run_dir = run_dir
        self._failing: set[str] = set()
        self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._lines = {name: LinesFile(run_dir / name) for name in (run_directory.METRICS, run_directory.FAULTS)}
        self._summary: dict[str, Any] = {}
        self._wandb = None
        if config.wandb != "off":
            self._wandb = WandbRun(run_dir, config, wandb_id, settings, self.say)
            self.wandb_id = self._wandb.id
        self._tensorboard: Any = None
        if config.tensorboard:
            self._on_tensorboard(lambda: self._start_tensorboard(resume_step))
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
            with suppress(OSError):  # a log on a full disk: there is nobody to tell
                self._console.print(message, markup=False)

    def steps(self, records: list[dict[str, Any]], summary: dict[str, Any], remaining_s: float) -> None:
        """Record every step since the last call, and show their summary."""
        if not self.enabled:
            return
        self._write_lines(run_directory.METRICS, *records)
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
        self._write_lines(run_directory.METRICS, {"step": step, **values})
        self.say(
            f"step {step:>6}  " + "  ".join(f"{key} {format_value(key, value)}" for key, value in values.items())
        )
        self._log(values, step)

    def fault(self, entry: dict[str, Any]) -> None:
        """Record a skipped step, a rollback or a stop in faults.jsonl."""
        if self.enabled:
            self._write_lines(run_directory.FAULTS, entry)

    def summarize(self, **values: Any) -> None:
        """Merge values into summary.json, with those that found no room before."""
        if self.enabled:
            self._summary |= values
            self._tries(
                run_directory.SUMMARY,
                lambda: run_directory.update_summary(self._run_dir, **self._summary),
                "it is tried again at the end",
            )

    def close(self) -> None:
        if not self.enabled:
            return
        self._progress.stop()
        for name, file in self._lines.items():
            self._tries(f"the end of {name}", file.close, "it is lost")
        if self._tensorboard is not None:
            self._on_tensorboard(self._tensorboard.close)
        if self._wandb is not None:
            self._wandb.close()

    def _write_lines(self, name: str, *records: dict[str, Any]) -> None:
        self._lines[name].add(*records)
        self._tries(name, self._lines[name].flush, "its lines wait in memory")

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._wandb is not None:
            self._wandb.log(values, step)
        if self._tensorboard is not None:
            self._on_tensorboard(lambda: self._write_scalars(values, step))

    def _write_scalars(self, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            if value is not None and key != "step":
                self._tensorboard.add_scalar(key, value, step)
        self._tensorboard.flush()

    def _start_tensorboard(self, resume_step: int) -> None:
        """Steps that are run again replace those of the first time; without a checkpoint that is all of them."""
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resume_step + 1 if resume_step > 0 else 0
        self._tensorboard = SummaryWriter(self._run_dir / run_directory.TENSORBOARD, purge_step=purge_step)

    def _on_tensorboard(self, write: Callable[[], object]) -> None:
        """Its writer does not recover from a failure."""
        if not self._tries(run_directory.TENSORBOARD, write, "it is off until the next start"):
            self._tensorboard = None

    def _tries(self, name: str, write: Callable[[], object], consequence: str) -> bool:
        """Whether a file could be written. Where it could not, that is said once until it can be again."""
        reason = attempt(write)
        if reason is None:
            self._failing.discard(name)
        elif name not in self._failing:
            self._failing.add(name)
            self.say(f"{name} could not be written: {reason}; {consequence}, and the run goes on")
        return reason is None
