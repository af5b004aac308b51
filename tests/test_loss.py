"""The chunked head loss against torch's cross-entropy on whole logits, alone and over two ranks."""

from __future__ import annotations

import pytest
import torch

from leviathan_ds.model.loss import vocab_parallel_linear_cross_entropy, vocab_parallel_token_scores
from leviathan_ds.parallel import topology

TOKENS, HIDDEN, VOCABULARY, PADDED = 37, 16, 50, 64


def problem(dtype: torch.dtype, padded: int = PADDED) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(padded, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[:2] = torch.tensor([0, VOCABULARY - 1])
    weights = torch.rand(TOKENS, generator=generator)
    weights[5] = 0
    return hidden, weight, labels, weights


def plain(hidden, weight, labels, weights) -> torch.Tensor:
    logits = hidden @ weight[:VOCABULARY].T
    return (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss * 0.37, leaves))  # DeepSpeed scales the loss by 1/accumulation


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
def test_equals_whole_logits(chunk_tokens):
    topology.initialize(1)
    hidden, weight, labels, weights = problem(torch.float64)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    expected = plain(*leaves, labels, weights)
    found = vocab_parallel_linear_cross_entropy(*leaves, labels, weights, VOCABULARY, chunk_tokens)
    assert torch.allclose(found, expected)
    for one, other in zip(gradients(found, *leaves), gradients(expected, *leaves), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert (
        gradients(vocab_parallel_linear_cross_entropy(*leaves, labels, weights, VOCABULARY, 8), leaves[1])[0][
            VOCABULARY:
        ]
        .abs()
        .max()
        == 0
    ), "padded rows are never pulled on"


def test_padding_cannot_be_predicted():
    """However large a padded row's logits are, the loss does not see them."""
    topology.initialize(1)
    hidden, weight, labels, weights = problem(torch.float32)
    weight[VOCABULARY:] = 1e4 * hidden[0]
    found = vocab_parallel_linear_cross_entropy(hidden, weight, labels, weights, VOCABULARY, 8)
    assert torch.allclose(found, plain(hidden, weight, labels, weights), rtol=1e-5)


def test_bfloat16_sums_in_float32():
    topology.initialize(1)
    hidden, weight, labels, weights = problem(torch.bfloat16)
    found = vocab_parallel_linear_cross_entropy(hidden, weight, labels, weights, VOCABULARY, 8)
    assert found.dtype == torch.float32
    assert torch.allclose(found, plain(hidden.float(), weight.float(), labels, weights), rtol=1e-2)


def sharded(padded: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss, this rank's part of the gradient of hidden, and of its rows (runs on two ranks)."""
    topology.initialize(2)
    hidden, weight, labels, weights = problem(torch.float64, padded)
    rows = weight.chunk(2)[topology.tensor_parallel_rank()].clone()
    leaves = hidden.requires_grad_(), rows.requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(*leaves, labels, weights, VOCABULARY, 8)
    return (loss.item(), *gradients(loss, *leaves))


@pytest.mark.parametrize("padded", [PADDED, 2 * VOCABULARY])
def test_two_ranks_equal_whole_logits(two_ranks, padded):
    """Also where the second rank holds nothing but padding."""
    hidden, weight, labels, weights = problem(torch.float64, padded)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    expected = plain(*leaves, labels, weights)
    grad_hidden, grad_weight = gradients(expected, *leaves)
    (loss0, hidden0, rows0), (loss1, hidden1, rows1) = two_ranks.run(sharded, padded)
    assert loss0 == loss1 == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(hidden0 + hidden1, grad_hidden, atol=1e-6)
    assert torch.allclose(torch.cat([rows0, rows1]), grad_weight, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [8, 1000])
def test_scores_of_single_tokens(chunk_tokens):
    """By torch on whole logits; the likeliest of equals is the first, and no padded row ever is."""
    topology.initialize(1)
    hidden, weight, labels, _ = problem(torch.float32)
    weight[VOCABULARY:] = 1e3 * hidden[0]
    weight[7] = weight[3] = 1e2 * hidden[1]
    logits = hidden @ weight[:VOCABULARY].T
    found = vocab_parallel_token_scores(hidden, weight, labels, VOCABULARY, chunk_tokens)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(found.losses, expected, atol=1e-4)
    assert found.likeliest.tolist() == logits.argmax(-1).tolist()
    assert found.likeliest[1] == 3
