"""The output head and its loss, without ever holding the logits of the whole batch.

With 200k tokens of vocabulary the logits of one micro-batch outweigh the body's activations many times.
Here they exist for `chunk_tokens` tokens at a time; since the loss is the last thing computed, its gradient
is formed in the same pass, and backward only scales it. The vocabulary is sharded over the tensor-parallel
ranks; two small reductions a chunk make the softmax exact.

n tokens, D hidden size, p rows of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from torch import Tensor


def vocab_parallel_linear_cross_entropy(
    hidden: Float[Tensor, "n D"],
    weight: Float[Tensor, "p D"],
    labels: Int[Tensor, " n"],
    loss_weights: Float[Tensor, " n"],
    vocab_size: int,
    chunk_tokens: int,
) -> Float[Tensor, ""]:
    """Σ_i w_i · (−log softmax(hidden_i · Wᵀ)[label_i]), in float32.

    Args:
        hidden: the same on every tensor-parallel rank; its gradient is this rank's part of the sum.
        weight: this rank's rows of the padded head.
        labels: below vocab_size.
        loss_weights: factor of each token's loss, 0 to leave it out.
        vocab_size: the true vocabulary; padded rows take no part in the softmax.
        chunk_tokens: tokens whose logits exist at once.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, loss_weights, vocab_size, chunk_tokens)  # pyright: ignore


class TokenScores(NamedTuple):
    """What each token cost, and what the model would have said instead. The leading dimensions are the labels'."""

    losses: Float[Tensor, "*n"]
    """Nats, float32."""
    likeliest: Int[Tensor, "*n"]
    """The id of the largest logit; of several the smallest."""


@torch.no_grad()
def vocab_parallel_token_scores(
    hidden: Float[Tensor, "n D"],
    weight: Float[Tensor, "p D"],
    labels: Int[Tensor, " n"],
    vocab_size: int,
    chunk_tokens: int,
) -> TokenScores:
    """−log softmax(hidden_i · Wᵀ)[label_i] of each token by itself; arguments as above. Has no gradient."""
    shard = _VocabularyShard.of(weight, vocab_size)
    buffers = _Buffers.of(weight, min(chunk_tokens, hidden.shape[0]))
    losses, likeliest = [], []
    for chunk in (slice(i, i + chunk_tokens) for i in range(0, hidden.shape[0], chunk_tokens)):
        logits, _ = _logits(hidden[chunk], weight, shard, buffers)
        likeliest.append(_argmax(logits, shard))
        losses.append(_softmax_cross_entropy_(logits, *_columns(labels[chunk], logits, shard))[0])
    return TokenScores(torch.cat(losses), torch.cat(likeliest))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, loss_weights, vocab_size, chunk_tokens):
        shard = _VocabularyShard.of(weight, vocab_size)
        buffers = _Buffers.of(weight, min(chunk_tokens, hidden.shape[0]))
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Summed over chunks in float32 whatever the weights' dtype.
        grad_weight = torch.zeros_like(weight, dtype=_accumulation_dtype(weight)) if need_weight else None
        total = hidden.new_zeros((), dtype=_accumulation_dtype(weight))
        for chunk in (slice(i, i + chunk_tokens) for i in range(0, hidden.shape[0], chunk_tokens)):
            grads = (None if grad_hidden is None else grad_hidden[chunk], grad_weight)
            total += _chunk_loss(hidden[chunk], weight, labels[chunk], loss_weights[chunk], shard, buffers, grads)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        # Scaled in float32: rounded to bfloat16, a factor of 1/3 would bias the whole gradient by 0.2%.
        return (
            None if grad_hidden is None else (grad_hidden.to(scale.dtype) * scale).to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight.mul_(scale).to(ctx.dtype),
            None,
            None,
            None,
            None,
        )


class _Buffers(NamedTuple):
    """One chunk's logits, reused by all chunks: on a CPU, fresh pages cost more than the softmax.

    wide: in the dtype of softmax and sums. narrow: in the weight's dtype, for the matrix products; the same
    memory where both are one.
    """

    wide: Float[Tensor, "chunk p"]
    narrow: Float[Tensor, "chunk p"]

    @staticmethod
    def of(weight: Tensor, num_tokens: int) -> _Buffers:
        wide = weight.new_empty(num_tokens, weight.shape[0], dtype=_accumulation_dtype(weight))
        return _Buffers(wide, wide if wide.dtype == weight.dtype else torch.empty_like(wide, dtype=weight.dtype))

    def first(self, num_tokens: int) -> _Buffers:
        return _Buffers(self.wide[:num_tokens], self.narrow[:num_tokens])


class _VocabularyShard(NamedTuple):
    """This rank's rows of the padded vocabulary: the first one's id, and how many of them are true."""

    first_row: int
    true_rows: int

    @staticmethod
    def of(weight: Tensor, vocab_size: int) -> _VocabularyShard:
        rows = weight.shape[0]
        first_row = rows * parallel_state.get_tensor_model_parallel_rank()
        return _VocabularyShard(first_row, max(0, min(rows, vocab_size - first_row)))


def _accumulation_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    shard: _VocabularyShard,
    buffers: _Buffers,
    grads: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Weighted loss of one chunk; fills the chunk's gradient of hidden and adds to the weight's."""
    grad_hidden, grad_weight = grads
    logits, narrow = _logits(hidden, weight, shard, buffers)
    index, here = _columns(labels, logits, shard)
    losses, probabilities, share = _softmax_cross_entropy_(logits, index, here)
    if grad_hidden is not None or grad_weight is not None:
        grad_logits = probabilities.mul_((loss_weights * share)[:, None])
        grad_logits.scatter_add_(1, index, -(here * loss_weights)[:, None].to(grad_logits.dtype))
        if narrow is not logits:
            narrow.copy_(grad_logits)
        if grad_hidden is not None:
            torch.mm(narrow, weight, out=grad_hidden)
        if grad_weight is not None and grad_weight.dtype == narrow.dtype:
            torch.addmm(grad_weight, narrow.T, hidden, out=grad_weight)
        elif grad_weight is not None:
            grad_weight += narrow.T @ hidden
    return (losses * loss_weights).sum()


def _logits(hidden: Tensor, weight: Tensor, shard: _VocabularyShard, buffers: _Buffers) -> _Buffers:
    """One chunk's logits, in the buffers; those of padding rows are the least number."""
    logits, narrow = buffers.first(hidden.shape[0])
    torch.mm(hidden, weight.T, out=narrow)
    if logits is not narrow:
        logits.copy_(narrow)
    # Not -inf: a rank may hold padding only, and its softmax must not be 0 / 0.
    logits[:, shard.true_rows :].fill_(torch.finfo(logits.dtype).min)
    return _Buffers(logits, narrow)


def _columns(labels: Tensor, logits: Tensor, shard: _VocabularyShard) -> tuple[Tensor, Tensor]:
    """The column of each label [n, 1], and whether it is among this rank's [n]; else the column means nothing."""
    local = labels - shard.first_row
    return local.clamp(0, logits.shape[1] - 1)[:, None], (local >= 0) & (local < shard.true_rows)


def _argmax(logits: Tensor, shard: _VocabularyShard) -> Int[Tensor, " n"]:
    """The id of the largest logit over all ranks' rows."""
    largest, column = logits.max(-1)
    ids = column + shard.first_row
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return ids
    group = parallel_state.get_tensor_model_parallel_group()
    reference = largest.clone()
    dist.all_reduce(reference, op=dist.ReduceOp.MAX, group=group)
    ids = torch.where(largest == reference, ids, torch.iinfo(ids.dtype).max)
    dist.all_reduce(ids, op=dist.ReduceOp.MIN, group=group)
    return ids


def _softmax_cross_entropy_(logits: Tensor, index: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of one chunk, the softmax over this rank's rows (overwriting the logits), and each token's share of
    the whole softmax that lies on this rank.

    Args:
        index: column of each token's label [n, 1], meaningful where the label is `here` on this rank.
    """
    largest = logits.amax(-1)
    label_logits = torch.where(here, logits.gather(1, index)[:, 0], 0.0)
    # In place, and row by row in the cache. The largest probability is at least 1 / p: its logarithm is exact.
    probabilities = torch.softmax(logits, -1, out=logits)
    log_denominator = largest - probabilities.amax(-1).log()
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return log_denominator - label_logits, probabilities, torch.ones_like(largest)
    group = parallel_state.get_tensor_model_parallel_group()
    reference = log_denominator.clone()
    dist.all_reduce(reference, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([label_logits, (log_denominator - reference).exp()])
    dist.all_reduce(sums, group=group)
    label_logits, denominators = sums.unbind()
    log_whole = reference + denominators.log()
    return log_whole - label_logits, probabilities, (log_denominator - log_whole).exp()
