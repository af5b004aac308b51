"""List the documents that optimizer steps consumed: python launchers/audit.py RUN --step 100 [--text] [--json]

python launchers/audit.py RUN OTHER_RUN --steps 1-100 compares two runs, whatever their layouts, and exits with 1
at a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.cli import CommandParser, positive_int, run
from data_prep.errors import UserError

if TYPE_CHECKING:
    from leviathan_ds.data.audit import Audit


def steps_of(text: str) -> range:
    """An argparse type: a-b, both included."""
    first, dash, last = text.partition("-")
    steps = range(positive_int(first), positive_int(last) + 1) if dash else range(0)
    if not steps:
        raise argparse.ArgumentTypeError(f"{text!r} is no range such as 10-20")
    return steps


def build_parser() -> CommandParser:
    """The command line's options."""
    parser = CommandParser("python launchers/audit.py", "List the documents that optimizer steps consumed.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="a run directory, or two to compare")
    steps = parser.add_mutually_exclusive_group(required=True)
    steps.add_argument("--step", type=positive_int, help="the step, counted from 1 as in the log")
    steps.add_argument("--steps", type=steps_of, help="steps, such as 10-20")
    add("--text", action="store_true", help="print what was read, decoded")
    add("--json", action="store_true", help="one JSON object per line")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 where two runs differ, 2 for the user's mistake."""
    options = build_parser().parse_args(arguments)
    differs = False

    def command() -> None:
        nonlocal differs
        from leviathan_ds.parallel.launch import quiet_libraries

        quiet_libraries()
        from leviathan_ds.data.audit import Audit

        if len(options.runs) > 2:
            raise UserError(f"two runs can be compared, not {len(options.runs)}")
        audits = [Audit(run_dir) for run_dir in options.runs]
        steps = options.steps or range(options.step, options.step + 1)
        if len(audits) == 2:
            differs = not all([compare(audits[0], audits[1], step) for step in steps])
            return
        for step in steps:
            show(audits[0], step, options.text, options.json)

    return run(command) or int(differs)


def show(audit: Audit, step: int, text: bool, as_json: bool) -> None:
    """Print the pieces of a step."""
    pieces, fate = audit.pieces(step), audit.fate(step)
    if not as_json:
        print(f"step {step}: {fate}, {len({piece.sample for piece in pieces})} samples")
    for piece in pieces:
        prefix = str(audit.prefixes[piece.dataset])
        if as_json:
            record = {"step": step, "fate": fate, "rank": piece.rank, "pass": piece.pass_index}
            record |= {"sample": piece.sample, "dataset": prefix, "document": piece.document}
            record |= {"from": piece.start, "to": piece.stop}
            print(json.dumps(record | ({"text": audit.text(piece)} if text else {}), ensure_ascii=False))
            continue
        place = f"rank {piece.rank} pass {piece.pass_index} sample {piece.sample}"
        print(f"{place}: {prefix} document {piece.document}, tokens [{piece.start}, {piece.stop})")
        if text:
            print(audit.text(piece))


def compare(one: Audit, other: Audit, step: int) -> bool:
    """Whether both runs took the step on the same tokens and with the same outcome; says what differs."""
    fates = one.fate(step), other.fate(step)
    if fates[0] != fates[1]:
        print(f"step {step}: {fates[0]} there, {fates[1]} here")
        return False
    ours, theirs = one.content(step), other.content(step)
    if ours == theirs:
        print(f"step {step}: {fates[0]}, the same {len({piece[0] for piece in ours})} samples")
        return True
    differing = next(
        (pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), (ours[-1:], theirs[-1:])
    )
    print(
        f"step {step}: differs, first at (sample, dataset, document, from, to) {differing[0]} and {differing[1]}"
    )
    return False


if __name__ == "__main__":
    sys.exit(main())
