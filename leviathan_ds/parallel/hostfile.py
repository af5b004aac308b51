"""The `deepspeed` command above this process: its hostfile, and the hosts and ranks that it started.

DeepSpeed tells its ranks neither, so command lines are read: of the per-node launcher that is every rank's
parent, and of the command that the user typed, which is an ancestor too or, under pdsh, a neighbour on its host.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from data_prep.errors import UserError

DEFAULT_HOSTFILE = Path("/job/hostfile")  # DeepSpeed's own: used without a word where it exists

_HOSTFILE = "--hostfile"
_SELECTIONS = ("--include", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators")
_SHORT = {"-H": _HOSTFILE, "-i": "--include", "-e": "--exclude"}


@dataclass(frozen=True)
class Launcher:
    """The user's `deepspeed` command, as far as it can be seen from this node."""

    hostfile: Path | None
    """None: no option, and no default file either."""
    selects: bool
    """Whether options take fewer hosts or slots than the hostfile's."""
    environment: dict[str, str] | None
    """Its variables; under pdsh the ranks start in others. None: another user's process."""


def check_hostfile() -> None:
    """Refuse a --hostfile that does not exist, for which DeepSpeed only warns and trains on this node alone.

    Raises UserError naming the file.
    """
    launcher = find_launcher()
    if launcher is not None and launcher.hostfile is not None and not launcher.hostfile.is_file():
        raise UserError(
            f"--hostfile {launcher.hostfile} does not exist; DeepSpeed would train on this node alone. "
            "Give a file with lines such as `worker-1 slots=8`, or leave the option out"
        )


def find_launcher() -> Launcher | None:
    """The `deepspeed` command of this job; None under another launcher, or where it runs on another host."""
    for process in (*psutil.Process().parents(), *_pdsh_parents()):
        arguments = _command_line(process)
        place = next((i for i, argument in enumerate(arguments[:4]) if _is_launcher(argument)), None)
        if place is None:
            continue
        options = _options(arguments[place + 1 :])
        hostfile = DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.is_file() else None
        if _HOSTFILE in options:
            hostfile = _working_directory(process) / options[_HOSTFILE]
        try:
            environment = process.environ()
        except psutil.Error:
            environment = None
        return Launcher(hostfile, any(option in options for option in _SELECTIONS), environment)
    return None


def read_slots(hostfile: Path) -> dict[str, int]:
    """Slots by host of a hostfile, as DeepSpeed reads it."""
    lines = (line.strip() for line in hostfile.read_text().splitlines())
    found = (re.match(r"(\S+)\s+slots=(\d+)", line) for line in lines if not line.startswith("#"))
    return {match.group(1): int(match.group(2)) for match in found if match}


def started_slots() -> dict[str, int] | None:
    """Ranks by host, in order, as DeepSpeed's per-node launcher was told; None under another launcher."""
    encoded = _world_info()
    if encoded is None:
        return None
    hosts = json.loads(base64.urlsafe_b64decode(encoded))
    return {host: len(slots) for host, slots in hosts.items()}


def _world_info() -> str | None:
    for process in psutil.Process().parents():
        for argument in _command_line(process):
            if argument.startswith("--world_info="):
                return argument.partition("=")[2]
    return None


def _pdsh_parents() -> Iterator[psutil.Process]:
    """Parents of the pdsh that starts this very job, if it runs on this host."""
    told = _world_info()
    if told is None:
        return
    for process in psutil.process_iter():
        arguments = _command_line(process)
        if arguments and Path(arguments[0]).name.startswith("pdsh") and f"--world_info={told}" in arguments:
            try:
                yield from process.parents()
            except psutil.Error:
                continue


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # another user's, or gone
        return []


def _working_directory(process: psutil.Process) -> Path:
    try:
        return Path(process.cwd())
    except psutil.Error:  # the launcher hands its own on
        return Path.cwd()


def _is_launcher(argument: str) -> bool:
    return Path(argument).name in {"deepspeed", "ds", "runner.py"} or argument == "deepspeed.launcher.runner"


def _options(arguments: list[str]) -> dict[str, str]:
    """The options above of a launcher's command line, in any spelling that its argparse takes."""
    found = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument.endswith(".py"):
            break  # the user's script; what follows is its own
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            option, attached = _SHORT.get(argument[:2]), argument[2:]
            if option is not None:
                found[option] = attached or following
        elif len(name) > 3:
            option = next((option for option in (_HOSTFILE, *_SELECTIONS) if option.startswith(name)), None)
            if option is not None:
                found[option] = value if equals else following
    return found
