"""Loss, perplexity and bits per byte over held-out batches: the losses of single tokens, summed by group.

The validation of a run, launchers/evaluate.py on a checkpoint, and on an export all go through `evaluate`.

b micro-batch, s sequence length, V vocabulary, g groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from torch import Tensor, nn

from data_prep.tokenizers import Tokenizer
from leviathan_ds.data.loader import Batch
from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.model.embedding import GeneratorEmbedding
from leviathan_ds.parallel import topology

TokenLosses = Callable[[Batch], Float[Tensor, "b s"]]
"""What each label of a batch costs a model, in nats."""


@dataclass(frozen=True)
class Score:
    """What a set of tokens costs a model.

    loss is in nats per token; bits_per_byte is the whole loss over the bytes of text that the predicted
    tokens stand for (end-of-document costs loss and stands for no byte), so it compares tokenizers. Both are NaN
    where there is nothing to divide by. Of mixed sets the three numbers are weighted, not counted.
    """

    nats: float = 0.0
    tokens: float = 0.0
    bytes: float = 0.0

    @property
    def loss(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    def scaled(self, factor: float) -> Score:
        return Score(factor * self.nats, factor * self.tokens, factor * self.bytes)


def total(scores: Iterable[Score]) -> Score:
    """The score of all tokens together."""
    return sum(scores, Score())


def blended(domains: Sequence[Sequence[Score]], shares: Sequence[float]) -> list[Score]:
    """By group, what a token costs that is drawn from the domains by their shares, which sum to 1.

    domains: the groups' scores of each. The groups' tokens sum to 1.
    """
    scaled = [
        [score.scaled(share / total(groups).tokens) for score in groups]
        for groups, share in zip(domains, shares, strict=True)
    ]
    return [total(group) for group in zip(*scaled, strict=True)]


@dataclass(frozen=True)
class TokenTable:
    """What is known of each id of the model's vocabulary.

    Attributes:
        bytes: of text that it stands for; 0 beyond the tokenizer's ids.
        groups: where its tokens are counted, below num_groups.
    """

    bytes: Int[Tensor, " V"]
    groups: Int[Tensor, " V"]
    num_groups: int

    @staticmethod
    def of(tokenizer: Tokenizer, vocab_size: int, groups: Any = None, num_groups: int = 1) -> TokenTable:
        """groups: [at most V] of each id, for the first ids; the others are in the last. None: one group."""
        lengths = torch.zeros(vocab_size, dtype=torch.int64)
        lengths[: tokenizer.vocab_size] = torch.from_numpy(tokenizer.token_byte_lengths())
        of_id = torch.full((vocab_size,), num_groups - 1)
        if groups is not None:
            of_id[: len(groups)] = torch.as_tensor(groups)
        return TokenTable(lengths, of_id, num_groups)


class Uncounted(torch.utils.data.Dataset):
    """A dataset whose first `length` samples count; any index from there on gives a sample that costs nothing.

    So every rank has the same number of full passes, and no sample is left out or counted twice.
    """

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < self._length:
            return self._dataset[index]
        sample = self._dataset[0]
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


def validation_batches(num_samples: int, micro_batch_size: int) -> list[list[int]]:
    """Sample indices of this rank's passes: the same number on every rank, each sample once.

    The last pass may have indices from num_samples on, which `Uncounted` gives no weight.
    """
    size = topology.data_parallel_size()
    micro = max(1, min(micro_batch_size, -(-num_samples // size)))
    passes = -(-num_samples // (micro * size))
    sampler = GlobalBatchSampler(0, 1, passes * micro * size, micro, topology.data_parallel_rank(), size)
    return sampler.step_indices(0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The language model, or the engine around it, in evaluation mode; then again in the mode it was in.

    The generator's table is computed once and looked up: any evaluation that says something has more tokens than
    the vocabulary has ids. Collective over tensor-parallel ranks.
    """
    was_training = model.training
    model.eval()
    if isinstance(model.embedding, GeneratorEmbedding):
        model.embedding.cache_table()
    try:
        yield
    finally:
        model.train(was_training)


def trainer_losses(model: nn.Module) -> TokenLosses:
    """Of the trainer's language model, or the engine around it; call it while `evaluating`."""
    return lambda batch: model(batch.tokens, batch.labels, cu_seqlens=batch.cu_seqlens, reduction="none").losses


@torch.no_grad()
def evaluate(
    losses: TokenLosses, domains: Mapping[str, Iterable[Batch]], table: TokenTable
) -> dict[str, list[Score]]:
    """The score of each group of labels in each domain, over all data-parallel ranks' batches. Collective.

    The domains' sums are reduced, and read back to the host, together.
    """
    device = topology.device()
    bytes_of, group_of = table.bytes.to(device), table.groups.to(device)
    sums = torch.zeros(len(domains), 3, table.num_groups, dtype=torch.float64, device=device)
    for of_domain, batches in zip(sums, domains.values(), strict=True):
        for cpu_batch in batches:
            batch = cpu_batch.to(device)
            labels, weights = batch.labels.flatten(), batch.loss_mask.flatten().double()
            nats = losses(batch).flatten().double()
            of_domain.index_add_(
                1, group_of[labels], weights * torch.stack([nats, torch.ones_like(nats), bytes_of[labels]])
            )
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return {
        name: [Score(*group) for group in of_domain.T.tolist()]
        for name, of_domain in zip(domains, sums, strict=True)
    }
