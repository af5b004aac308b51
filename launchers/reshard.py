"""Free a checkpoint of its layout: `python launchers/reshard.py runs/NAME --output runs/NAME_moved`.

Writes a run directory with that checkpoint in DeepSpeed's universal format, on one CPU. `launchers/pretrain.py
--run_dir runs/NAME_moved` goes on from it on any number of GPUs. Not needed for a run that only changes its
layout: pretrain.py takes over any checkpoint of its own.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from data_prep.cli import CommandParser, run


def build_parser() -> CommandParser:
    """The command line's options."""
    parser = CommandParser("python launchers/reshard.py", "Write a checkpoint in DeepSpeed's universal format.")
    add = parser.add_argument
    add("checkpoint", type=Path, help="a run (its last checkpoint) or one of its checkpoints")
    add("--output", type=Path, required=True, help="the run directory to write")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake."""
    options = build_parser().parse_args(arguments)
    warnings.filterwarnings("ignore")
    return run(lambda: reshard(options))


def reshard(options) -> None:
    """Convert, and say where the result is."""
    from leviathan_ds.training.universal import convert

    written = convert(options.checkpoint, options.output)
    print(f"{written}: goes on with --run_dir {options.output}, on any layout")


if __name__ == "__main__":
    sys.exit(main())
