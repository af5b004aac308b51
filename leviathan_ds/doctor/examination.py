"""The collective side of the doctor: probe, measure, gather, and what to say of it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from data_prep.errors import UserError
from leviathan_ds import run_directory
from leviathan_ds.doctor.checks import Finding, Measured, examine
from leviathan_ds.doctor.facts import NodeFacts, Plan, is_there, node_facts
from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel import topology
from leviathan_ds.parallel.agreement import of_all_ranks, of_rank_0
from leviathan_ds.parallel.launch import LaunchEnvironment

_PROBE_VISIBLE_WITHIN_S = 45.0
"""NFS clients believe for 30 s that a folder which they have looked for is not there."""
_CLOCK_ROUNDS = 3
_CORRECTNESS_BYTES = 1 << 20
_BANDWIDTH_BYTES = 64 << 20
_BANDWIDTH_ROUNDS = 5


def examination(plan: Plan, starting: bool = False) -> list[Finding]:
    """Ask every check; the findings are the same on all ranks. Collective over the world.

    Raises UserError on all ranks alike where a node could not be asked.

    Args:
        plan: what this node is to run.
        starting: the run starts if all is well: leave out the bandwidth, and keep the run directory.
    """
    made = not is_there(plan.run_dir)
    speaks = LaunchEnvironment.read().local_rank == 0  # one rank for each node
    with _probed_run_dir(plan.run_dir) as (shared, problem):
        measured = _measure(bandwidth=not starting)
        if problem is not None:
            plan = dataclasses.replace(plan, problems={**plan.problems, "run_dir": problem})
        told = of_all_ranks(_facts_or_trouble(plan, shared) if speaks else None)
    troubles = [trouble for trouble in told if isinstance(trouble, str)]
    findings = (
        [] if troubles else examine([node for node in told if isinstance(node, NodeFacts)], measured, starting)
    )
    if topology.rank() == 0 and made and not (starting and findings and _fit(findings)):
        with contextlib.suppress(OSError):
            plan.run_dir.rmdir()
    if troubles:
        raise UserError(f"the doctor could not examine {'; '.join(troubles)}")
    return findings


def _facts_or_trouble(plan: Plan, run_dir_shared: bool) -> NodeFacts | str:
    """Of this node. An exception here would leave the other ranks waiting: it travels to them instead."""
    try:
        return node_facts(plan, run_dir_shared)
    except Exception as error:
        return f"{socket.gethostname()}: {type(error).__name__}: {error}"


def _fit(findings: Sequence[Finding]) -> bool:
    return all(finding.status != "failed" for finding in findings)


def require_fit(plan: Plan) -> None:
    """The examination at a start of a run: rank 0 prints notes. Collective.

    Raises UserError on all ranks alike with the first failure.
    """
    findings = examination(plan, starting=True)
    if topology.rank() == 0:
        for finding in findings:
            if finding.status == "note":
                print(f"note: {finding.sentence}", flush=True)
    failed = [finding for finding in findings if finding.status == "failed"]
    if failed:
        more = f" ({len(failed) - 1} more: launchers/doctor.py tells all)" if len(failed) > 1 else ""
        raise UserError(failed[0].sentence + more)


def report(findings: Sequence[Finding]) -> None:
    """Print the table, and a sentence for each finding that is not well."""
    table = Table("check", "", "found", title="doctor")
    marks = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "failed": "[red]FAILED[/red]"}
    for finding in findings:
        table.add_row(finding.check, marks[finding.status], finding.found)
    # Under a launcher there is no terminal to ask for its width.
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    console.print(table)
    for finding in findings:
        if finding.sentence:
            print(f"{finding.status}: {finding.check}: {finding.sentence}", flush=True)


@contextlib.contextmanager
def _probed_run_dir(run_dir: Path):
    """Whether this rank's node sees a file that rank 0 writes for the length of the block, and why rank 0 cannot.

    Only the first rank of each node looks. Leave the block together.
    """
    name = of_rank_0(f"{run_directory.PROBE}{uuid.uuid4().hex[:8]}")
    probe, problem = run_dir / name, None
    try:
        if topology.rank() == 0:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                probe.touch()
            except OSError as error:
                problem = f"rank 0 cannot write to --run_dir {run_dir}: {error.strerror}; choose another one"
        problem = of_rank_0(problem)
        seen = problem is None and LaunchEnvironment.read().local_rank == 0 and _appears(probe)
        yield seen, problem
    finally:
        if topology.rank() == 0 and problem is None:
            probe.unlink(missing_ok=True)


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _PROBE_VISIBLE_WITHIN_S
    while not is_there(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _measure(bandwidth: bool) -> Measured:
    clocks = _clock_offsets()
    if not bandwidth:
        right, _ = _all_reduce(_CORRECTNESS_BYTES, rounds=1)
        return Measured(clocks, of_all_ranks(right))
    right, speed = _all_reduce(_BANDWIDTH_BYTES, _BANDWIDTH_ROUNDS)
    return Measured(clocks, of_all_ranks(right), min(of_all_ranks(speed)), _BANDWIDTH_BYTES)  # the slowest link's


def _all_reduce(size_bytes: int, rounds: int) -> tuple[bool, float]:
    """Whether every element of the last of some sums over the ranks is right, and bytes per second of the bus."""
    world_size, rank = topology.world_size(), topology.rank()
    # Whole numbers far below 2²⁴: exact in float32, in any order of addition.
    pattern = torch.arange(size_bytes // 4, device=topology.device(), dtype=torch.float32) % 31
    expected = pattern * world_size + world_size * (world_size - 1) / 2
    values = torch.empty_like(pattern)
    seconds = []
    for _ in range(rounds):
        torch.add(pattern, rank, out=values)
        topology.barrier()
        engines.synchronize()
        start = time.perf_counter()
        dist.all_reduce(values)
        engines.synchronize()
        seconds.append(time.perf_counter() - start)
    return bool(torch.equal(values, expected)), 2 * (world_size - 1) / world_size * size_bytes / min(seconds)


def _clock_offsets() -> list[float]:
    """Every rank's clock minus rank 0's. The smallest of some rounds: ranks leave a barrier at different times."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        topology.barrier()
        rounds.append(time.time())
    clocks = of_all_ranks(rounds)
    offsets = ([there - here for there, here in zip(each, clocks[0], strict=True)] for each in clocks)
    return [min(each, key=abs) for each in offsets]
