"""What the ranks of a worker pool run for tests/test_faults.py: faults injected into steps."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from distributed_cases import GLOBAL_BATCH, Case, batches, build, seeded

from leviathan_ds import run_directory
from leviathan_ds.config import FaultsConfig, RunConfig
from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.parallel import topology
from leviathan_ds.parallel.watchdog import Watchdog

LR = 1e-2


class Said:
    """Metrics that remember what was said; rank 0's record faults."""

    def __init__(self, run_dir: Path) -> None:
        from leviathan_ds.training.metrics import LinesFile

        self.lines: list[str] = []
        self._faults = LinesFile(run_dir / run_directory.FAULTS)

    def say(self, message: str) -> None:
        self.lines.append(message)

    def fault(self, entry: dict[str, Any]) -> None:
        if topology.rank() == 0:
            self._faults.add(entry)
            self._faults.flush()


def guard_of(case: Case, run_dir: Path, faults: FaultsConfig, watchdog: Watchdog, **run: Any) -> tuple[Any, Said]:
    from leviathan_ds.training.faults import StepGuard

    size = topology.data_parallel_size()
    micro = GLOBAL_BATCH // (case.accumulation * size)
    sampler = GlobalBatchSampler(0, case.steps, GLOBAL_BATCH, micro, topology.data_parallel_rank(), size)
    said = Said(run_dir)
    return StepGuard(faults, sampler, watchdog, RunConfig(**run), run_dir, {}, said, {}), said  # pyright: ignore


def optimizer_state(engine: Any) -> list[torch.Tensor]:
    states = engine.basic_optimizer.state.values()
    moments = [state[key].clone() for state in states for key in ("exp_avg", "exp_avg_sq")]
    assert moments and all(moment.any() for moment in moments), "nothing that could move"
    return moments


def faulty_run(
    case: Case, run_dir: Path, kind: str | None, bad: tuple[int, ...], faulty_rank: int
) -> dict[str, Any]:
    """Train case.steps steps with the fault of a kind in the steps `bad`, on one rank alone.

    kind: "loss" (NaN out of the forward), "gradient" (infinite, the loss is finite), "spike" (a hundredfold
    loss); None: the steps are left out instead, as the run that every fault must equal.
    """
    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.training import step as steps

    engine, _ = build(case)
    faults = FaultsConfig(loss_spike_zscore=20.0 if kind == "spike" else None, loss_spike_window=2)
    guard, said = guard_of(case, run_dir, faults, Watchdog(600))
    plain_loss, ours = steps.mean_loss, topology.rank() == faulty_rank
    factor = {"loss": math.nan, "spike": 100.0}.get(str(kind), 1.0)
    parameter = engine.module.decoder.final_layernorm.weight
    steady = True
    for step, micro_batches in enumerate(batches(case)):
        if kind is None and step in bad:
            continue
        breaks = ours and step in bad
        before = optimizer_state(engine) if step in bad else []

        def broken_loss(model: Any, batch: Any, breaks: bool = breaks) -> torch.Tensor:
            loss = plain_loss(model, batch)
            return loss * factor if breaks else loss

        def broken_gradient(grad: torch.Tensor) -> torch.Tensor:
            return torch.full_like(grad, math.inf)

        hook = parameter.register_hook(broken_gradient) if breaks and kind == "gradient" else None
        steps.mean_loss = broken_loss
        steps.train_step(engine, iter(micro_batches), len(micro_batches), LR, torch.device("cpu"), guard)
        steps.mean_loss = plain_loss
        if hook is not None:
            hook.remove()
        guard.settle(engine, step)
        if step in bad:
            steady = steady and all(map(torch.equal, before, optimizer_state(engine)))
    weights = {name: whole.clone() for name, whole in engines.named_local_parameters(engine)}
    result = {
        "weights": weights,
        "steady": steady,
        "skipped": guard.skipped_steps,
        "counted_by_deepspeed": engine.skipped_steps,
        "said": said.lines,
        "differing": engines.differing_replicas(engine),
    }
    engine.destroy()
    return result


def stopping_run(case: Case, run_dir: Path, asking_rank: int, how: str) -> list[tuple[int, str | None]]:
    """Steps with what the guard says after each; one rank is asked to stop in step 1, or is too old from then."""
    from leviathan_ds.training import step as steps

    engine, _ = build(case)
    seen = []
    with Watchdog(600) as watchdog:
        guard, _ = guard_of(case, run_dir, FaultsConfig(), watchdog, exit_duration_minutes=1e9)
        for step, micro_batches in enumerate(batches(case)):
            if step == 1 and topology.rank() == asking_rank:
                if how == "age":
                    guard._deadline = 0.0
                else:
                    os.kill(os.getpid(), getattr(signal, how))
                    while watchdog.stop_signal is None:
                        pass
            steps.train_step(engine, iter(micro_batches), len(micro_batches), LR, torch.device("cpu"), guard)
            guard.settle(engine, step)
            seen.append((step, guard.stop_reason))
            if guard.stop_reason is not None:
                break
    engine.destroy()
    return seen


def rolled_back_run(
    case: Case, run_dir: Path, max_rollbacks: int, verify_checkpoints: str = "checksums"
) -> dict[str, Any]:
    """A checkpoint after every step, keep 1; NaN from step 2 to 4; three skips in a row are too many."""
    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.training import checkpoint
    from leviathan_ds.training import step as steps

    engine, recipe = build(case)
    faults = FaultsConfig(max_consecutive_skips=3, max_rollbacks=max_rollbacks)
    guard, said = guard_of(case, run_dir, faults, Watchdog(600), verify_checkpoints=verify_checkpoints)
    plain_loss, plain_damage, verified = steps.mean_loss, checkpoint.damage, []
    checkpoint.damage = lambda path: (verified.append(path.name), plain_damage(path))[1]
    keep_one = replace(recipe, run=replace(recipe.run, keep_checkpoints=1))
    checkpoints = checkpoint.Checkpoints(engine, run_dir, keep_one)
    at_save: dict[str, torch.Tensor] = {}
    rolled_back = ended = False
    for step, micro_batches in enumerate(batches(case)):
        bad = 2 <= step <= 4 and topology.rank() == 1
        steps.mean_loss = lambda model, batch, bad=bad: plain_loss(model, batch) * (math.nan if bad else 1.0)
        steps.train_step(engine, iter(micro_batches), len(micro_batches), LR, torch.device("cpu"), guard)
        steps.mean_loss = plain_loss
        guard.settle(engine, step)
        if step == 1:
            at_save = {name: whole.clone() for name, whole in engines.named_local_parameters(engine)}
        if guard.gave_up:
            checkpoints.wait()
            with torch.no_grad():  # as if the weights had been lost
                for parameter in engine.module.parameters():
                    parameter.zero_()
            rolled_back = guard.roll_back(engine, step + 1)
            ended = not rolled_back
            break
        state = run_directory.TrainerState(step + 1, 0, {}, [], None, guard.state())
        checkpoints.save(state, rotates=not guard.consecutive_skips)
    checkpoint.damage = plain_damage
    found = dict(engines.named_local_parameters(engine))
    restored = all(torch.equal(found[name], at_save[name]) for name in at_save)
    engine.destroy()
    return {
        "rolled_back": rolled_back,
        "ended": ended,
        "restored": restored,
        "verified": verified,
        "said": said.lines,
    }


def replica_fault(case: Case, faulty_rank: int, name: str) -> dict[str, list[int]]:
    """What the replica check says after one element on one rank changed by one bit."""
    from leviathan_ds.parallel import engine as engines

    engine, _ = build(case)
    assert engines.differing_replicas(engine) == {}
    if topology.rank() == faulty_rank:
        parameter = dict(engine.module.named_parameters())[name]
        held = parameter.ds_tensor if engine.zero_optimization_stage() == 3 else parameter
        bits = held.data.view(torch.int32).view(-1)
        bits[0] ^= 1
    found = engines.differing_replicas(engine)
    engine.destroy()
    return found


def seeds_differ(case: Case, faulty_rank: int) -> str:
    """The start-up check when one tensor-parallel rank drew other initial weights."""
    from leviathan_ds.training import loop

    engine, _ = build(case, lambda recipe: seeded(recipe, recipe.training.seed + (topology.rank() == faulty_rank)))
    try:
        loop.check_replicas(engine)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""
