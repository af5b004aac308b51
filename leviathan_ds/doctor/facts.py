"""What one node knows of itself and of the run, gathered from all nodes and compared in `checks`."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

import data_prep
import leviathan_ds
from data_prep.errors import UserError
from leviathan_ds import accounting, run_directory, software
from leviathan_ds.config import Recipe
from leviathan_ds.data.dataset import check_data
from leviathan_ds.doctor import environment
from leviathan_ds.parallel import ds_config, engine, hostfile, topology
from leviathan_ds.parallel.launch import LaunchEnvironment


@dataclass(frozen=True)
class Plan:
    """What is to be run, as one node reads it. A part that cannot be used has its reason in `problems`."""

    recipe: Recipe
    run_dir: Path
    ds_config: dict[str, Any] | None = None
    """DeepSpeed's, filled in."""
    fingerprints: tuple[str, ...] = ()
    """Of the datasets' content."""
    problems: dict[str, str] = field(default_factory=dict)
    """One sentence each, by the name of the check that reports it: batch, data, hostfile."""


def plan(recipe: Recipe, ds_config_path: Path, run_dir: Path, world_size: int) -> Plan:
    """Look at configuration and data as `training.job.prepare` does, but keep every mistake."""
    problems: dict[str, str] = {}
    filled, fingerprints = None, ()
    try:
        hostfile.check_hostfile()
    except UserError as error:
        problems["hostfile"] = str(error)
    try:
        filled = ds_config.fill(ds_config.read(ds_config_path), recipe, world_size, ds_config_path)
        engine.check_values(filled, ds_config_path)
    except UserError as error:
        problems["batch"] = str(error)
    try:
        data = check_data(recipe.data)
        for part in (*data.train, *data.validation):
            with Path(f"{part.prefix}.bin").open("rb") as file:  # its size was looked at, not its permission
                file.read(1)
        fingerprints = tuple(data.fingerprints)
        recipe = recipe.with_vocabulary(data.vocab_size)
    except (UserError, OSError) as error:
        problems["data"] = str(error)
    return Plan(recipe, run_dir, filled, fingerprints, problems)


@dataclass(frozen=True)
class NodeFacts:
    """One node. Small: those of all nodes travel to every rank."""

    name: str
    """Of the host."""
    machine: str
    """Equal for two nodes only if they are one machine."""
    num_ranks: int
    first_rank: int
    device: str
    versions: dict[str, str]
    commit: str | None
    """`software.commit`, 12 digits of it."""
    source: str
    """Digest of the code that runs."""
    variables: dict[str, str]
    """`environment.shown` of this rank."""
    launcher_variables: dict[str, str] | None
    """The same of the shell that typed `deepspeed`; None where it cannot be seen from here."""
    hostfile: str | None
    hostfile_slots: dict[str, int]
    hostfile_selects: bool
    started_slots: dict[str, int] | None
    plan: Plan
    run_dir_shared: bool
    """Whether this node sees what rank 0 wrote to the run directory."""
    free_bytes: int
    """On the run directory's disk."""
    checkpoint_bytes: int | None
    """Of one checkpoint, estimated; None where the recipe's vocabulary is not known."""
    num_checkpoints: int
    """That are there already."""


def node_facts(plan: Plan, run_dir_shared: bool) -> NodeFacts:
    """The facts of this node, asked on one rank of it."""
    launched, launcher = LaunchEnvironment.read(), hostfile.find_launcher()
    given = None if launcher is None else launcher.hostfile
    caller = None if launcher is None else launcher.environment
    slots = hostfile.read_slots(given) if given is not None and given.is_file() else {}
    return NodeFacts(
        name=socket.gethostname(),
        machine=socket.gethostname() + " " + _boot_id(),
        num_ranks=launched.local_world_size,
        first_rank=launched.rank - launched.local_rank,
        device=topology.device_name(),
        versions=versions(),
        commit=software.commit(digits=12),
        source=_source_digest(),
        variables=environment.shown(os.environ),
        launcher_variables=None if caller is None else environment.shown(caller),
        hostfile=None if given is None else str(given),
        hostfile_slots=slots,
        hostfile_selects=launcher is not None and launcher.selects,
        started_slots=hostfile.started_slots(),
        plan=plan,
        run_dir_shared=run_dir_shared,
        free_bytes=shutil.disk_usage(_existing(plan.run_dir)).free,
        checkpoint_bytes=_checkpoint_bytes(plan),
        num_checkpoints=len(list((plan.run_dir / run_directory.CHECKPOINTS).glob("step_*"))),
    )


def versions() -> dict[str, str]:
    """Versions of what must be the same on all nodes, by package."""
    found = software.versions()
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, nccl.version()))
    return found


def _source_digest() -> str:
    digest = hashlib.sha256()
    for package in (leviathan_ds, data_prep):
        root = Path(str(package.__file__)).parent
        for path in sorted(path for path in root.rglob("*") if path.suffix in {".py", ".c"}):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""


def is_there(path: Path) -> bool:
    """Whether this node can see a file; where it may not look, it cannot, and no rank stops alone."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if is_there(folder))


def _checkpoint_bytes(plan: Plan) -> int | None:
    if plan.recipe.model.vocab_size is None or plan.ds_config is None:
        return None
    return accounting.checkpoint_bytes(plan.recipe, ds_config.zero_stage(plan.ds_config))
