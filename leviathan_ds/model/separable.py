"""The separable product of the generator (steps 4 to 6) without its memory, on any device.

The definition holds h·d·r values φ for every id: 256 KiB a token at the paper's sizes. Here the ids are
taken in blocks small enough for the cache, φ of a block is one batched matrix product, and Π over the d
dimensions is a balanced tree, whose intermediate products give every leave-one-out product on the way
back without a division (φ may be 0). Nothing of size d·r is saved between forward and backward.

n ids, h heads, d seed size, κ knots, r rank.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

# φ values of one block. CPU: 2 MiB in float32, measured best on 2 cores with 1-2 MiB of L2 each. GPU: 64 MiB, not
# measured but reasoned: a kernel over one such level moves 100 MB and more, some 30 µs of an H100's memory, and so
# outlasts the 5 µs of its launch. Larger blocks save launches that are hidden already, at four times their size.
_BLOCK_VALUES_CPU = 1 << 19
_BLOCK_VALUES_GPU = 1 << 24


def portable_separable_product(
    t: Float[Tensor, "h n d"], delta: Float[Tensor, "h d κ r"], normalize: bool
) -> Float[Tensor, "h n r"]:
    """M[l,i,ρ] = Π_c Σ_g B_g(t[l,i,c])·(1 + Δ[l,c,g,ρ]), differentiable in t and Δ.

    Args:
        t: latent points in [0, 1], float32 or float64.
        delta: spline coefficients minus one, in t's dtype.
        normalize: divide the basis by its sum over the knots.
    """
    return _SeparableProduct.apply(t, delta, normalize)  # pyright: ignore[reportReturnType]


def three_knots(
    t: Float[Tensor, "..."], num_knots: int, normalize: bool
) -> tuple[Int[Tensor, "..."], Float[Tensor, "3 ..."], Float[Tensor, "3 ..."]]:
    """The only knots whose basis is not zero at t: index of the middle one, values, derivatives by t.

    Values outside the knots 0..κ-1 are zero, so a caller may pad the coefficients with anything finite.
    """
    x = t * (num_knots - 1)
    # A NaN keeps its values but gets a valid index: a diverged step must end as a NaN loss, not on a bad address.
    middle = x.round().nan_to_num_(0.0).clamp_(0, num_knots - 1)
    f = x - middle
    inside_low, inside_high = middle > 0, middle < num_knots - 1
    values = torch.stack([0.5 * (0.5 - f) ** 2 * inside_low, 0.75 - f**2, 0.5 * (0.5 + f) ** 2 * inside_high])
    slopes = torch.stack([(f - 0.5) * inside_low, -2 * f, (f + 0.5) * inside_high])
    if normalize:
        total = values.sum(0)
        values = values / total
        slopes = (slopes - values * slopes.sum(0)) / total
    return middle.long(), values, slopes * (num_knots - 1)


def _dense_basis(middle: Tensor, values: Tensor, num_knots: int) -> Float[Tensor, "d n knots_padded"]:
    """The three values of each point put into rows of κ + 2 (one padding knot at either end)."""
    basis = values.new_zeros(*middle.shape, num_knots + 2)
    return basis.scatter_(-1, torch.stack([middle, middle + 1, middle + 2], -1), values.movedim(0, -1))


def _product_tree(factors: Float[Tensor, "d n r"]) -> list[Tensor]:
    """Levels of a balanced product tree, leaves first; an odd level's last factor moves up unchanged."""
    levels = [factors]
    while levels[-1].shape[0] > 1:
        below = levels[-1]
        half = below.shape[0] // 2
        above = below[:half] * below[half : 2 * half]
        levels.append(torch.cat([above, below[2 * half :]]) if below.shape[0] % 2 else above)
    return levels


def _leave_one_out(levels: list[Tensor], grad: Float[Tensor, "1 n r"]) -> Float[Tensor, "d n r"]:
    """grad times the product of all other factors, for each factor: the tree walked from the root down."""
    for below in reversed(levels[:-1]):
        half = below.shape[0] // 2
        down = torch.empty_like(below)
        torch.mul(grad[:half], below[half : 2 * half], out=down[:half])
        torch.mul(grad[:half], below[:half], out=down[half : 2 * half])
        if below.shape[0] % 2:
            down[2 * half :] = grad[half:]
        grad = down
    return grad


class _SeparableProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor, delta: Tensor, normalize: bool) -> Tensor:
        ctx.save_for_backward(t, delta)
        ctx.normalize = normalize
        num_heads, num_ids, _ = t.shape
        num_knots, rank = delta.shape[2:]
        modes = t.new_empty(num_heads, num_ids, rank)
        for head in range(num_heads):
            splines = padded_splines(delta[head])
            for block in _blocks(t, rank):
                middle, values, _ = three_knots(t[head, block].T, num_knots, normalize)
                phi = torch.bmm(_dense_basis(middle, values, num_knots), splines)
                modes[head, block] = _product_tree(phi)[-1][0]
        return modes

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (grad_modes,) = grad_outputs
        t, delta = ctx.saved_tensors
        rank = delta.shape[-1]
        grad_t, grad_delta = torch.empty_like(t), torch.zeros_like(delta)
        for head in range(t.shape[0]):
            splines = padded_splines(delta[head])
            grad_splines = torch.zeros_like(splines)
            for block in _blocks(t, rank):
                grad_t[head, block] = _block_gradients(
                    t[head, block].T, splines, grad_modes[head, block][None], ctx.normalize, grad_splines
                ).T
            grad_delta[head] = grad_splines[:, 1:-1]
        return grad_t, grad_delta, None


def _block_gradients(
    t: Float[Tensor, "d n"],
    splines: Float[Tensor, "d knots_padded r"],
    grad: Float[Tensor, "1 n r"],
    normalize: bool,
    grad_splines: Float[Tensor, "d knots_padded r"],
) -> Float[Tensor, "d n"]:
    """The gradient of t; that of the splines is added to grad_splines. What a block needs ends with the call."""
    num_knots = splines.shape[1] - 2
    middle, values, slopes = three_knots(t, num_knots, normalize)
    basis = _dense_basis(middle, values, num_knots)
    grad_phi = _leave_one_out(_product_tree(torch.bmm(basis, splines)), grad)
    grad_splines.baddbmm_(basis.transpose(1, 2), grad_phi)
    grad_basis = torch.bmm(grad_phi, splines.transpose(1, 2))
    index = torch.stack([middle, middle + 1, middle + 2], -1)
    return (grad_basis.gather(-1, index).movedim(-1, 0) * slopes).sum(0)


def padded_splines(delta: Float[Tensor, "*h d κ r"]) -> Float[Tensor, "*h d knots_padded r"]:
    """The coefficients 1 + Δ with a row of zeros before the first knot and after the last."""
    return torch.nn.functional.pad(1 + delta, (0, 0, 1, 1))


def _blocks(t: Tensor, rank: int) -> list[slice]:
    num_ids, seed_size = t.shape[1:]
    values = _BLOCK_VALUES_GPU if t.is_cuda else _BLOCK_VALUES_CPU
    size = max(1, values // (seed_size * rank))
    return [slice(start, start + size) for start in range(0, num_ids, size)]
