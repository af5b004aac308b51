"""Embedding, megatron-core's transformer block, vocabulary-parallel head.

s sequence, b batch, bounds = documents in the batch + 1, D hidden size, V true vocabulary, p padded vocabulary
rows on this rank.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from leviathan_ds.config import ModelConfig, ParallelConfig, Recompute
from leviathan_ds.model.embedding import DistinctIds, GeneratorEmbedding, TableEmbedding
from leviathan_ds.model.layers import block_spec, document_mask, transformer_config
from leviathan_ds.model.loss import (
    TokenScores,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_token_scores,
)

Reduction = Literal["sum", "none"]


class VocabParallelHead(nn.Module):
    """The output matrix, rows of the padded vocabulary sharded over the tensor-parallel ranks.

    Holds the weight itself, also when it is the input table's (dense tied): ZeRO-3 then gathers it for both.
    """

    def __init__(self, weight: nn.Parameter, vocab_size: int, sequence_parallel: bool, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_size = vocab_size
        self.sequence_parallel = sequence_parallel
        self.chunk_tokens = chunk_tokens

    def forward(
        self,
        hidden: Float[Tensor, "s b D"],
        labels: Int[Tensor, "b s"] | None = None,
        loss_mask: Float[Tensor, "b s"] | None = None,
        reduction: Reduction = "sum",
    ) -> Tensor | TokenScores:
        """As `LanguageModel.forward`."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        if labels is None:
            logits = gather_from_tensor_model_parallel_region(hidden @ self.weight.T)
            return logits.transpose(0, 1)[..., : self.vocab_size]
        if reduction == "none":
            scores = vocab_parallel_token_scores(
                hidden.flatten(0, 1), self.weight, labels.T.flatten(), self.vocab_size, self.chunk_tokens
            )
            return TokenScores(*(each.unflatten(0, labels.T.shape).T for each in scores))
        weights = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        return vocab_parallel_linear_cross_entropy(
            hidden.flatten(0, 1),
            self.weight,
            labels.T.flatten(),
            weights.T.flatten(),
            self.vocab_size,
            self.chunk_tokens,
        )


class LanguageModel(nn.Module):
    """A decoder-only language model whose input embedding is Leviathan's generator or a dense table.

    Needs Megatron's process groups (`parallel.topology.initialize`). Parameters are uninitialised until
    `model.initialization.initialize_weights`.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        recompute: Recompute = "none",
        loss_chunk_tokens: int = 1024,
        compile_layers: bool = False,
    ) -> None:
        super().__init__()
        config = transformer_config(model, parallel)
        self.model_config = model
        if model.embedding == "leviathan":
            self.embedding = GeneratorEmbedding(model, parallel)
        else:
            self.embedding = TableEmbedding(model, config)
        self.rotary = RotaryEmbedding(
            model.head_size,
            rotary_percent=1.0,
            rotary_base=model.rotary_base,  # pyright: ignore[reportArgumentType]
            use_cpu_initialization=True,  # pyright: ignore
        )
        self.decoder = TransformerBlock(config, block_spec(model.num_layers, recompute), post_process=True)
        if compile_layers:
            for layer in self.decoder.layers:  # in place: names of parameters stay; one compilation serves all
                layer.compile()
        if isinstance(self.embedding, TableEmbedding) and model.embedding == "dense_tied":
            weight = self.embedding.word_embeddings.weight
        else:
            rows = model.padded_vocab_size(config.tensor_model_parallel_size) // config.tensor_model_parallel_size
            weight = nn.Parameter(torch.empty(rows, model.hidden_size))
        self.output_layer = VocabParallelHead(
            weight, model.vocabulary, config.sequence_parallel, loss_chunk_tokens
        )

    def forward(
        self,
        tokens: Int[Tensor, "b s"],
        labels: Int[Tensor, "b s"] | None = None,
        loss_mask: Float[Tensor, "b s"] | None = None,
        distinct: DistinctIds | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        reduction: Reduction = "sum",
    ) -> Tensor | TokenScores:
        """Loss summed with loss_mask as weights (float32 scalar), or without labels the logits [b, s, V].

        With reduction "none" the scores of every token [b, s] instead, without gradient. The same on every
        tensor-parallel rank.

        Args:
            cu_seqlens: as in `Batch`, where attention stays within documents. Positions need not begin anew
                there: rotary attention depends on differences of positions alone.
        """
        hidden = self.embedding(tokens, distinct)
        mask = None
        if cu_seqlens is not None:
            mask = document_mask(cu_seqlens, tokens.shape, hidden.dtype, self.model_config.head_size)
        hidden = self.decoder(
            hidden_states=hidden, attention_mask=mask, rotary_pos_emb=self.rotary(tokens.shape[1])
        )
        return self.output_layer(hidden, labels, loss_mask, reduction)
