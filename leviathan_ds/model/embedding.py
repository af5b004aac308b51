"""What turns token ids into the decoder's first hidden states: the Leviathan generator or a dense table.

s sequence, b batch, D hidden size. Under sequence parallelism the output is this rank's part of s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from leviathan_ds.config import ModelConfig
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

    The generator is replicated and sees the same tokens on every tensor-parallel rank. Its gradient is full
    on every rank: without sequence parallelism through the first layer's copy region, with it because the
    backward of the scatter gathers. After `cache_table` the V × D table is looked up instead, until `train()`.
    """

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.generator = SplineGenerator(model.vocabulary, model.hidden_size, model.generator)
        self._table: Tensor | None = None

    def forward(self, tokens: Int[Tensor, "b s"], distinct: DistinctIds | None = None) -> Float[Tensor, "s b D"]:
        if self.training or self._table is None:
            distinct = distinct or DistinctIds.of(tokens)
            embeddings = nn.functional.embedding(distinct.inverse.T, self.generator(distinct.ids))
        else:
            embeddings = nn.functional.embedding(tokens.T, self._table)
        return scatter_to_sequence_parallel_region(embeddings) if self.sequence_parallel else embeddings

    def cache_table(self) -> None:
        """Compute the table once for evaluation or generation; `train()` drops it."""
        self._table = self.generator.table()

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
