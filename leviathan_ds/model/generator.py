"""The Leviathan embedding generator, written to be read beside the paper (arXiv 2601.22040).

Steps 1, 2, 3, 4, 6 and 7 are the paper's statements; the parametrisation of step 5, the basis
normalisation, the sizes' defaults and every initial value are reconstructed from public descriptions and
agree with the published parameter count (docs/generator.md says what is known and what is not).

n token ids, k coordinates, b base, d seed size, h heads, κ knots, r rank, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leviathan_ds.config import GeneratorConfig, integer_root
from leviathan_ds.model.separable_native import separable_product

LAYER_NORM_EPSILON = 1e-5

SeparableProduct = Callable[[Tensor, Tensor, bool], Tensor]


def digits(ids: Int[Tensor, " n"], base: int, num_coordinates: int) -> Int[Tensor, "n k"]:
    """Step 1: base-`base` digits of each id, most significant first."""
    # By numbers of Python's: a tensor made of them would be copied to the GPU, and the copy waits for it.
    return torch.stack([ids // base**j % base for j in reversed(range(num_coordinates))], dim=-1)


def spline_basis(t: Float[Tensor, " *s"], num_knots: int, normalize: bool) -> Float[Tensor, "*s κ"]:
    """Step 4: quadratic B-splines centred on the knots g/(κ-1), optionally divided by their sum."""
    knots = torch.arange(num_knots, dtype=t.dtype, device=t.device)
    u = (t[..., None] * (num_knots - 1) - knots).abs()
    basis = torch.where(u < 0.5, 0.75 - u**2, torch.where(u < 1.5, 0.5 * (1.5 - u) ** 2, 0.0))
    return basis / basis.sum(-1, keepdim=True) if normalize else basis


def reference_separable_product(
    t: Float[Tensor, "h n d"], delta: Float[Tensor, "h d κ r"], normalize: bool
) -> Float[Tensor, "h n r"]:
    """Steps 4 to 6 as they are defined: M[ρ] = Π_c Σ_g B[c,g]·(1 + Δ[c,g,ρ]).

    Materialises n·h·d·r values: for tests and for reading. `separable_product` is the same map.
    """
    basis = spline_basis(t, delta.shape[2], normalize)
    phi = torch.einsum("hndg,hdgr->hndr", basis, 1 + delta)
    return phi.prod(dim=2)


class SplineGenerator(nn.Module):
    """Token ids to embeddings by a continuous separable map.

    Weights are left uninitialised: `model/initialization.py` fills every parameter of the model.
    Everything up to the product is computed in float32 (float64 if the weights are), whatever the model's
    dtype: a product of d factors does not survive bfloat16. The output map runs in the model's dtype.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        config: GeneratorConfig,
        product: SeparableProduct = separable_product,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.base = integer_root(vocab_size, config.num_coordinates)
        self.product = product
        k, d, h, r = config.num_coordinates, config.seed_size, config.num_heads, config.rank

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.codebooks = parameter(k, self.base, d)
        self.seed_proj = parameter(h, d, d)
        self.norm_weight = parameter(h, d)
        self.norm_bias = parameter(h, d)
        self.spline_delta = parameter(h, d, config.num_knots, r)
        self.out_proj = parameter(h, r, hidden_size)
        if config.residual:
            self.residual_proj = parameter(d, hidden_size)

    def forward(self, ids: Int[Tensor, " n"]) -> Float[Tensor, "n D"]:
        seed = self.seed(ids)
        modes = self.modes(self.latent(seed))
        if self.config.center_product:
            modes = modes - 1
        output_dtype = self.out_proj.dtype
        heads_and_modes = modes.transpose(0, 1).flatten(1).to(output_dtype)
        embedding = heads_and_modes @ self.out_proj.flatten(0, 1)  # step 7: Σ_l M_l W_out,l
        if self.config.residual:
            embedding = embedding + seed.to(output_dtype) @ self.residual_proj
        return embedding

    def seed(self, ids: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """Steps 1 and 2: z(i) = Σ_j C_j[i_j]."""
        index = digits(ids, self.base, self.config.num_coordinates)
        codebooks = _widen(self.codebooks)
        return sum((codebooks[j][index[:, j]] for j in range(1, index.shape[1])), codebooks[0][index[:, 0]])

    def latent(self, seed: Float[Tensor, "n d"]) -> Float[Tensor, "h n d"]:
        """Step 3: t_l = sigmoid(LN_l(W_l z) / divisor), for each head a point of the unit cube."""
        projected = seed @ _widen(self.seed_proj).transpose(1, 2)
        normed = nn.functional.layer_norm(projected, projected.shape[-1:], eps=LAYER_NORM_EPSILON)
        # The divisor goes into the small vectors, and the sigmoid into the buffer of its argument.
        weight, bias = (
            _widen(vector)[:, None] / self.config.sigmoid_divisor for vector in (self.norm_weight, self.norm_bias)
        )
        return torch.addcmul(bias, normed, weight).sigmoid_()

    def modes(self, latent: Float[Tensor, "h n d"]) -> Float[Tensor, "h n r"]:
        """Steps 4 to 6: M_l, the product of the splines over the d dimensions."""
        return self.product(latent, _widen(self.spline_delta), self.config.normalize_basis)

    def table(self, ids: Int[Tensor, " n"] | None = None, chunk_tokens: int = 8192) -> Float[Tensor, "n D"]:
        """The embeddings of many ids (None: of every id), without a graph: what inference and export look up."""
        with torch.no_grad():
            if ids is None:
                ids = torch.arange(self.vocab_size, device=self.out_proj.device)
            return torch.cat([self(chunk) for chunk in ids.split(chunk_tokens)])


def _widen(parameter: Tensor) -> Tensor:
    return parameter if parameter.dtype == torch.float64 else parameter.float()
