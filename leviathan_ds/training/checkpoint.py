"""Checkpoints: DeepSpeed's engine state, the weights as plain safetensors, and the trainer's own state.

Written into a folder with a temporary name and committed by one rename, so a kill at any moment leaves the
last complete checkpoint in place and nothing that could be taken for one. The ranks copy their state to the
host's memory and go on; a thread of each writes its files, and rank 0's commits when all have written.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from data_prep.errors import UserError, one_line
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import Recipe
from leviathan_ds.model.weights import shard_file
from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel import topology
from leviathan_ds.parallel.agreement import of_all_ranks, on_rank_0
from leviathan_ds.run_directory import TrainerState
from leviathan_ds.training import checkpoint_writer as writer
from leviathan_ds.training import reshard
from leviathan_ds.training.checkpoint_engine import CollectingEngine, load_plain

_RANDOM_STATES = "random_states_rank{}.pt"
_VISIBLE_WITHIN_S = 45.0  # NFS clients believe for 30 s that a file which they have looked for is not there


class Checkpoints:
    """The saves of one run, one at a time. All methods are collective over all ranks.

    Args:
        say: prints a line; called on rank 0.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        run_dir: Path,
        recipe: Recipe,
        say: Callable[[str], None] = print,
    ) -> None:
        self._engine, self._run_dir, self._recipe, self._say = engine, run_dir, recipe, say
        # DeepSpeed would copy scripts beside the checkpoints, on rank 0 alone, whose failure nobody could share.
        engine._copy_recovery_script = lambda save_path: None
        self._group = topology.background_group()
        self._memory = writer.HostMemory()
        self._thread: Thread | None = None
        self._failure: str | None = None

    def save(self, state: TrainerState, rotates: bool = True) -> None:
        """Begin to write a checkpoint of this moment; the next step may follow at once.

        rotates: whether older ones may go for it.

        A checkpoint that cannot be written is reported, and the run goes on; with run.stop_on_failed_save it is
        a UserError, on all ranks alike, here or at the next call.
        """
        self.wait()
        final = self._run_dir / run_directory.CHECKPOINTS / run_directory.checkpoint_name(state.step)
        refused = writer.attempt(lambda: writer.make_temporary_folder(final)) if topology.rank() == 0 else None
        self._failure = self._first_of_all_ranks(refused)
        if self._failure is None:
            content = self._content(final)
            if self._recipe.run.async_save:
                # No daemon: when the training fails, the interpreter still waits for the save.
                self._thread = Thread(target=self._write, args=(final, content, state, rotates), name="checkpoint")
                self._thread.start()
                return
            self._write(final, content, state, rotates)
            self._memory = writer.HostMemory()
        else:
            self._report(state.step)
        self._check_stop()

    @property
    def running(self) -> bool:
        """Whether a save is being written by this rank beside the training."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until no save is running. Raises UserError as `save` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._check_stop()

    def finish(self) -> None:
        """Wait for the last save. Raises UserError on all ranks alike when it failed."""
        self.wait()
        if self._failure is not None:
            raise UserError(
                f"the last checkpoint could not be written: {self._failure}; make room and start the same command "
                "again to go on from the one before"
            )

    def _check_stop(self) -> None:
        if self._recipe.run.stop_on_failed_save and self._failure is not None:
            raise UserError(
                f"a checkpoint could not be written: {self._failure}; make room and start the same command again "
                "to go on from the one before"
            )

    def _content(self, final: Path) -> dict[str, Any]:
        """This rank's files by name; in memory of their own where the training goes on while they are written."""
        self._memory.rewind()
        temporary = writer.temporary_folder(final)
        collector = _collect_from(self._engine)
        self._engine.save_checkpoint(str(final.parent), tag=temporary.name, save_latest=False)
        files = {str(path.relative_to(temporary)): state for path, state in collector.files.items()}
        files[_RANDOM_STATES.format(f"{topology.rank():05d}")] = _random_states()
        if self._recipe.run.async_save:
            files = self._memory.hold_all(files)
        if (weights := self._weights()) is not None:
            files[shard_file(topology.tensor_parallel_rank())] = weights
        return files

    def _weights(self) -> dict[str, torch.Tensor] | None:
        writes = topology.data_parallel_rank() == 0
        weights = {}
        for name, whole in engines.named_local_parameters(self._engine):
            if writes:
                weights[name] = self._memory.hold(whole)
        return weights if writes else None

    def _write(self, final: Path, content: dict[str, Any], state: TrainerState, rotates: bool) -> None:
        """Write this rank's files; rank 0 commits when all ranks have. Collective, in any one thread."""
        try:
            self._failure = self._written(final, content, state, rotates)
        except Exception as error:  # another rank is gone, and so is this run
            self._failure = one_line(error)
        self._report(state.step)

    def _written(self, final: Path, content: dict[str, Any], state: TrainerState, rotates: bool) -> str | None:
        files: dict[str, tuple[int, int]] = {}

        def write_files() -> None:
            for name, value in content.items():
                write = writer.write_weights if name.endswith(".safetensors") else writer.write_pickle
                files[name] = write(writer.temporary_folder(final) / name, value)

        def commit() -> None:
            texts = {
                run_directory.RECIPE: recipes.to_yaml(self._recipe),
                run_directory.TRAINER_STATE: state.to_json(),
            }
            writer.commit(final, {name: found for rank in ranks for name, found in rank[0].items()}, texts)

        mine = writer.attempt(write_files)
        ranks = of_all_ranks((files, mine), self._group)
        failure = next((failed for _, failed in ranks if failed is not None), None)
        if topology.rank() == 0:
            failure = failure or writer.attempt(commit)
            if failure is None and rotates:
                every = self._recipe.run
                kept = (every.keep_checkpoints, every.keep_every_steps)
                if left := writer.attempt(lambda: writer.rotate(self._run_dir, *kept)):
                    self._say(f"an old checkpoint could not be removed: {left}")
            if failure is not None:
                shutil.rmtree(writer.temporary_folder(final), ignore_errors=True)
        return self._first_of_all_ranks(failure)

    def _report(self, step: int) -> None:
        if self._failure is not None and topology.rank() == 0:
            good = [path.name for path in run_directory.complete_checkpoints(self._run_dir)]
            self._say(
                f"the checkpoint of step {step} could not be written: {self._failure}; "
                + (f"{good[-1]} is the last good one" if good else "there is none yet")
            )

    def _first_of_all_ranks(self, failure: str | None) -> str | None:
        return next((found for found in of_all_ranks(failure, self._group) if found is not None), None)


def last_good(run_dir: Path, verify: bool, last_step: float = math.inf) -> tuple[Path | None, tuple[str, ...]]:
    """The last checkpoint that can be used, up to a step, and why later ones cannot. Collective.

    Rank 0 looks for it, for all. With `verify` the ranks compare the checksums, each file by one of them; what is
    damaged is renamed (`run_directory.set_aside`) and no checkpoint from then on. Raises UserError on all ranks
    alike when one of them does not see what rank 0 sees, or the disk refuses.
    """

    def newest_first() -> list[tuple[Path, str | None]]:
        found = run_directory.checkpoints(run_dir)
        return [(path, reason) for path, reason in reversed(found) if run_directory.step_of(path) <= last_step]

    passed_over = []
    for path, reason in on_rank_0(newest_first, f"{run_dir} cannot be read"):
        if reason is None:
            _wait_for_all_to_see(path)
            reason = damage(path) if verify else None
            if reason is None:
                return path, tuple(passed_over)
            aside = on_rank_0(partial(run_directory.set_aside, path), f"{reason}, and it cannot be renamed")
            reason = f"{reason}; kept as {aside.name}"
        passed_over.append(reason)
    return None, tuple(passed_over)


def _wait_for_all_to_see(checkpoint: Path) -> None:
    """A rank that cannot yet open a checkpoint must not take it for damaged. Collective."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while (problem := writer.attempt(partial(run_directory.read_state, checkpoint))) is not None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    for rank, found in enumerate(of_all_ranks(problem)):
        if found is not None:
            raise UserError(
                f"rank {rank} cannot read the checkpoint {checkpoint}, which rank 0 sees ({found}); put --run_dir "
                "on a disk that all nodes share"
            )


def load(engine: DeepSpeedEngine, checkpoint: Path, same_layout: bool) -> None:
    """Restore engine and random states. Collective.

    Args:
        same_layout: whether this layout wrote the checkpoint, so that DeepSpeed itself can load it.
    """
    if same_layout:
        _collect_from(engine)
        path, _ = engine.load_checkpoint(
            str(checkpoint.parent), tag=checkpoint.name, load_lr_scheduler_states=False
        )
        if path is None:
            raise UserError(f"DeepSpeed could not load {checkpoint}; remove it to go on from the one before")
    else:
        reshard.load(engine, checkpoint)
    if run_directory.read_state(checkpoint).weights_only:
        return
    # Ranks that the writer did not have go on from the states of those that it had, in turn.
    written = sorted(checkpoint.glob(_RANDOM_STATES.format("*")))
    _restore_random_states(load_plain(written[topology.rank() % len(written)]))


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's content; the ranks share the reading and agree. Collective."""
    try:
        mine = run_directory.damage_of_share(checkpoint, topology.rank(), topology.world_size())
    except Exception as error:  # whatever it is: the others wait for this rank's answer
        mine = f"{checkpoint}: {one_line(error)}"
    return next((reason for reason in of_all_ranks(mine) if reason is not None), None)


def _collect_from(engine: DeepSpeedEngine) -> CollectingEngine:
    """Put our storage in the place of DeepSpeed's."""
    engine.checkpoint_engine = collector = CollectingEngine()  # pyright: ignore[reportAttributeAccessIssue]
    return collector


def _random_states() -> dict[str, Any]:
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    algorithm, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal), next_gauss))
