"""Begin a run with a Hugging Face model: `python launchers/import_hf.py --source hf/NAME --output runs/NAME`.

Takes an export of this trainer in either format, or any checkpoint of Llama's architecture. Writes a run directory
with the weights and without optimizer states, from which training starts at step 0:

    deepspeed launchers/pretrain.py --ds_config DS --config runs/NAME/recipe.yaml --run_dir runs/NAME [--data.…]
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from data_prep.cli import CommandParser, positive_int, run


def build_parser() -> CommandParser:
    """The command line's options."""
    parser = CommandParser(
        "python launchers/import_hf.py", "Begin a run with the weights of a Hugging Face model."
    )
    add = parser.add_argument
    add("--source", type=Path, required=True, help="the model's folder")
    add("--output", type=Path, required=True, help="the run directory to write")
    add("--tensor_parallel", type=positive_int, default=1, help="tensor-parallel degree of the checkpoint")
    add(
        "--embedding",
        choices=("dense", "leviathan"),
        default=None,
        help="None: as the source has it; leviathan of a plain Llama: fit a generator to its table",
    )
    add(
        "--config", type=Path, default=None, help="recipe for all but the model's shape: data, training, generator"
    )
    add(
        "--data",
        type=Path,
        default=None,
        help="prefix of a dataset: of its tokenizer, and of token counts for a fit",
    )
    add("--fit_steps", type=positive_int, default=2000, help="steps of the regression of a generator")
    add("--fit_batch", type=positive_int, default=1024, help="distinct ids in each of them")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake."""
    options = build_parser().parse_args(arguments)
    warnings.filterwarnings("ignore")
    return run(lambda: import_model(options))


def import_model(options) -> None:
    """Import, and say what was written."""
    from data_prep.token_counts import load_token_counts
    from leviathan_ds import recipe as recipes
    from leviathan_ds.export import from_hugging_face
    from leviathan_ds.export.fit import FitOptions
    from leviathan_ds.parallel import topology

    from_hugging_face.check_output(options.output)
    base = None if options.config is None else recipes.load(options.config)
    source = from_hugging_face.open_source(options.source, options.data)
    recipe = from_hugging_face.plan_recipe(source, base, options.data, options.embedding, options.tensor_parallel)
    counts = None if options.data is None else load_token_counts(options.data)
    topology.initialize(1)
    fit = FitOptions(options.fit_steps, options.fit_batch)
    imported = from_hugging_face.write_run(source, recipe, options.output, fit)
    topology.shutdown()
    run_dir = options.output
    print(
        f"{imported.checkpoint}: {recipe.model.embedding}, TP {options.tensor_parallel}, the weights of "
        f"{options.source} without optimizer states; train with --config {run_dir}/recipe.yaml --run_dir {run_dir}"
    )
    if imported.fit is not None:
        error = imported.fit.error
        print(
            f"the generator is a fit to the source's table: relative error {error.relative:.3f}, mean cosine "
            f"{error.cosine:.3f}; the model is as far from its source as that"
        )
        if counts is not None:
            for number, group in enumerate(imported.fit.by_frequency(counts), 1):
                print(
                    f"  ids {number}/10 by frequency: relative error {group.relative:.3f}, "
                    f"cosine {group.cosine:.3f}"
                )


if __name__ == "__main__":
    sys.exit(main())
