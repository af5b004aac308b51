"""A whole optimizer step through the engine: Leviathan against its dense twins of the same backbone.

    python benchmarks/step.py [--micro_batches 1] [--repeats 5] [--precision bf16]
    python benchmarks/step.py --compile [--vocab_size 1024]     Leviathan with compiled layers against without

D = 512, 8 layers, V = 200,376, sequence 512, 8 sequences a micro-batch (4,096 tokens) of Zipf-distributed ids. The
arms alternate in one process. Targets: at most 1.02 times dense tied, at most 1.00 times dense untied.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import alternate, ratio, report

from leviathan_ds.config import DataConfig, EmbeddingKind, ModelConfig, Recipe, TrainingConfig
from leviathan_ds.data.loader import Batch, collate
from leviathan_ds.parallel import ds_config, topology
from leviathan_ds.training.loop import build_engine
from leviathan_ds.training.step import train_step

VOCABULARY = 200_376
ARMS: tuple[EmbeddingKind, ...] = ("leviathan", "dense_tied", "dense_untied")


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options that step.py and peer.py share."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--vocab_size", type=int, default=VOCABULARY)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--sequence_length", type=int, default=512)
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--loss_chunk_tokens", type=int, default=TrainingConfig.loss_chunk_tokens)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the trainer's layers")
    parser.add_argument("--ds_config", type=Path, default=Path(__file__).parent.parent / "ds_configs/zero2.json")
    return parser.parse_args()


def recipe_of(options: argparse.Namespace, embedding: EmbeddingKind, compiled: bool) -> Recipe:
    return Recipe(
        model=ModelConfig(
            vocab_size=options.vocab_size,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            embedding=embedding,
        ),
        data=DataConfig(sequence_length=options.sequence_length),
        training=TrainingConfig(
            micro_batch_size=options.micro_batch_size,
            global_batch_size=options.micro_batch_size * options.micro_batches,
            precision=options.precision,
            compile=compiled,
            loss_chunk_tokens=options.loss_chunk_tokens,
        ),
    )


def zipf_batches(options: argparse.Namespace, count: int) -> list[Batch]:
    """Micro-batches of ids whose frequency falls with their rank, as in text."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, options.vocab_size + 1).double()
    shape = (count, options.micro_batch_size, options.sequence_length + 1)
    ids = torch.multinomial(weights, shape[0] * shape[1] * shape[2], replacement=True, generator=generator)
    mask = torch.ones(options.sequence_length)
    return [
        collate([{"tokens": row[:-1], "labels": row[1:], "loss_mask": mask} for row in rows])
        for rows in ids.view(shape)
    ]


def tokens_per_step(options: argparse.Namespace) -> int:
    return options.micro_batches * options.micro_batch_size * options.sequence_length


def filled_config(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    return ds_config.fill(ds_config.read(options.ds_config), recipe, world_size=1, path=options.ds_config)


def trainer_step(options: argparse.Namespace, recipe: Recipe) -> Callable[[], Any]:
    """One optimizer step of the trainer per call."""
    engine, _ = build_engine(recipe, filled_config(options, recipe))
    engine.train()
    batches = itertools.cycle(zipf_batches(options, options.micro_batches))
    return lambda: train_step(engine, batches, options.micro_batches, recipe.training.lr, topology.device())


def main() -> None:
    options = options_of(argparse.ArgumentParser(description=__doc__))
    topology.initialize(1)
    arms = {arm: recipe_of(options, arm, compiled=False) for arm in ARMS}
    if options.compile:
        arms = {"leviathan": arms["leviathan"], "compiled": recipe_of(options, "leviathan", compiled=True)}
    times = alternate({arm: trainer_step(options, recipe) for arm, recipe in arms.items()}, options.repeats)
    for arm in arms:
        seconds = statistics.median(times[arm])
        report(
            "step",
            arm=arm,
            precision=options.precision,
            vocab_size=options.vocab_size,
            micro_batches=options.micro_batches,
            seconds=seconds,
            tokens_per_s=tokens_per_step(options) / seconds,
            leviathan_ratio=ratio(times, "leviathan", arm),
        )
    topology.shutdown()


if __name__ == "__main__":
    main()
