"""How the generator's initialisation learns: validation loss of short runs from one seed, arm by arm.

    python benchmarks/initialization.py [--steps 300] [--arms NAME...]

One process, plain AdamW, the demo's data and (nearly) its model: a comparison of arms, not a benchmark of speed.
Prints a JSON line per arm; docs/generator.md holds the last figures.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import islice

import torch

from leviathan_ds.config import DataConfig, GeneratorConfig, ModelConfig, ParallelConfig, TrainingConfig
from leviathan_ds.data.dataset import build_datasets, check_data
from leviathan_ds.data.loader import loader
from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.evaluation.scores import (
    TokenTable,
    Uncounted,
    evaluate,
    evaluating,
    total,
    trainer_losses,
    validation_batches,
)
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import registry, topology
from leviathan_ds.training.schedule import learning_rate
from leviathan_ds.training.step import mean_loss

BATCH = 8
DATA = DataConfig(prefixes=("data/demo/sample",), sequence_length=256, num_workers=0)
BASE_STD = 0.02 / GeneratorConfig().num_heads ** 0.5  # of the output map: the arms' unit of initial scale
PUBLISHED_LIKE = GeneratorConfig(
    codebook_std=0.02, seed_proj_std=0.02, center_product=False, out_proj_std=BASE_STD
)
CONDITIONED = GeneratorConfig(out_proj_std=BASE_STD)


def scaled(factor: float, **changes: float) -> GeneratorConfig:
    """The conditioned generator with another scale of its output map."""
    return replace(CONDITIONED, out_proj_std=BASE_STD * factor, **changes)  # pyright: ignore[reportArgumentType]


ARMS: dict[
    str, tuple[str, GeneratorConfig, float]
] = {  # embedding, generator, learning-rate scale of the generator
    "dense_tied": ("dense_tied", CONDITIONED, 1.0),
    "dense_untied": ("dense_untied", CONDITIONED, 1.0),
    "published_like": ("leviathan", PUBLISHED_LIKE, 1.0),
    "published_like_centred": ("leviathan", replace(PUBLISHED_LIKE, center_product=True), 1.0),
    "conditioned_centred": ("leviathan", CONDITIONED, 1.0),
    "conditioned_uncentred": ("leviathan", replace(CONDITIONED, center_product=False), 1.0),
    "out_proj_x3": ("leviathan", scaled(3), 1.0),
    "out_proj_x0.2": ("leviathan", scaled(0.2), 1.0),
    "out_proj_x0.1": ("leviathan", scaled(0.1), 1.0),
    "out_proj_x0.05": ("leviathan", scaled(0.05), 1.0),
    "delta_0.2": ("leviathan", replace(CONDITIONED, spline_delta_std=0.2), 1.0),
    "lr_x3": ("leviathan", CONDITIONED, 3.0),
    "out_proj_x0.2_delta_0.05": ("leviathan", scaled(0.2, spline_delta_std=0.05), 1.0),
    "out_proj_x0.2_lr_x0.3": ("leviathan", scaled(0.2), 0.3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    topology.initialize(1)
    data = check_data(DATA)
    train_dataset, domains = build_datasets(DATA, data, options.steps * BATCH)
    datasets = train_dataset, *domains.values()
    training = TrainingConfig(
        train_steps=options.steps, warmup_steps=options.steps // 10, lr=2e-3, min_lr=2e-4, global_batch_size=BATCH
    )
    for name in options.arms:
        print(json.dumps({"arm": name, **train(*ARMS[name], training, data.vocab_size, datasets)}), flush=True)


def train(
    embedding: str,
    generator: GeneratorConfig,
    lr_scale: float,
    training: TrainingConfig,
    vocab_size: int,
    datasets,
) -> dict[str, float]:
    """Losses of one arm at thirds of its run, and at its end on the validation documents."""
    config = ModelConfig(
        vocab_size=vocab_size,
        embedding=embedding,  # pyright: ignore[reportArgumentType]
        hidden_size=128,
        num_layers=4,
        num_attention_heads=4,
        generator=generator,
    )
    model = LanguageModel(config, ParallelConfig())
    initialize_weights(model, config, seed=1)
    groups = registry.optimizer_groups(model, replace(training, generator_lr_scale=lr_scale))
    optimizer = torch.optim.AdamW(groups, betas=(training.adam_beta1, training.adam_beta2))
    batches = iter(loader(datasets[0], GlobalBatchSampler(0, training.train_steps, BATCH, BATCH, 0, 1), 0))
    losses, start = [], time.perf_counter()
    for step, batch in enumerate(islice(batches, training.train_steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training) * group["lr_scale"]
        loss = mean_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    count = min(256, len(datasets[1]))
    held_out = loader(Uncounted(datasets[1], count), validation_batches(count, BATCH), 0)
    ones = torch.ones(vocab_size, dtype=torch.int64)
    with evaluating(model):
        (groups,) = evaluate(trainer_losses(model), {"": held_out}, TokenTable(ones, 0 * ones, 1)).values()
    result = total(groups)
    third = len(losses) // 3
    smoothed = {f"loss_{i}/3": sum(losses[i * third - 20 : i * third]) / 20 for i in (1, 2, 3)}
    return {"val_loss": result.loss, **smoothed, "seconds": seconds}


if __name__ == "__main__":
    main()
