"""Join parts that several machines have made: `python -m data_prep.merge --output_prefix PREFIX`."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from data_prep import cli
from data_prep.blend import Weighting, add_weighting_options
from data_prep.errors import UserError
from data_prep.files import check_named
from data_prep.joining import find_parts, join_parts
from data_prep.manifest import Manifest
from data_prep.parts import load_plan, locked_parts, parts_folder, remove_parts
from data_prep.preprocess import check_not_existing
from data_prep.summary import print_summary


def merge(
    output_prefix: Path | str,
    folders: Sequence[Path] = (),
    *,
    weighting: Weighting | None = None,
    overwrite: bool = False,
) -> dict[Path, Manifest]:
    """Make the datasets of the parts in `folders` (none: in `{output_prefix}.parts`), and remove the parts.

    The bytes are those of a run on one machine. Returns the manifests by prefix. Raises UserError naming parts
    that are missing, damaged, there twice or of different runs, and a dataset that exists, unless `overwrite`."""
    prefix = Path(output_prefix)
    check_named(prefix, "--output_prefix")
    folders = list(folders) or [parts_folder(prefix)]
    plans = [load_plan(folder) for folder in folders]
    for folder, plan in zip(folders[1:], plans[1:], strict=True):
        if plan.digest != plans[0].digest:
            difference = plans[0].difference(plan)
            raise UserError(
                f"{folder}: holds parts of another run than {folders[0]}, which differs in {difference}"
            )
    shares = plans[0].options["split"]
    if not overwrite:
        check_not_existing(prefix, bool(shares), plans[0].options["by_domain"])
    find_parts(plans[0], folders)
    with ExitStack() as locks:
        for folder in folders:
            locks.enter_context(locked_parts(folder, 0, 1))
        manifests = join_parts(prefix, plans[0], folders, weighting)
        for folder in folders:
            remove_parts(folder)
    return manifests


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.merge", "Join the parts that several machines have made.")
    add = parser.add_argument
    add("--output_prefix", type=Path, required=True, help="the dataset's path without a suffix")
    add("--parts", nargs="+", type=Path, default=[], help="folders of parts, instead of OUTPUT_PREFIX.parts")
    add_weighting_options(parser)
    add("--overwrite", action="store_true", help="replace an existing dataset")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        weighting = Weighting(options.blend_weights, options.temperature)
        manifests = merge(options.output_prefix, options.parts, weighting=weighting, overwrite=options.overwrite)
        print_summary(manifests, options.output_prefix)

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
