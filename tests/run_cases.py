"""What the ranks of a worker pool run for test_run.py: whole jobs, from the recipe to the last checkpoint."""

from __future__ import annotations

import io
import math
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from distributed_cases import CONFIGS, Case

from data_prep.errors import UserError
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.parallel import topology

NAN_STEPS = (3, 7)
FREED_BEFORE = 5


def fill(folder: Path) -> None:
    """Leave no byte on the file system of a folder."""
    with (folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    with (folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"0")


def whole_run(
    case: Case,
    recipe_file: Path,
    run_dir: Path,
    options: tuple[str, ...] = (),
    full: str | None = None,
    nan: bool = False,
    stale: bool = False,
    saved_meanwhile: Path | None = None,
) -> dict[str, Any]:
    """Prepare and run a job; its exit code or its one-line error, and what this rank printed.

    Args:
        full: "start", or "steps": from the first validation until before step FREED_BEFORE. Of run_dir's disk.
        nan: rank 1's loss in NAN_STEPS.
        stale: rank 1 does not see the checkpoints that are listed.
        saved_meanwhile: a checkpoint that gets its place when `prepare` has looked for it.
    """
    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.training import job, loop
    from leviathan_ds.training import step as steps

    topology.initialize(case.tp)
    rank, count = topology.rank(), 0
    plain_loss, plain_step, plain_build = steps.mean_loss, loop.train_step, loop.build_engine

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return plain_loss(model, batch) * (math.nan if nan and rank == 1 and count in NAN_STEPS else 1.0)

    def train_step(*arguments: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if full == "steps" and rank == 0 and count == FREED_BEFORE:
            (run_dir.parent / "filler").unlink()
        return plain_step(*arguments)

    def build_engine(*arguments: Any) -> Any:
        if full == "steps" and rank == 0:
            fill(run_dir.parent)
        return plain_build(*arguments)

    result: dict[str, Any] = {"code": None, "error": None}
    printed = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(printed))
        stack.enter_context(mock.patch.object(steps, "mean_loss", loss))
        stack.enter_context(mock.patch.object(loop, "train_step", train_step))
        stack.enter_context(mock.patch.object(loop, "build_engine", build_engine))
        # It counts on there being no process group yet.
        stack.enter_context(mock.patch.object(engines, "check_values", lambda *_: None))
        if stale and rank == 1:
            stack.enter_context(mock.patch.object(run_directory, "checkpoints", lambda _: []))
        if full == "start":  # else the doctor refuses
            stack.enter_context(mock.patch.object(loop.examination, "require_fit", lambda _: None))
        try:
            arguments = ["--config", str(recipe_file), *options]
            recipe = recipes.parse(recipes.build_parser(""), arguments)[0]
            config = CONFIGS / f"{case.zero}.json"
            # Rank 0 first: where a process group exists already, megatron-core lets no other one build an index.
            if rank != 0:
                topology.barrier()
            checked = job.prepare(recipe, config, run_dir, topology.world_size())
            if rank == 0:
                topology.barrier()
            topology.barrier()  # nor may others find there in `prepare` what rank 0 does next
            if rank == 0 and full == "start":
                fill(run_dir.parent)
            if rank == 0 and saved_meanwhile is not None:
                saved_meanwhile.rename(run_dir / run_directory.CHECKPOINTS / saved_meanwhile.name)
            result["code"] = loop.run(checked)
        except UserError as error:
            result["error"] = str(error)
    return result | {"said": printed.getvalue().splitlines()}
