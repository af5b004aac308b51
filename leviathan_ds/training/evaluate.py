"""Loss, perplexity and bits per byte over a set of held-out batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """Evaluate over all data-parallel ranks' batches, as `evaluate_domains` does."""
    return evaluate_domains(model, {"": batches}, bytes_of_token, device)[""]


def evaluate_domains(
    model: nn.Module, domains: Mapping[str, Iterable[Batch]], bytes_of_token: Tensor, device: torch.device
) -> dict[str, Evaluation]:
    """Evaluate over all data-parallel ranks' batches of each domain. Collective; the model's mode stays.

    The generator's table is computed once and looked up: any validation that says something has more tokens than
    the vocabulary has ids. The domains' sums are reduced, and read back to the host, together.

    Args:
        model: the language model or the engine around it.
        bytes_of_token: of `token_bytes`, [V].
    """
    was_training = model.training
    model.eval()
    embedding = model.embedding
    if isinstance(embedding, GeneratorEmbedding):
        embedding.cache_table()
    totals = torch.zeros(len(domains), 3, dtype=torch.float64, device=device)  # nats, tokens, bytes
    bytes_of_token = bytes_of_token.to(device)
    with torch.no_grad():
        for total, batches in zip(totals, domains.values(), strict=True):
            for cpu_batch in batches:
                batch = cpu_batch.to(device)
                nats = model(batch.tokens, batch.labels, batch.loss_mask, cu_seqlens=batch.cu_seqlens)
                counted = (bytes_of_token[batch.labels] * batch.loss_mask).sum()
                total += torch.stack([nats.double(), batch.loss_mask.sum().double(), counted.double()])
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    model.train(was_training)
    return {name: _evaluation(*total) for name, total in zip(domains, totals.tolist(), strict=True)}


def blended(evaluations: Sequence[Evaluation], shares: Sequence[float]) -> Evaluation:
    """What tokens cost that are drawn from the domains by shares (their sum is 1); counts are of all domains."""
    loss = sum(each.loss * share for each, share in zip(evaluations, shares, strict=True))
    lengths = [each.bytes / each.tokens for each in evaluations]
    bytes_per_token = sum(length * share for length, share in zip(lengths, shares, strict=True))
    return Evaluation(
        loss,
        loss / math.log(2) / max(1e-9, bytes_per_token),
        sum(each.tokens for each in evaluations),
        sum(each.bytes for each in evaluations),
    )


def _evaluation(nats: float, tokens: float, num_bytes: float) -> Evaluation:
    return Evaluation(nats / tokens, nats / math.log(2) / max(1.0, num_bytes), int(tokens), int(num_bytes))
