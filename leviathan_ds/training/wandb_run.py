"""The one wandb run of a job, over all its resumes; whatever happens to wandb, training goes on."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leviathan_ds import run_directory
from leviathan_ds.config import RunConfig

# The longest that a start and an end wait for wandb's server. Between them nothing waits: wandb's own process
# writes to the disk and uploads.
TIMEOUT_S = 30


class WandbRun:
    """Values to wandb, always with their step: an offline run that is resumed would count from 0 again.

    Args:
        config: its `wandb` is "online" or "offline". A server that cannot be reached in TIMEOUT_S makes this start
            offline; `wandb sync` uploads it later.
        wandb_id: from a checkpoint, or None. The id in the run directory comes first.
        settings: wandb's "config" of the run.
        say: where a line about trouble goes.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        wandb_id: str | None,
        settings: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        # On the disk before the run starts: a job killed before its first checkpoint goes on in the same run too.
        remembered = run_dir / run_directory.WANDB_ID
        if remembered.is_file():
            wandb_id = remembered.read_text().strip()
        self.id = wandb_id or secrets.token_hex(4)
        self._run = None
        try:
            run_directory.write_text(remembered, self.id + "\n")
        except OSError as error:
            say(f"wandb did not start and is off until the next start: {_one_line(error)}")
        else:
            self._run = _init(run_dir, config, self.id, settings, say)

    def log(self, values: dict[str, Any], step: int) -> None:
        self._guarded(
            lambda run: run.log({key: value for key, value in values.items() if value is not None}, step=step)
        )

    def close(self) -> None:
        self._guarded(_finish)
        self._run = None

    def _guarded(self, call: Callable[[Any], None]) -> None:
        """Its service is a process that can crash; then the rest of this start is not in wandb."""
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:
            self._run = None
            self._say(f"wandb failed and is off until the next start: {_one_line(error)}")


def _init(
    run_dir: Path, config: RunConfig, wandb_id: str, settings: dict[str, Any], say: Callable[[str], None]
) -> Any:
    # Its reports of its own errors would hold up the exit of a process without a network, 20 s and more.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    def init(mode: str) -> Any:
        return wandb.init(
            project=config.wandb_project,
            name=run_dir.name,
            dir=str(run_dir),
            id=wandb_id,
            resume="allow",
            mode=mode,  # pyright: ignore[reportArgumentType]
            config=settings,
            settings=wandb.Settings(
                silent=True,
                init_timeout=TIMEOUT_S,
                finish_timeout=TIMEOUT_S,
                login_timeout=TIMEOUT_S,
                x_transaction_log_flush_interval=1.0,  # its process dies with this one: 15 s would be lost
            ),
        )

    try:
        try:
            return init(config.wandb)
        except Exception as error:
            if config.wandb == "offline":
                raise
            say(
                f"wandb is offline until the next start: {_one_line(error)}; "
                f"upload later with `wandb sync {run_dir}/wandb/offline-run-*`"
            )
            wandb.teardown()  # its service holds the id for the run that failed
            return init("offline")
    except Exception as error:
        say(f"wandb did not start and is off until the next start: {_one_line(error)}")
        return None


def _finish(run: Any) -> None:
    import wandb

    run.finish()
    # `finish` can return before wandb's process has written its file; this waits for that process.
    wandb.teardown()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())}"
