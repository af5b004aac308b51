"""Whether the generator still uses what it has: knots, the unit cube, its product, distinct embeddings.

n sampled ids, h heads, d seed size, κ knots, r rank, D hidden size.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from jaxtyping import Float
from torch import Tensor

from leviathan_ds.model.embedding import GeneratorEmbedding
from leviathan_ds.model.generator import SplineGenerator
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import engine as engines

SAMPLED_IDS = 1024
# Beyond these the slope of the sigmoid is under 4% of its largest.
SATURATED_BELOW, SATURATED_ABOVE = 0.01, 0.99


def generator_health(engine: DeepSpeedEngine) -> dict[str, float]:
    """The measures of `measure` for a model in training, {} for one with a table. Collective under ZeRO-3."""
    embedding = cast(LanguageModel, engine.module).embedding
    if not isinstance(embedding, GeneratorEmbedding):
        return {}
    with ExitStack() as stack:
        for parameter in embedding.generator.parameters():
            stack.enter_context(engines.gathered(parameter, engine))
        return measure(embedding.generator)


@torch.no_grad()
def measure(generator: SplineGenerator, num_ids: int = SAMPLED_IDS) -> dict[str, float]:
    """Over `num_ids` ids spread evenly over the vocabulary:

    knots_used: share of the h·d·κ knots that are the nearest one of some sampled id;
    t_saturated: share of the n·h·d latent coordinates t within 0.01 of 0 or 1;
    product_min, product_max: range of the product M, 1 where no spline has moved;
    embedding_cosine: mean cosine between the embeddings of two different ids.
    """
    count = min(num_ids, generator.vocab_size)
    ids = torch.arange(count, device=generator.out_proj.device) * generator.vocab_size // count
    latent = generator.latent(generator.seed(ids))
    modes = generator.modes(latent)
    # Not by a call: under ZeRO-3 the module's hooks would release the gathered parameters.
    embeddings = generator.forward(ids)
    measures = {
        "knots_used": _share_of_knots_used(latent, generator.config.num_knots),
        "t_saturated": ((latent < SATURATED_BELOW) | (latent > SATURATED_ABOVE)).float().mean(),
        "product_min": modes.min(),
        "product_max": modes.max(),
        "embedding_cosine": _mean_cosine(embeddings),
    }
    values = torch.stack([value.double() for value in measures.values()]).tolist()
    return dict(zip(measures, values, strict=True))


def _share_of_knots_used(latent: Float[Tensor, "h n d"], num_knots: int) -> Tensor:
    nearest = (latent * (num_knots - 1)).round().nan_to_num().long().transpose(1, 2)
    used = torch.zeros(*nearest.shape[:2], num_knots, device=latent.device)
    return used.scatter_(2, nearest, 1.0).mean()


def _mean_cosine(embeddings: Float[Tensor, "n D"]) -> Tensor:
    """Over all pairs of different rows: |Σ u|² holds every pair twice and each row's own 1."""
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    n = unit.shape[0]
    return (unit.sum(0).square().sum() - unit.square().sum()) / (n * (n - 1))
