"""Attention that stays within documents: against each document alone, and that nothing comes through the mask."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from distributed_cases import MODEL
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from leviathan_ds.config import ParallelConfig
from leviathan_ds.model import layers
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.model.layers import CausalCoreAttention, document_mask, transformer_config

BATCH, LENGTH = 3, 24
BOUNDS = torch.tensor([0, 9, 24, 25, 47, 48, 72], dtype=torch.int32)  # the last sample is one document


@pytest.fixture
def model(one_rank: None) -> LanguageModel:
    made = LanguageModel(MODEL, ParallelConfig())
    initialize_weights(made, MODEL, seed=1)
    return made


def tokens() -> Tensor:
    return torch.randint(0, MODEL.vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))


def test_logits_are_those_of_each_document_alone(model: LanguageModel) -> None:
    """Also with positions that go on: rotary attention depends on their differences alone."""
    ids = tokens()
    found = model(ids, cu_seqlens=BOUNDS).flatten(0, 1)
    alone = torch.cat([model(ids.flatten()[a:b][None])[0] for a, b in BOUNDS.unfold(0, 2, 1).tolist()])
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)
    assert (model(ids).flatten(0, 1)[9:24] - alone[9:24]).abs().max() > 1e-4  # without the mask they are others


def test_another_document_moves_nothing(model: LanguageModel) -> None:
    """Not one bit of the logits."""
    ids = tokens()
    others = ids.clone()
    others[0, :9] = (ids[0, :9] + 1) % MODEL.vocabulary
    model.eval()
    model.embedding.cache_table()  # else the generator's rounding depends on the number of distinct ids
    one, two = model(ids, cu_seqlens=BOUNDS), model(others, cu_seqlens=BOUNDS)
    assert torch.equal(one[0, 9:], two[0, 9:])
    assert torch.equal(one[1:], two[1:])
    assert not torch.equal(one[0, :9], two[0, :9])


def test_mask_of_documents() -> None:
    mask = document_mask(BOUNDS, torch.Size((BATCH, LENGTH)), torch.float32, 8)
    assert mask.shape == (BATCH, 1, LENGTH, LENGTH)
    bounds = BOUNDS.tolist()

    def document(sample: int, place: int) -> int:
        return sum(bound <= sample * LENGTH + place for bound in bounds)

    for sample in range(BATCH):
        for row in range(LENGTH):
            for column in range(LENGTH):
                same = document(sample, row) == document(sample, column)
                assert mask[sample, 0, row, column] == (same and column <= row)


@pytest.mark.parametrize("groups", [4, 2])
def test_packed_attention_equals_the_masked_one(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU takes; its kernel is played here, document by document, with the signature of torch's own."""

    def played(*arguments: Any, **options: Any) -> Tensor:
        call = inspect.signature(varlen_attn).bind(*arguments, **options).arguments
        assert call["window_size"] == (-1, 0) and call["cu_seq_q"] is call["cu_seq_k"]
        assert call["max_q"] == call["max_k"] >= call["cu_seq_q"].diff().max()
        sizes = call["cu_seq_q"].diff().tolist()
        parts = [call[name].split(sizes) for name in ("query", "key", "value")]
        attended = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in part), is_causal=True, enable_gqa=call["enable_gqa"]
            ).transpose(0, 1)
            for part in zip(*parts, strict=True)
        ]
        return torch.cat(attended)

    monkeypatch.setattr(layers, "varlen_attn", played)
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(LENGTH, BATCH, heads, 8, generator=generator) for heads in (4, groups, groups)
    )
    attention = CausalCoreAttention(transformer_config(MODEL, ParallelConfig()))
    mask = document_mask(BOUNDS, torch.Size((BATCH, LENGTH)), torch.float32, 8)
    masked, packed = (attention(query, key, value, attention_mask=each) for each in (mask, BOUNDS))
    torch.testing.assert_close(packed, masked, rtol=0, atol=1e-6)
