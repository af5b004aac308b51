"""Tokens per second and MFU of shipped recipes in training, and the generator's share of the step.

    python benchmarks/throughput.py [--recipes NAME...] [--micro_batches 8] [--steps 5] [--zero_stage 1]
                                    [recipe options, such as --training.micro_batch_size 8]

Whole optimizer steps through the engine (DeepSpeed) in one process on the GPU, or the CPU where there is none, on
Zipf-distributed synthetic tokens. One JSON line a recipe:

    tokens_per_s   tokens of a step / median seconds of a step, the device's queue empty at both ends
    mfu            tokens_per_s × model FLOPs a token / dense peak of the device (leviathan_ds/accounting.py:
                   6 a parameter of layers' matrices and head, 12·L·n·c·s for attention, the generator by its
                   distinct ids; recomputation not counted); null where the device's peak is not known
    generator      share of the step's time: generator and gather of the same ids, forward and backward, timed
                   by themselves, × micro-batches
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from leviathan_ds import accounting
from leviathan_ds import recipe as recipes
from leviathan_ds.config import Recipe
from leviathan_ds.data.loader import Batch, collate
from leviathan_ds.model.embedding import DistinctIds, GeneratorEmbedding
from leviathan_ds.parallel import ds_config, topology
from leviathan_ds.parallel import engine as engines
from leviathan_ds.training import loop
from leviathan_ds.training.step import train_step

ROOT = Path(__file__).parent.parent
ARMS = ("leviathan", "dense_tied", "dense_untied")
WARMUP = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [f"{arm}_{size}" for size in ("400m", "1200m") for arm in ARMS]
    parser.add_argument("--recipes", nargs="+", default=default)
    parser.add_argument("--micro_batches", type=int, default=8, help="a step; the recipes' own are 16 and 32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--zero_stage", type=int, default=1, choices=(0, 1, 2))
    options, overrides = parser.parse_known_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    topology.initialize(1)
    failed = False
    for name in options.recipes:
        arguments = ["--config", str(ROOT / "recipes" / f"{name}.yaml"), *overrides]
        recipe = recipes.parse(recipes.build_parser("recipe"), arguments)[0]
        micro = recipe.training.micro_batch_size
        training = replace(recipe.training, global_batch_size=micro * options.micro_batches)
        try:
            measured = measure(replace(recipe, training=training), options)
        except torch.cuda.OutOfMemoryError:
            failed, measured = True, {"error": "out of memory"}
        print(json.dumps({"benchmark": "throughput", "recipe": name, **measured}), flush=True)
        gc.collect()  # the engine is full of cycles
        torch.cuda.empty_cache()
    return int(failed)


def measure(recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps of a recipe; the figures of its JSON line."""
    path = ROOT / "ds_configs" / f"zero{options.zero_stage}.json"
    engine, num_parameters = loop.build_engine(recipe, ds_config.fill(ds_config.read(path), recipe, 1, path))
    batches = [synthetic_batch(recipe, seed) for seed in range(options.micro_batches)]
    endless = itertools.cycle(batches)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        train_step(engine, endless, options.micro_batches, recipe.training.lr, topology.device())

    seconds = median_s(step, options.steps)
    tokens = recipe.training.global_batch_size * recipe.data.sequence_length
    distinct = sum(len(batch.distinct_ids) for batch in batches)
    flops = accounting.flops_per_token(recipe.model, recipe.data.sequence_length, distinct / tokens).total
    peak = accounting.device_peak_flops(topology.device_name(), recipe.training.precision)
    share = generator_s(engine, batches[0], options.steps) * options.micro_batches / seconds
    result = {
        "device": topology.device_name(),
        "parameters": num_parameters,
        "precision": recipe.training.precision,
        "zero_stage": options.zero_stage,
        "tokens_per_step": tokens,
        "micro_batch_size": recipe.training.micro_batch_size,
        "distinct_ids_per_token": distinct / tokens,
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "flops_per_token": flops,
        "mfu": accounting.mfu(flops, tokens / seconds, 1, peak),
        "generator": share,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }
    engine.destroy()
    return result


def synthetic_batch(recipe: Recipe, seed: int) -> Batch:
    """Zipf-distributed ids, as of text, over the recipe's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = 1 / torch.arange(1, recipe.model.vocabulary + 1).double()
    rows, length = recipe.training.micro_batch_size, recipe.data.sequence_length
    ids = torch.multinomial(frequencies, rows * (length + 1), replacement=True, generator=generator)
    mask = torch.ones(length)
    samples = [{"tokens": row[:-1], "labels": row[1:], "loss_mask": mask} for row in ids.view(rows, length + 1)]
    batch = collate(samples)
    return batch.pin_memory() if torch.cuda.is_available() else batch


def generator_s(engine: DeepSpeedEngine, batch: Batch, repeats: int) -> float:
    """Seconds of the generator's forward and backward for one micro-batch; 0 for a table.

    Gradients go nowhere: DeepSpeed's hooks stay out of it.
    """
    embedding: Any = engine.module.embedding
    if not isinstance(embedding, GeneratorEmbedding):
        return 0.0
    batch = batch.to(topology.device())
    parameters = list(embedding.parameters())

    def forward_backward() -> None:
        hidden = embedding(batch.tokens, DistinctIds(batch.distinct_ids, batch.inverse))
        torch.autograd.grad(hidden, parameters, torch.ones_like(hidden))

    return median_s(forward_backward, repeats)


def median_s(work: Callable[[], None], repeats: int) -> float:
    """Median seconds of a call, waited for."""
    seconds = []
    for repeat in range(WARMUP + repeats):
        engines.synchronize()
        start = time.perf_counter()
        work()
        engines.synchronize()
        if repeat >= WARMUP:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
