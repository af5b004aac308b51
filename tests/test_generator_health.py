"""The generator's health against values that are counted or known by construction."""

from __future__ import annotations

import pytest
import torch

from leviathan_ds.config import GeneratorConfig
from leviathan_ds.model.generator import SplineGenerator, spline_basis
from leviathan_ds.training.generator_health import measure

VOCABULARY = 60
CONFIG = GeneratorConfig(num_coordinates=2, seed_size=6, num_heads=3, num_knots=5, rank=4)


def generator(config: GeneratorConfig = CONFIG) -> SplineGenerator:
    torch.manual_seed(0)
    model = SplineGenerator(VOCABULARY, 8, config, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def test_measures_equal_a_count_over_all_ids() -> None:
    model = generator(GeneratorConfig(**{**vars(CONFIG), "sigmoid_divisor": 0.2}))  # saturates
    ids = torch.arange(VOCABULARY)
    latent = model.latent(model.seed(ids))
    knots = spline_basis(latent, 5, normalize=False).argmax(-1)  # the nearest has the largest value
    used = {(h, d, int(knots[h, n, d])) for h in range(3) for n in range(VOCABULARY) for d in range(6)}
    modes = model.modes(latent)
    embeddings = model(ids)
    cosines = torch.nn.functional.cosine_similarity(embeddings[:, None], embeddings[None], dim=-1)
    found = measure(model, num_ids=1000)
    assert found["knots_used"] == pytest.approx(len(used) / (3 * 6 * 5))
    assert 0 < found["t_saturated"] < 1
    assert found["t_saturated"] == pytest.approx(((latent < 0.01) | (latent > 0.99)).double().mean().item())
    assert found["product_min"] == pytest.approx(modes.min().item())
    assert found["product_max"] == pytest.approx(modes.max().item())
    pairs = VOCABULARY * (VOCABULARY - 1)
    assert found["embedding_cosine"] == pytest.approx(((cosines.sum() - VOCABULARY) / pairs).item())


def test_a_dead_generator_shows() -> None:
    """All ids in one point: one knot in each dimension, no spline moved, all embeddings the same."""
    model = generator()
    with torch.no_grad():
        model.norm_weight.zero_()
        model.norm_bias.zero_()
        model.spline_delta.zero_()
    model.config = GeneratorConfig(**{**vars(CONFIG), "center_product": False})
    found = measure(model)
    assert found["knots_used"] == pytest.approx(1 / 5)
    assert found["t_saturated"] == 0
    assert found["product_min"] == found["product_max"] == pytest.approx(1)
    assert found["embedding_cosine"] == pytest.approx(1)


def test_the_sample_is_bounded_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = generator()
    asked = []
    monkeypatch.setattr(model, "seed", lambda ids: asked.append(ids) or SplineGenerator.seed(model, ids))
    measure(model, num_ids=7)
    assert asked[0].tolist() == [0, 8, 17, 25, 34, 42, 51]
