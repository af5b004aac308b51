"""Build a recipe's sample indices ahead: python launchers/build_index.py --config recipes/NAME.yaml

On any machine that sees the data, without a GPU, a process group or DeepSpeed. The trainer, with the same recipe,
then finds them and starts at once. Nodes without a shared disk: build on each, or copy the cache
(PREFIX.index_cache beside each dataset, or data.index_cache) along with the data: names come from content.
"""

from __future__ import annotations

import sys

from data_prep import cli
from leviathan_ds.config import Recipe
from leviathan_ds.parallel.launch import quiet_libraries
from leviathan_ds.recipe import build_parser, parse


def main(arguments: list[str]) -> int:
    parser = build_parser("Build the sample indices of a recipe ahead, for training and validation.")

    def command() -> None:
        build(parse(parser, arguments)[0])

    return cli.run(command)


def build(recipe: Recipe) -> None:
    """Build what is missing, and print a line for each index. Raises UserError."""
    quiet_libraries()
    from leviathan_ds.data.dataset import build_datasets, check_data, num_train_samples
    from leviathan_ds.data.index import Index

    def report(index: Index) -> None:
        print(
            f"{'built' if index.built else 'found'} {index.title}: {index.samples:,} samples, "
            f"{index.bytes / 1e6:,.2f} MB, {index.seconds:.1f} s, {index.folder}",
            flush=True,
        )

    samples = num_train_samples(recipe)
    build_datasets(recipe.data, check_data(recipe.data), samples, report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
