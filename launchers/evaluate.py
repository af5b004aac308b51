"""Score a trained model on a dataset: `python launchers/evaluate.py --checkpoint runs/NAME --data data/pile`.

Loss and perplexity per token and bits per byte of text, over the documents that the recipe holds out of training
(--split validation, the default), over those that it trains on, or (--split all) over a whole dataset, such as the
PREFIX.validation of data_prep. Attention stays within documents if it did in training.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from data_prep.cli import CommandParser, positive_int, run

DOCUMENTS = {"validation": "held_out", "train": "training", "all": "all"}


def build_parser() -> CommandParser:
    """The command line's options."""
    parser = CommandParser("python launchers/evaluate.py", "Score a trained model on an indexed dataset.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a run (its last checkpoint) or one of its checkpoints")
    add("--data", required=True, help="prefix of a dataset of the same tokenizer, without .bin/.idx")
    add("--split", choices=tuple(DOCUMENTS), default="validation", help="which of its documents")
    add("--samples", type=positive_int, default=512, help="sequences of the training length, at most")
    add("--micro_batch_size", type=positive_int, default=8, help="sequences at once")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake."""
    options = build_parser().parse_args(arguments)
    warnings.filterwarnings("ignore")
    return run(lambda: evaluate(options))


def evaluate(options) -> None:
    """Print the scores."""
    from dataclasses import replace

    from megatron.core.datasets.utils import Split

    from leviathan_ds.data.dataset import check_data
    from leviathan_ds.data.index import open_part
    from leviathan_ds.data.loader import loader
    from leviathan_ds.parallel import topology
    from leviathan_ds.trained_model import find_trained_model
    from leviathan_ds.training import evaluate as evaluation

    trained = find_trained_model(options.checkpoint)
    config = replace(
        trained.recipe.data,
        prefixes=(options.data,),
        weights=(),
        blend=None,
        validation_prefixes=(),
        tokenizer_fingerprint=trained.tokenizer.fingerprint,
    )
    (part,) = check_data(config).train
    dataset = open_part(config, replace(part, documents=DOCUMENTS[options.split]), None, Split.valid)
    topology.initialize(1)
    model = trained.build()
    indices = evaluation.validation_batches(options.samples, len(dataset), options.micro_batch_size)
    token_bytes = evaluation.token_bytes(trained.tokenizer, trained.recipe.model.vocabulary)
    result = evaluation.evaluate(model, loader(dataset, indices, 0), token_bytes, topology.device())
    topology.shutdown()
    print(
        f"{trained.checkpoint} on {options.data} ({options.split}): "
        f"{result.tokens:,} tokens, {result.bytes:,} bytes\n"
        f"loss {result.loss:.4f} nats/token, perplexity {result.perplexity:.2f}, "
        f"{result.bits_per_byte:.4f} bits/byte"
    )


if __name__ == "__main__":
    sys.exit(main())
