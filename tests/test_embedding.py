"""The generator as input embedding: its cached table is dropped when training may change the weights."""

from __future__ import annotations

import pytest
import torch

from leviathan_ds.config import GeneratorConfig, ModelConfig, ParallelConfig
from leviathan_ds.model.embedding import GeneratorEmbedding
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel

TINY = ModelConfig(
    vocab_size=90,
    hidden_size=16,
    num_layers=1,
    num_attention_heads=2,
    generator=GeneratorConfig(seed_size=6, num_heads=2, num_knots=5, rank=3),
)


@pytest.mark.usefixtures("one_rank")
def test_cached_table_serves_evaluation_until_training() -> None:
    model = LanguageModel(TINY, ParallelConfig())
    initialize_weights(model, TINY, seed=0)
    embedding = model.embedding
    assert isinstance(embedding, GeneratorEmbedding)
    model.eval()
    tokens = torch.tensor([[3, 89, 3, 41]])
    before = embedding(tokens)
    embedding.cache_table()
    torch.testing.assert_close(embedding(tokens), before)
    model.train()
    with torch.no_grad():
        embedding.generator.out_proj.mul_(2)
    model.eval()
    torch.testing.assert_close(embedding(tokens), 2 * before)
