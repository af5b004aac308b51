"""One table of names and shapes between Megatron's parameters and Hugging Face's Llama, read in both directions.

D hidden size, n attention heads, g query groups, c head size, F MLP size, V true vocabulary.

| Megatron (full, unsharded) | Hugging Face |
|---|---|
| embedding.word_embeddings.weight [V + padding, D] | model.embed_tokens.weight [V, D] |
| embedding.generator.X | model.embed_tokens.X, the same (format leviathan) |
| embedding.generator.* | model.embed_tokens.weight [V, D], computed (format llama) |
| decoder.layers.i.input_layernorm.weight | model.layers.i.input_layernorm.weight |
| decoder.layers.i.self_attention.linear_qkv.weight [g·(n/g + 2)·c, D] | q_proj [n·c, D], k_proj, v_proj [g·c, D] |
| decoder.layers.i.self_attention.linear_proj.weight [D, n·c] | self_attn.o_proj |
| decoder.layers.i.pre_mlp_layernorm.weight | post_attention_layernorm |
| decoder.layers.i.mlp.linear_fc1.weight [2·F, D], gate above up | mlp.gate_proj, mlp.up_proj [F, D] |
| decoder.layers.i.mlp.linear_fc2.weight [D, F] | mlp.down_proj |
| decoder.final_layernorm.weight | model.norm.weight |
| output_layer.weight [V + padding, D], absent when dense tied | lm_head.weight [V, D] |

Both sides rotate halves (position pairs i and i + c/2 of a head), so no row of a head changes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from leviathan_ds.config import ModelConfig

GENERATOR_PREFIX = "embedding.generator."
EMBED_TOKENS, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_GENERATOR_NAMES = ("codebooks", "seed_proj", "norm_weight", "norm_bias", "spline_delta", "out_proj")

Split = Callable[[Tensor, ModelConfig], tuple[Tensor, ...]]
Join = Callable[[Sequence[Tensor], ModelConfig], Tensor]


@dataclass(frozen=True)
class Correspondence:
    """One Megatron parameter and the Hugging Face parameters that hold the same numbers.

    Attributes:
        megatron: its name.
        hugging_face: their names, in the order of `split`'s results and `join`'s arguments.
        split: the full Megatron tensor to the Hugging Face tensors.
        join: its inverse; a padded vocabulary comes back with the true rows alone, which is what
            `model.weights.load_full_weights` takes at any tensor-parallel degree.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    split: Split
    join: Join


def correspondences(model: ModelConfig) -> dict[str, Correspondence]:
    """Every stored parameter of the model, by its Megatron name."""
    table = []
    if model.embedding == "leviathan":
        names = (*_GENERATOR_NAMES, *(("residual_proj",) if model.generator.residual else ()))
        table += [_same(GENERATOR_PREFIX + name, f"model.embed_tokens.{name}") for name in names]
    else:
        table.append(Correspondence("embedding.word_embeddings.weight", (EMBED_TOKENS,), _cut_padding, _only))
    for layer in range(model.num_layers):
        table += _layer(f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    table.append(_same("decoder.final_layernorm.weight", "model.norm.weight"))
    if model.embedding != "dense_tied":
        table.append(Correspondence("output_layer.weight", (LM_HEAD,), _cut_padding, _only))
    return {entry.megatron: entry for entry in table}


def _layer(megatron: str, hugging_face: str) -> list[Correspondence]:
    attention, mlp = hugging_face + "self_attn.", hugging_face + "mlp."
    return [
        _same(megatron + "input_layernorm.weight", hugging_face + "input_layernorm.weight"),
        Correspondence(
            megatron + "self_attention.linear_qkv.weight",
            (attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"),
            split_qkv,
            join_qkv,
        ),
        _same(megatron + "self_attention.linear_proj.weight", attention + "o_proj.weight"),
        _same(megatron + "pre_mlp_layernorm.weight", hugging_face + "post_attention_layernorm.weight"),
        Correspondence(
            megatron + "mlp.linear_fc1.weight",
            (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            split_gate_up,
            join_gate_up,
        ),
        _same(megatron + "mlp.linear_fc2.weight", mlp + "down_proj.weight"),
    ]


def split_qkv(
    weight: Float[Tensor, "qkv D"], model: ModelConfig
) -> tuple[Float[Tensor, "nc D"], Float[Tensor, "gc D"], Float[Tensor, "gc D"]]:
    """Megatron's rows, for each query group its queries' heads, its key, its value, to q, k and v apart."""
    groups, size = model.query_groups, model.head_size
    heads = model.num_attention_heads // groups
    by_group = weight.unflatten(0, (groups, heads + 2, size))
    query, key, value = by_group.split([heads, 1, 1], dim=1)
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)


def join_qkv(parts: Sequence[Tensor], model: ModelConfig) -> Float[Tensor, "qkv D"]:
    """The inverse of `split_qkv`."""
    grouped = [part.unflatten(0, (model.query_groups, -1, model.head_size)) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 2)


def split_gate_up(
    weight: Float[Tensor, "2F D"], model: ModelConfig
) -> tuple[Float[Tensor, "F D"], Float[Tensor, "F D"]]:
    """SwiGLU's two matrices: silu is taken of the first."""
    gate, up = weight.chunk(2)
    return gate, up


def join_gate_up(parts: Sequence[Tensor], model: ModelConfig) -> Float[Tensor, "2F D"]:
    """The inverse of `split_gate_up`."""
    return torch.cat(list(parts))


def _same(megatron: str, hugging_face: str) -> Correspondence:
    return Correspondence(megatron, (hugging_face,), lambda weight, _: (weight,), _only)


def _cut_padding(weight: Tensor, model: ModelConfig) -> tuple[Tensor]:
    return (weight[: model.vocabulary],)


def _only(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    (weight,) = parts
    return weight
