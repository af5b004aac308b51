"""The decoder layer: megatron-core's TransformerLayer with the parts that run on any device.

s sequence, b batch, n attention heads of this rank, g query groups of this rank, c head size.
"""

# Megatron's annotations of its specs are narrower than what it builds from.
# pyright: reportArgumentType=false, reportReturnType=false
from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leviathan_ds.config import ModelConfig, ParallelConfig, Recompute

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn: Any = None
_PACKS_DOCUMENTS = varlen_attn is not None and "enable_gqa" in signature(varlen_attn).parameters


def transformer_config(model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron's description of the backbone: LLaMA-style, no biases, no dropout."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn_size,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,  # needs apex and main_grad, which DeepSpeed does not keep
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,  # model/initialization.py fills every parameter
    )


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension.

    Of our own because megatron-core's torch norm refuses sequence parallelism; here its gradient is
    completed by the parameter registry.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Float[Tensor, "*s D"]) -> Float[Tensor, "*s D"]:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def document_mask(
    cu_seqlens: Int[Tensor, " bounds"], shape: torch.Size, dtype: torch.dtype, head_size: int
) -> Int[Tensor, " bounds"] | Bool[Tensor, "b 1 s s"]:
    """What `CausalCoreAttention` takes as its mask so that no token sees another document's.

    The bounds themselves where flash attention can use them, on a GPU in half precision: linear in memory. Else
    the mask that they stand for, b·s² bytes. Nothing is read back to the host.

    Args:
        cu_seqlens: bounds of the documents in the flattened batch; every sample begins with one.
        shape: (b, s); dtype: of the activations.
    """
    suits_flash = dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 256
    if _PACKS_DOCUMENTS and cu_seqlens.is_cuda and suits_flash:
        return cu_seqlens
    batch, length = shape
    places = torch.arange(batch * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    documents = torch.searchsorted(cu_seqlens, places, right=True).view(batch, 1, length)
    return (documents[..., None] == documents[..., None, :]).tril()


class CausalCoreAttention(nn.Module):
    """Causal attention through torch's scaled_dot_product_attention (flash on GPU), grouped queries included.

    With bounds of documents for a mask it is torch's varlen_attn, flash attention over packed sequences.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Float[Tensor, "s b n c"],
        key: Float[Tensor, "s b g c"],
        value: Float[Tensor, "s b g c"],
        attention_mask: Bool[Tensor, "b 1 s s"] | Int[Tensor, " bounds"] | None,
        **_: Any,
    ) -> Float[Tensor, "s b n*c"]:
        """attention_mask: of `document_mask`, None for attention over whole samples."""
        if attention_mask is not None and attention_mask.dtype is not torch.bool:
            return _packed_attention(query, key, value, attention_mask)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def _packed_attention(
    query: Float[Tensor, "s b n c"],
    key: Float[Tensor, "s b g c"],
    value: Float[Tensor, "s b g c"],
    cu_seqlens: Int[Tensor, " bounds"],
) -> Float[Tensor, "s b n*c"]:
    length, batch = query.shape[:2]
    query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    context = varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        length,  # no document is longer; the longest one's length would have to come from the host
        length,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return context.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)  # pyright: ignore


class RecomputedMLP(MLP):
    """The MLP whose inner activations (the layer's largest: five of ffn_hidden_size a token) are recomputed."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # pyright: ignore
        return _recompute(super().forward, hidden_states)


class RecomputedTransformerLayer(TransformerLayer):
    """A layer that keeps only its input for the backward pass."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # pyright: ignore
        def run(hidden: Tensor) -> Tensor:
            return super(RecomputedTransformerLayer, self).forward(hidden_states=hidden, **kwargs)[0]

        return _recompute(run, hidden_states), None


def _recompute(function: Any, hidden_states: Tensor) -> Any:
    # Reentrant: under ZeRO-3 the other kind compares shapes of parameters that are partitioned by then.
    # No random state is kept, because nothing in a layer is random.
    if not torch.is_grad_enabled():
        return function(hidden_states)
    return checkpoint(function, hidden_states, use_reentrant=True, preserve_rng_state=False)


def block_spec(num_layers: int, recompute: Recompute) -> TransformerBlockSubmodules:
    """Megatron specification of the whole decoder; the kind of recomputation picks the modules."""
    layer = ModuleSpec(
        module=RecomputedTransformerLayer if recompute == "full" else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,  # pyright: ignore[reportArgumentType]
                    core_attention=CausalCoreAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=RecomputedMLP if recompute == "selective" else MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
