"""Which code and which packages run here."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("torch", "deepspeed", "megatron-core", "numpy", "safetensors", "sentencepiece")
"""Those that training computes, reads and writes with."""


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of each package; one without metadata is left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit(digits: int = 40) -> str | None:
    """git's commit of this code, "-dirty" behind it where tracked files differ; None outside a git work tree."""
    command = ["git", "describe", "--always", f"--abbrev={digits}", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
