"""Export a checkpoint to Hugging Face: `python launchers/export_hf.py --checkpoint runs/NAME --output hf/NAME`.

Writes a plain Llama (config.json, safetensors, tokenizer files) that loads without code of ours, or with
--format leviathan a model that keeps its generator, after comparing its logits and its encoding with the trainer's
on real text.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from data_prep.cli import CommandParser, print_error, run
from data_prep.errors import UserError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def build_parser() -> CommandParser:
    """The command line's options."""
    parser = CommandParser("python launchers/export_hf.py", "Export a checkpoint to Hugging Face.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a run (its last checkpoint) or one of its checkpoints")
    add("--output", type=Path, required=True, help="the folder to write")
    add("--format", choices=("llama", "leviathan"), default="llama", help="leviathan keeps the generator")
    add("--dtype", choices=DTYPES, default=None, help="of the weights; None: the checkpoint's")
    add("--max_shard_size", default="5GB", help="of one file of weights")
    add("--overwrite", action="store_true", help="replace an export that is there")
    add("--text", type=Path, default=None, help="a text file to check with instead of the run's dataset")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake, 1 for a refused export."""
    options = build_parser().parse_args(arguments)
    warnings.filterwarnings("ignore", module="megatron")  # it misses Transformer Engine, unused here
    from leviathan_ds.export.publish import ExportRefused

    try:
        return run(lambda: export_checkpoint(options))
    except ExportRefused as error:
        print_error(str(error), error)
        return 1


def export_checkpoint(options) -> None:
    """Export, and say what was written."""
    start = time.monotonic()
    import torch
    from transformers.utils import logging

    from leviathan_ds.export.publish import check_export, export
    from leviathan_ds.parallel import topology
    from leviathan_ds.trained_model import find_trained_model

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    trained = find_trained_model(options.checkpoint)
    shards = options.max_shard_size
    check_export(trained, options.output, options.overwrite, options.text, options.format, shards)
    topology.initialize(1)
    try:
        report = export(
            trained,
            options.output,
            form=options.format,
            dtype=options.dtype and getattr(torch, DTYPES[options.dtype]),
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
            text=options.text,
        )
    except OSError as error:  # names its file: no permission, a full disk, a file in the way
        raise UserError(f"{options.output} cannot be written: {error}") from error
    finally:
        topology.shutdown()
    seconds = time.monotonic() - start
    print(
        f"{report.output}: {trained.checkpoint.name} as {report.dtype} {report.form}, "
        f"{report.num_parameters:,} parameters, {report.num_bytes / 1e6:.1f} MB, {seconds:.0f} s\n"
        f"checked: {report.tokens_compared:,} tokens of real text encode alike; over {report.parity.positions:,} "
        f"positions largest logit difference {report.parity.max_logit_difference:.2e}, "
        f"KL(trainer ‖ export) {report.parity.kl_divergence:.2e} nats"
    )
    if report.rounding is not None:
        print(
            f"rounding to {report.dtype} costs, against the unrounded trainer: largest logit difference "
            f"{report.rounding.max_logit_difference:.2e}, KL {report.rounding.kl_divergence:.2e} nats"
        )


if __name__ == "__main__":
    sys.exit(main())
