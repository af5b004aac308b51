"""Write one HTML page of a run that opens without a network: `python launchers/report.py runs/NAME`.

Curves, throughput, starts and restarts, environment, data mix, recipe. May be written while the run goes on.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.cli import CommandParser, run


def build_parser() -> CommandParser:
    """The command line's options."""
    parser = CommandParser("python launchers/report.py", "Write one self-contained HTML page of a run.")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--output", type=Path, default=None, help="the page; None: RUN/report.html")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake."""
    options = build_parser().parse_args(arguments)
    return run(lambda: report(options.run, options.output or options.run / "report.html"))


def report(run_dir: Path, output: Path) -> None:
    """Write the page and say where it is."""
    from leviathan_ds import run_directory
    from leviathan_ds.report import page

    run_directory.write_text(output, page(run_dir))
    print(f"wrote {output}, {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
