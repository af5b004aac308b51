"""Loss, perplexity and bits per byte over a set of held-out batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Int
from megatron.core import parallel_state
from torch import Tensor, nn

from data_prep.tokenizers import Tokenizer
from leviathan_ds.data.loader import Batch
from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.model.embedding import GeneratorEmbedding
from leviathan_ds.parallel import topology


@dataclass(frozen=True)
class Evaluation:
    """What a set of tokens costs the model.

    loss is in nats per token; bits_per_byte is the whole loss over the bytes of text that the predicted
    tokens stand for (end-of-document costs loss and stands for no byte), so it compares tokenizers.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def validation_batches(num_samples: int, available: int, micro_batch_size: int) -> list[list[int]]:
    """Sample indices of this rank's validation passes: the same number of passes on every rank.

    At most `available` samples, cut to whole passes over all data-parallel ranks (at least one: where even
    that is too many, samples repeat).
    """
    size = topology.data_parallel_size()
    wanted = min(num_samples, available)
    micro = max(1, min(micro_batch_size, wanted // size))
    passes = max(1, wanted // (micro * size))
    sampler = GlobalBatchSampler(0, 1, passes * micro * size, micro, topology.data_parallel_rank(), size)
    return [[index % available for index in indices] for indices in sampler.step_indices(0)]


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> Int[Tensor, " V"]:
    """Bytes of text that each id of the model's vocabulary stands for; 0 beyond the tokenizer's."""
    lengths = torch.zeros(vocab_size, dtype=torch.int64)
    lengths[: tokenizer.vocab_size] = torch.from_numpy(tokenizer.token_byte_lengths())
    return lengths


def evaluate(
    model: nn.Module, batches: Iterable[Batch], bytes_of_token: Tensor, device: torch.device
) -> Evaluation:
    """Evaluate over all data-parallel ranks' batches. Collective; leaves the model's mode as it was.

    The generator's table is computed once and looked up: any validation that says something has more tokens than
    the vocabulary has ids.

    Args:
        model: the language model or the engine around it.
        bytes_of_token: of `token_bytes`, [V].
    """
    was_training = model.training
    model.eval()
    embedding = model.embedding
    if isinstance(embedding, GeneratorEmbedding):
        embedding.cache_table()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # nats, tokens, bytes
    bytes_of_token = bytes_of_token.to(device)
    with torch.no_grad():
        for cpu_batch in batches:
            batch = cpu_batch.to(device)
            nats = model(batch.tokens, batch.labels, batch.loss_mask)
            counted = (bytes_of_token[batch.labels] * batch.loss_mask).sum()
            totals += torch.stack([nats.double(), batch.loss_mask.sum().double(), counted.double()])
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    model.train(was_training)
    nats, tokens, num_bytes = totals.tolist()
    return Evaluation(
        loss=nats / tokens,
        bits_per_byte=nats / math.log(2) / max(1.0, num_bytes),
        tokens=int(tokens),
        bytes=int(num_bytes),
    )
