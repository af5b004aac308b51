"""Steps that must not count, and runs that must stop: decided on all ranks alike, without waiting for the device.

Each step the ranks add up one small ballot on the device: the loss, and who wants to stop. If the loss is not
finite, or a spike, the ballot turns the last micro-batch's loss into NaN on every rank. The gradient is then
NaN everywhere, and DeepSpeed's own check of the gradient, for which it waits once a step at any ZeRO stage,
skips the step. By then the ballot's copy on the host has long arrived, so that reading it waits for nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from leviathan_ds import run_directory
from leviathan_ds.config import FaultsConfig, RunConfig
from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.parallel import topology
from leviathan_ds.parallel.watchdog import Watchdog
from leviathan_ds.training import checkpoint
from leviathan_ds.training.metrics import Metrics

_NAMED_PASSES = 4  # in a message; the fault file names all


class StepGuard:
    """Call `vote` in each step with the losses of its passes, and `settle` after it. Both are collective.

    Args:
        sampler: of this rank, to name samples.
        run: for the age of a rank at which it asks to stop, and how closely a checkpoint is looked at.
        layout: of this run (`Job.layout`), to know a checkpoint of another one at a rollback.
        state: of `state` in the checkpoint that the run goes on from.
    """

    def __init__(
        self,
        config: FaultsConfig,
        sampler: GlobalBatchSampler,
        watchdog: Watchdog,
        run: RunConfig,
        run_dir: Path,
        layout: dict[str, Any],
        metrics: Metrics,
        state: dict[str, Any],
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._watchdog = watchdog
        self._deadline = math.inf
        if run.exit_duration_minutes is not None:
            self._deadline = psutil.Process().create_time() + 60 * run.exit_duration_minutes
        self._verifies = run.verify_checkpoints == "checksums"
        self._run_dir = run_dir
        self._layout = layout
        self._metrics = metrics
        self._recent: deque[float] = deque(state.get("recent_losses", ()), maxlen=config.loss_spike_window)
        self._rollbacks: int = state.get("rollbacks", 0)
        self.skipped_steps: int = state.get("skipped_steps", 0)
        """In all, over all resumes."""
        self.consecutive_skips: int = state.get("consecutive_skips", 0)
        self.stop_reason: str | None = None
        """Why the run is to save and stop after this step; the same on all ranks."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run decides as an undisturbed one."""
        return {
            "recent_losses": list(self._recent),
            "rollbacks": self._rollbacks,
            "skipped_steps": self.skipped_steps,
            "consecutive_skips": self.consecutive_skips,
        }

    def vote(self, losses: Tensor) -> Tensor:
        """Factor for the last pass's loss: 1, or NaN where the step must not count.

        Args:
            losses: of this rank's passes, [passes], on the device.
        """
        asked = [self._watchdog.stop_signal is not None, time.time() > self._deadline]
        # Filled on the device: a copy of host values would wait for it.
        ballot = torch.stack([losses.mean(), *(torch.full_like(losses[0], float(ask)) for ask in asked)])
        dist.all_reduce(ballot)
        loss = ballot[0] / topology.world_size()  # the mean: tensor-parallel ranks of one group hold the same
        self._losses = losses
        self._ballot = ballot.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if ballot.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()
        sound = torch.isfinite(loss) & (loss <= self._highest_loss())
        return torch.where(sound, 1.0, math.nan)

    def settle(self, engine: DeepSpeedEngine, step: int) -> None:
        """Count and name a skipped step (counted from 0), and see who wants to stop."""
        if self._arrived is not None:
            self._arrived.synchronize()
        total, signalled, timed_out = self._ballot.tolist()
        loss = total / topology.world_size()
        if signalled:
            self.stop_reason = (
                f"{int(signalled)} of {topology.world_size()} ranks got SIGTERM, SIGUSR1 or RUN/stop"
            )
        elif timed_out:
            self.stop_reason = "run.exit_duration_minutes is over"
        if engine.was_step_applied():
            self.consecutive_skips = 0
            if self._config.loss_spike_zscore is not None:
                self._recent.append(loss)
            return
        self.skipped_steps += 1
        self.consecutive_skips += 1
        self._report(loss, step)

    @property
    def gave_up(self) -> bool:
        """Whether so many steps in a row were skipped that going on makes no sense."""
        return self.consecutive_skips >= self._config.max_consecutive_skips

    def roll_back(self, engine: DeepSpeedEngine, done: int) -> bool:
        """After giving up: load the last checkpoint from before the row of skipped steps, if the recipe allows.

        The steps since then stay undone and their data unread: the run goes on at step `done`. Without a
        rollback left, or a checkpoint, says what a reader should do and returns False. Collective.
        """
        first = done - self.consecutive_skips  # number of steps before the row
        target, passed_over = checkpoint.last_good(self._run_dir, self._verifies, first)
        for reason in passed_over:
            self._metrics.say(f"passing over a checkpoint: {reason}")
        row = f"{self.consecutive_skips} steps in a row were skipped ({first + 1} to {done})"
        if target is None or self._rollbacks >= self._config.max_rollbacks:
            self._record("stop", done, row)
            advice = "a lower training.lr"
            if target is not None:
                advice += (
                    f", or with faults.max_rollbacks = {self._rollbacks + 1}, which goes back to that checkpoint "
                    "and passes over these data, or with both"
                )
            self._metrics.say(
                f"stopping: {row}; the last checkpoint from before them is {target or 'none'}. "
                f"{self._run_dir / run_directory.FAULTS} names their samples. Start again with {advice}"
            )
            return False
        checkpoint.load(engine, target, run_directory.read_state(target).layout == self._layout)
        self._rollbacks += 1
        self.consecutive_skips = 0
        self._recent.clear()  # of other weights
        message = f"{row}: back to the weights of {target.name}, and on with the data after step {done}"
        self._record("rollback", done, message, weights_of_step=run_directory.step_of(target))
        self._metrics.say(message)
        return True

    def _highest_loss(self) -> float:
        """Beyond it a loss is a spike."""
        zscore = self._config.loss_spike_zscore
        if zscore is None or len(self._recent) < self._config.loss_spike_window:
            return math.inf
        return statistics.fmean(self._recent) + zscore * statistics.pstdev(self._recent)

    def _report(self, loss: float, step: int) -> None:
        gathered = [torch.empty_like(self._losses) for _ in range(topology.world_size())]
        dist.all_gather(gathered, self._losses.contiguous())
        losses = torch.stack(gathered).tolist()  # [ranks][passes]
        highest = self._highest_loss()
        passes = [(rank, index) for rank, row in enumerate(losses) for index in range(len(row))]
        if not math.isfinite(loss):
            reason = "the loss is not finite"
            named = [(rank, index) for rank, index in passes if not math.isfinite(losses[rank][index])]
        elif loss > highest:
            reason = f"the loss is {loss:.4g}, more than the {highest:.4g} that faults.loss_spike_zscore allows"
            above = [(rank, index) for rank, index in passes if losses[rank][index] > highest]
            named = above or [max(passes, key=lambda place: losses[place[0]][place[1]])]
        else:
            reason, named = "the gradient is not finite, the loss is", passes
        samples = [self._samples(step, rank, index) for rank, index in named]
        told = "; ".join(
            f"{first}–{last} (rank {rank}, pass {index})"
            for (rank, index), (first, last) in zip(named[:_NAMED_PASSES], samples, strict=False)
        )
        more = f" and {len(named) - _NAMED_PASSES} more" if len(named) > _NAMED_PASSES else ""
        self._metrics.say(
            f"step {step + 1:>6}  skipped: {reason}; samples {told}{more}; "
            f"{self.consecutive_skips} in a row, {self.skipped_steps} in all"
        )
        self._record("skip", step + 1, reason, losses=losses, samples=samples, ranks=[rank for rank, _ in named])

    def _samples(self, step: int, rank: int, index: int) -> tuple[int, int]:
        """First and last sample, in the order of training, of a rank's pass."""
        data_parallel_rank = rank // topology.tensor_parallel_size()  # neighbours share one
        indices = replace(self._sampler, data_parallel_rank=data_parallel_rank).step_indices(step)[index]
        return indices[0], indices[-1]

    def _record(self, kind: str, step: int, reason: str, **details: Any) -> None:
        self._metrics.fault({"kind": kind, "step": step, "time": time.time(), "reason": reason, **details})
