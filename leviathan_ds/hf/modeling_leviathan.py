"""Leviathan: transformers' Llama whose input embeddings come from a continuous generator, not from a table.

Self-contained: it travels with a checkpoint. n distinct token ids, k coordinates, b base, d seed size, h heads,
κ knots, r rank, D hidden size, V vocabulary.
"""

import math
from typing import ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from .configuration_leviathan import LeviathanConfig

_BLOCK_VALUES = 1 << 22  # of the h·n·d·r factors of the product, so many exist at once: 16 MiB
_TABLE_ROWS = 4096


class LeviathanEmbedding(nn.Module):
    """Token ids [...] to embeddings [..., D].

    In training, and wherever gradients are recorded, the generator runs on the distinct ids of the batch. Without
    gradients in evaluation mode the V × D table is computed at the first call and looked up from then on; a move
    to another device or dtype, new weights, `train()` and `drop_table()` let go of it.
    """

    def __init__(self, config: LeviathanConfig):
        super().__init__()
        sizes = config.embedding_generator
        self.num_embeddings, self.embedding_dim = config.vocab_size, config.hidden_size
        self.num_coordinates, self.num_knots = sizes["num_coordinates"], sizes["num_knots"]
        self.normalize_basis, self.center_product = sizes["normalize_basis"], sizes["center_product"]
        self.sigmoid_divisor = sizes["sigmoid_divisor"]
        k, d, h, r = self.num_coordinates, sizes["seed_size"], sizes["num_heads"], sizes["rank"]
        self.base = 1
        while self.base**k < self.num_embeddings:
            self.base += 1
        self.codebooks = nn.Parameter(torch.empty(k, self.base, d))
        self.seed_proj = nn.Parameter(torch.empty(h, d, d))
        self.norm_weight = nn.Parameter(torch.empty(h, d))
        self.norm_bias = nn.Parameter(torch.empty(h, d))
        self.spline_delta = nn.Parameter(torch.empty(h, d, self.num_knots, r))
        self.out_proj = nn.Parameter(torch.empty(h, r, self.embedding_dim))
        if sizes["residual"]:
            self.residual_proj = nn.Parameter(torch.empty(d, self.embedding_dim))
        self._table = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training or torch.is_grad_enabled():
            distinct, inverse = torch.unique(ids, return_inverse=True)
            return nn.functional.embedding(inverse, self.generate(distinct))
        if self._table is None:
            every = torch.arange(self.num_embeddings, device=self.out_proj.device)
            table = self.out_proj.new_empty(self.num_embeddings, self.embedding_dim)
            for part, rows in zip(table.split(_TABLE_ROWS), every.split(_TABLE_ROWS), strict=True):
                part.copy_(self.generate(rows))
            self._table = table
        return nn.functional.embedding(ids, self._table)

    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [n] to embeddings [n, D]: the modes in float32 whatever the weights' dtype, the output map in it."""
        codebooks = self.codebooks.float()
        digits = [ids // self.base**j % self.base for j in reversed(range(self.num_coordinates))]
        seed = sum((codebooks[j][digit] for j, digit in enumerate(digits[1:], 1)), codebooks[0][digits[0]])
        normed = nn.functional.layer_norm(seed @ self.seed_proj.float().transpose(1, 2), seed.shape[-1:])  # h n d
        latent = normed * self.norm_weight.float()[:, None] + self.norm_bias.float()[:, None]
        modes = self.product((latent / self.sigmoid_divisor).sigmoid())
        if self.center_product:
            modes = modes - 1
        dtype = self.out_proj.dtype
        embeddings = modes.transpose(0, 1).flatten(1).to(dtype) @ self.out_proj.flatten(0, 1)
        if hasattr(self, "residual_proj"):
            embeddings = embeddings + seed.to(dtype) @ self.residual_proj
        return embeddings

    def product(self, latent: torch.Tensor) -> torch.Tensor:
        """Latent points [h, n, d] to modes [h, n, r]: Π over d of Σ over κ of B(t)·(1 + Δ), block by block.

        With gradients a block's factors are computed again on the way back.
        """
        heads, _, dimensions = latent.shape
        delta = self.spline_delta.float()
        rows = max(1, _BLOCK_VALUES // (heads * dimensions * delta.shape[-1]))
        blocks = []
        for block in latent.split(rows, dim=1):
            if torch.is_grad_enabled():
                blocks.append(checkpoint(self._block, block, delta, use_reentrant=False, preserve_rng_state=False))
            else:
                blocks.append(self._block(block, delta))
        return torch.cat(blocks, dim=1)

    def _block(self, latent: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        basis = _spline_basis(latent, self.num_knots, self.normalize_basis)
        factors = torch.einsum("hndg,hdgr->hdnr", basis, 1 + delta)
        return factors.prod(dim=1)

    def drop_table(self) -> None:
        """Free the table; the next inference computes it again."""
        self._table = None

    def train(self, mode: bool = True):
        if mode:
            self.drop_table()
        return super().train(mode)

    def _apply(self, fn, *args, **kwargs):
        self.drop_table()
        return super()._apply(fn, *args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        self.drop_table()
        super()._load_from_state_dict(*args, **kwargs)


def _spline_basis(t: torch.Tensor, num_knots: int, normalize: bool) -> torch.Tensor:
    """Quadratic B-splines [..., κ] at t [...] of the unit interval, centred on the knots g/(κ-1)."""
    u = (t[..., None] * (num_knots - 1) - torch.arange(num_knots, dtype=t.dtype, device=t.device)).abs()
    basis = torch.where(u < 0.5, 0.75 - u**2, torch.where(u < 1.5, 0.5 * (1.5 - u) ** 2, 0.0))
    return basis / basis.sum(-1, keepdim=True) if normalize else basis


class LeviathanPreTrainedModel(LlamaPreTrainedModel):
    config_class = LeviathanConfig
    config: LeviathanConfig
    _no_split_modules: ClassVar = ["LlamaDecoderLayer", "LeviathanEmbedding"]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, LeviathanEmbedding):
            sizes = self.config.embedding_generator
            seed_proj_std, out_proj_std = sizes["seed_proj_std"], sizes["out_proj_std"]
            if seed_proj_std is None:
                seed_proj_std = 1 / math.sqrt(sizes["seed_size"])
            if out_proj_std is None:
                out_proj_std = 0.004 / math.sqrt(sizes["num_heads"])
            init.normal_(module.codebooks, std=sizes["codebook_std"])
            init.normal_(module.seed_proj, std=seed_proj_std)
            init.ones_(module.norm_weight)
            init.zeros_(module.norm_bias)
            init.normal_(module.spline_delta, std=sizes["spline_delta_std"])
            init.normal_(module.out_proj, std=out_proj_std)
            if sizes["residual"]:
                init.normal_(module.residual_proj, std=self.config.initializer_range)

    def resize_token_embeddings(self, *args, **kwargs):
        raise NotImplementedError("the generator's vocabulary is part of its shape; it cannot be resized")


class LeviathanModel(LeviathanPreTrainedModel, LlamaModel):
    def __init__(self, config: LeviathanConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = LeviathanEmbedding(config)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class LeviathanForCausalLM(LeviathanPreTrainedModel, LlamaForCausalLM):
    _tied_weights_keys: ClassVar = {}

    def __init__(self, config: LeviathanConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.model = LeviathanModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def drop_table(self) -> None:
        """Free the table of embeddings that inference has computed; the next one computes it again."""
        self.model.embed_tokens.drop_table()


__all__ = ["LeviathanConfig", "LeviathanForCausalLM", "LeviathanModel", "LeviathanPreTrainedModel"]
