"""What a study measures of a run's last checkpoint: losses by frequency, and what its input embeddings look like.

n sampled ids, V vocabulary, D hidden size, h heads, d seed size, κ knots, k coordinates, b base.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from megatron.core.datasets.utils import Split
from torch import Tensor

from leviathan_ds import run_directory
from leviathan_ds.config import Recipe, integer_root
from leviathan_ds.data.dataset import check_data, num_train_samples
from leviathan_ds.data.index import open_blend
from leviathan_ds.export.evaluate import Evaluation
from leviathan_ds.export.evaluation_options import EvaluationOptions
from leviathan_ds.model.embedding import GeneratorEmbedding
from leviathan_ds.model.generator import SplineGenerator
from leviathan_ds.parallel import topology
from leviathan_ds.studies.runner import EVALUATION, MEASURES
from leviathan_ds.trained_model import TrainedModel, find_trained_model
from leviathan_ds.training import generator_health

WORDS = ("the", "function", "three", "London", "return", "small", "Monday", "water")
_MAP_IDS = 600
_PAIRS = 4096  # of ids, at each digit distance
_COUNTED_SAMPLES = 2**17  # more would only find ids again
_SEED = 0


def write(run_dir: Path) -> None:
    """EVALUATION and MEASURES of a run, each where it is missing. Starts a world of one rank.

    Raises UserError where there is no good checkpoint or no data.
    """
    trained = find_trained_model(run_dir)
    evaluation = None
    if not (run_dir / EVALUATION).is_file():
        evaluation = Evaluation.prepare(validation_of(trained, run_dir / EVALUATION))
    topology.initialize(1)
    if evaluation is not None:
        evaluation.publish(evaluation.run())
    if not (run_dir / MEASURES).is_file():
        run_directory.write_text(run_dir / MEASURES, json.dumps(embeddings(trained)) + "\n")
    topology.shutdown()


def validation_of(trained: TrainedModel, file: Path) -> EvaluationOptions:
    """The samples that the run's own validation took."""
    data = trained.recipe.data
    return EvaluationOptions(
        checkpoint=trained.checkpoint,
        data=data.validation_prefixes or ((data.blend,) if data.blend else data.prefixes),
        split="all" if data.validation_prefixes else "validation",
        samples=trained.recipe.run.eval_samples,
        json=file,
    )


def embeddings(trained: TrainedModel) -> dict[str, Any]:
    """What MEASURES holds, plain JSON values. Needs `topology.initialize(1)`."""
    embedding = trained.build().embedding
    vocab_size = trained.recipe.model.vocabulary
    counts = training_counts(trained.recipe)
    generator = embedding.generator if isinstance(embedding, GeneratorEmbedding) else None
    with torch.no_grad():
        table = (
            embedding.get_parameter("word_embeddings.weight")[:vocab_size]
            if generator is None
            else generator.table()
        )
        table = table.double().cpu()
        base = integer_root(vocab_size, trained.recipe.model.generator.num_coordinates)
        seen = table[counts > 0]
        values = torch.linalg.svdvals(seen - seen.mean(0))
        measures = {
            "ids_seen": len(seen),
            "singular_values": _rounded(values / values[0]),
            "effective_rank": effective_rank(values),
            "continuity": _rounded(continuity(table, base, trained.recipe.model.generator.num_coordinates)),
            "neighbours": {word: _neighbours(trained, table, word, counts > 0) for word in WORDS},
        }
        if generator is not None:
            measures["generator"] = _of_generator(generator, counts)
    return measures


def training_counts(recipe: Recipe) -> Int[Tensor, " V"]:
    """How often each id was an input of a run's training, over its first 2^17 samples at most.

    Not over the dataset, of which a short run sees a part: the rows of a learned table that no step touched are
    the noise that they began with. Raises UserError where the data are missing.
    """
    samples = num_train_samples(recipe)
    dataset = open_blend(recipe.data, check_data(recipe.data).train, samples, Split.train)
    counts = torch.zeros(recipe.model.vocabulary, dtype=torch.int64)
    for index in range(min(samples, _COUNTED_SAMPLES)):
        ids = torch.as_tensor(dataset[index]["tokens"])
        counts.scatter_add_(0, ids, torch.ones_like(ids))
    return counts


def effective_rank(singular_values: Float[Tensor, " D"]) -> float:
    """exp of the entropy of σ / Σσ (Roy and Vetterli 2007): D for equal values, 1 for a single one."""
    shares = singular_values / singular_values.sum()
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


def continuity(table: Float[Tensor, "V D"], base: int, num_coordinates: int) -> Float[Tensor, "k b_minus_1"]:
    """Mean distance of two embeddings whose ids differ in one digit by 1 … b - 1, over that of two random ids.

    Where fewer than 16 pairs of ids are that far apart it is NaN.
    """
    rng = torch.Generator().manual_seed(_SEED)
    vocab_size = len(table)
    one, other = torch.randint(vocab_size, (2, _PAIRS), generator=rng)
    scale = (table[one] - table[other]).norm(dim=1).mean()
    result = torch.full((num_coordinates, max(1, base - 1)), torch.nan, dtype=table.dtype)
    for coordinate in range(num_coordinates):
        step = base ** (num_coordinates - 1 - coordinate)
        for distance in range(1, base):
            ids = torch.randint(vocab_size, (_PAIRS,), generator=rng)
            ids = ids[(ids // step % base + distance < base) & (ids + distance * step < vocab_size)]
            if len(ids) >= 16:
                apart = (table[ids] - table[ids + distance * step]).norm(dim=1).mean()
                result[coordinate, distance - 1] = apart / scale
    return result


def _of_generator(generator: SplineGenerator, counts: Int[Tensor, " V"]) -> dict[str, Any]:
    ids = by_rank(counts)
    latent = generator.latent(generator.seed(ids))  # [h, n, d]
    nearest = (latent * (generator.config.num_knots - 1)).round().long()
    usage = torch.bincount(nearest.flatten(), minlength=generator.config.num_knots) / nearest.numel()
    points = latent.transpose(0, 1).flatten(1).double()
    points = points - points.mean(0)
    _, values, axes = torch.linalg.svd(points, full_matrices=False)
    return {
        **generator_health.measure(generator, generator.vocab_size),
        "knot_usage": _rounded(usage),
        "latent_dimensions": effective_rank(values),
        "map": _rounded(points @ axes[:2].T),
        "map_counts": counts[ids].tolist(),
    }


def by_rank(counts: Int[Tensor, " V"]) -> Int[Tensor, " n"]:
    """Ids of the training data at ranks of frequency that are evenly spaced in the logarithm."""
    order = torch.argsort(counts, descending=True, stable=True)[: int((counts > 0).sum())]
    ranks = np.unique(np.geomspace(1, len(order), _MAP_IDS).astype(int)) - 1
    return order[torch.from_numpy(ranks)]


def _neighbours(trained: TrainedModel, table: Float[Tensor, "V D"], word: str, seen: Tensor) -> list[str] | None:
    """The five ids nearest to a word by cosine among those seen in training; None where it is no single id."""
    ids = trained.tokenizer.encode(" " + word)
    if len(ids) != 1:
        ids = trained.tokenizer.encode(word)
    if len(ids) != 1:
        return None
    unit = torch.nn.functional.normalize(table, dim=1)
    cosine = (unit @ unit[ids[0]]).masked_fill(~seen, -2)
    cosine[ids[0]] = -2
    return [trained.tokenizer.decode([each]).strip() for each in cosine.topk(5).indices.tolist()]


def _rounded(values: Tensor) -> Any:
    """Nested lists with four digits, None for NaN: enough for a figure, small enough to commit."""
    if values.ndim:
        return [_rounded(each) for each in values]
    number = float(values)
    return None if math.isnan(number) else float(f"{number:.4g}")
