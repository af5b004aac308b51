"""What turns token ids into the decoder's first hidden states: the Leviathan generator or a dense table.

s sequence, b batch, D hidden size. Under sequence parallelism the output is this rank's part of s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from leviathan_ds.config import ModelConfig, ParallelConfig
from leviathan_ds.model.generator import SplineGenerator


class DistinctIds(NamedTuple):
    """The distinct ids of a micro-batch and, for each token, the place of its id among them.

    Found on the CPU while the batch is loaded: on the GPU the data-dependent size would stall the queue.
    """

    ids: Int[Tensor, " m"]
    inverse: Int[Tensor, "b s"]

    @staticmethod
    def of(tokens: Int[Tensor, "b s"]) -> DistinctIds:
        return DistinctIds(*torch.unique(tokens, return_inverse=True))


class GeneratorEmbedding(nn.Module):
    """Embeddings from the generator, evaluated once for each distinct id and gathered.

    The generator is replicated and every tensor-parallel rank sees the same tokens, so the gradient of an
    embedding is the same on all of them: without sequence parallelism through the first layer's copy region,
    with it because the backward of the scatter gathers. With `split_distinct_ids` each rank evaluates its part
    of the ids only and gathers the rest; the parameters' gradients are then parts of a sum, which
    `registry.complete_partial_gradients` forms. After `cache_table` the V × D table is looked up instead, until
    `train()`.
    """

    def __init__(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        super().__init__()
        self.sequence_parallel = parallel.sequence_parallel
        self.split = parallel.split_distinct_ids and parallel.tensor_model_parallel_size > 1
        self.generator = SplineGenerator(model.vocabulary, model.hidden_size, model.generator)
        self._table: Tensor | None = None

    def forward(self, tokens: Int[Tensor, "b s"], distinct: DistinctIds | None = None) -> Float[Tensor, "s b D"]:
        if self.training or self._table is None:
            distinct = distinct or DistinctIds.of(tokens)
            embeddings = nn.functional.embedding(distinct.inverse.T, self._evaluate(self.generator, distinct.ids))
        else:
            embeddings = nn.functional.embedding(tokens.T, self._table)
        return scatter_to_sequence_parallel_region(embeddings) if self.sequence_parallel else embeddings

    def _evaluate(self, generator: Callable[[Tensor], Tensor], ids: Int[Tensor, " m"]) -> Float[Tensor, "rows D"]:
        """The embeddings of ids, and of id 0 behind them where the ranks' parts would differ in size."""
        if not self.split:
            return generator(ids)
        size = parallel_state.get_tensor_model_parallel_world_size()
        parts = nn.functional.pad(ids, (0, -len(ids) % size)).chunk(size)
        mine = generator(parts[parallel_state.get_tensor_model_parallel_rank()])
        # What follows is the same on all ranks: backward takes this rank's rows of the gradient, without a sum.
        return gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=False)

    def cache_table(self) -> None:
        """Compute the table once for evaluation or generation; `train()` drops it. Collective when split."""
        ids = torch.arange(self.generator.vocab_size, device=self.generator.out_proj.device)
        self._table = self._evaluate(self.generator.table, ids)

    def train(self, mode: bool = True) -> GeneratorEmbedding:
        if mode:
            self._table = None
        return super().train(mode)


class TableEmbedding(nn.Module):
    """A learned table, its rows sharded over the tensor-parallel ranks (the dense baselines)."""

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(
            model.padded_vocab_size(config.tensor_model_parallel_size),
            model.hidden_size,
            init_method=lambda _: None,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )

    def forward(self, tokens: Int[Tensor, "b s"], distinct: DistinctIds | None = None) -> Float[Tensor, "s b D"]:
        embeddings = self.word_embeddings(tokens)
        return embeddings if self.sequence_parallel else embeddings.transpose(0, 1).contiguous()
