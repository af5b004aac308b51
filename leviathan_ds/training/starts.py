"""starts.jsonl: under what circumstances a run was started, and every resume of it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import socket
import sys
from typing import Any

import torch

from leviathan_ds import run_directory, software
from leviathan_ds.data.index import shares
from leviathan_ds.parallel import topology
from leviathan_ds.training.job import Job

_PACKAGES = (*software.PACKAGES, "transformers", "wandb")


def record_start(job: Job) -> None:
    """Append this start to RUN/starts.jsonl. For rank 0, when the run directory is there."""
    path = job.run_dir / run_directory.STARTS
    lines = [json.dumps(start) for start in (*run_directory.read_lines(path), describe_start(job))]
    run_directory.write_text(path, "".join(line + "\n" for line in lines))


def describe_start(job: Job) -> dict[str, Any]:
    """Where, on what, with which code and data a job starts; plain JSON values."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "first_step": job.first_step,
        "passed_over": list(job.passed_over),
        "command": sys.argv,
        "host": socket.gethostname(),
        "device": topology.device_name(),
        "world_size": topology.world_size(),
        "layout": job.layout,
        "micro_batch_size": job.recipe.training.micro_batch_size,
        "git": software.commit(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "versions": software.versions(_PACKAGES),
        "data": _data_mix(job),
    }


def _data_mix(job: Job) -> list[dict[str, Any]]:
    """Each dataset with its share of the samples and the counts of its domains."""
    return [
        {
            "prefix": str(part.prefix),
            "share": share,
            "fingerprint": part.manifest.fingerprint,
            "documents": part.manifest.documents,
            "tokens": part.manifest.tokens,
            "domains": {name: dataclasses.asdict(counts) for name, counts in part.manifest.domains.items()},
        }
        for part, share in zip(job.data.train, shares(job.data.train), strict=True)
    ]
