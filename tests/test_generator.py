"""The generator against golden values and against its definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from leviathan_ds.config import GeneratorConfig
from leviathan_ds.model.generator import (
    SplineGenerator,
    digits,
    reference_separable_product,
    spline_basis,
)
from leviathan_ds.model.separable import portable_separable_product, three_knots
from leviathan_ds.model.separable_native import _library, separable_product

GOLDEN = Path(__file__).parent / "golden"
FILES = ("lev_small", "lev_paper_sizes", "lev_signs")


def generator_of(golden, dtype: torch.dtype, product) -> SplineGenerator:
    num_coordinates, base, seed_size = golden["codebooks"].shape
    num_heads, _, num_knots, rank = golden["spline_delta"].shape
    config = GeneratorConfig(num_coordinates, seed_size, num_heads, num_knots, rank, center_product=False)
    vocab_size, hidden_size = int(golden["vocab_size"]), golden["out_proj"].shape[-1]
    generator = SplineGenerator(vocab_size, hidden_size, config, product, dtype)
    assert generator.base == base
    with torch.no_grad():
        for name, parameter in generator.named_parameters():
            parameter.copy_(torch.from_numpy(golden[name]))
    return generator


def relative(found: Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.detach().double().numpy() - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("product", [reference_separable_product, portable_separable_product, separable_product])
@pytest.mark.parametrize("file", FILES)
def test_golden_values(file, product, dtype, tolerance):
    golden = np.load(GOLDEN / f"{file}.npz")
    generator = generator_of(golden, dtype, product)
    embeddings = generator(torch.from_numpy(golden["ids"]))
    assert relative(embeddings, golden["embeddings"]) <= tolerance
    embeddings.backward(torch.from_numpy(golden["grad_output"]).to(dtype))
    gradients = {name: parameter.grad for name, parameter in generator.named_parameters()}
    assert {f"grad_{name}" for name in gradients} == {
        name for name in golden.files if name.startswith("grad_")
    } - {"grad_output"}
    for name, gradient in gradients.items():
        assert relative(gradient, golden[f"grad_{name}"]) <= tolerance, name


def test_digits_are_most_significant_first():
    ids = torch.tensor([0, 1, 58, 59, 59 * 59, 200_375])
    expected = [[0, 0, 0], [0, 0, 1], [0, 0, 58], [0, 1, 0], [1, 0, 0], [57, 33, 11]]
    assert digits(ids, 59, 3).tolist() == expected
    assert 57 * 59**2 + 33 * 59 + 11 == 200_375


@pytest.mark.parametrize("normalize", [True, False])
def test_basis_has_three_knots_and_sums_to_one(normalize):
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    basis = spline_basis(t, 16, normalize)
    assert ((basis > 0).sum(-1) <= 3).all()
    inside = (t > 0.5 / 15) & (t < 1 - 0.5 / 15)
    total = basis.sum(-1)
    assert torch.allclose(total if normalize else total[inside], torch.ones(()).double(), atol=1e-12)
    if not normalize:
        assert total[0] == pytest.approx(0.875)  # the knot beyond the end is missing


@pytest.mark.parametrize("normalize", [True, False])
def test_three_knots_are_the_basis_and_its_slope(normalize):
    """Against the dense definition, its derivative by finite differences; the ends of the interval included."""
    t = torch.cat([torch.rand(500, dtype=torch.float64), torch.tensor([0.0, 1.0, 1e-9, 1 - 1e-9]).double()])
    middle, values, slopes = three_knots(t, 16, normalize)
    dense, step = spline_basis(t, 16, normalize), 1e-6
    numeric = (spline_basis(t + step, 16, normalize) - spline_basis(t - step, 16, normalize)) / (2 * step)
    found, found_slope = torch.zeros(len(t), 18).double(), torch.zeros(len(t), 18).double()
    for j in range(3):
        found.scatter_add_(1, middle[:, None] + j, values[j][:, None])
        found_slope.scatter_add_(1, middle[:, None] + j, slopes[j][:, None])
    assert torch.allclose(found[:, 1:-1], dense, atol=1e-12)
    inner = (t > step) & (t < 1 - step)
    assert torch.allclose(found_slope[inner, 1:-1], numeric[inner], atol=1e-4)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("seed_size", [1, 2, 7, 16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("product", [portable_separable_product, separable_product])
def test_fused_product_is_the_definition(product, seed_size, normalize, dtype, tolerance):
    """Odd and even trees, several blocks; gradients of both arguments by autograd through the definition."""
    generator = torch.Generator().manual_seed(seed_size)
    t = torch.rand(2, 53, seed_size, dtype=torch.float64, generator=generator)
    delta = torch.randn(2, seed_size, 5, 3, dtype=torch.float64, generator=generator)
    grad = torch.randn(2, 53, 3, dtype=torch.float64, generator=generator)
    results = []
    for each, kind in ((reference_separable_product, torch.float64), (product, dtype)):
        leaves = t.to(kind).requires_grad_(), delta.to(kind).requires_grad_()
        out = each(*leaves, normalize)
        results.append((out, *torch.autograd.grad(out, leaves, grad.to(kind))))
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_the_c_kernel_is_used_and_does_not_depend_on_threads():
    """float32 on a CPU with a compiler; each head is one sequential loop."""
    assert _library() is not None, "this machine has gcc"
    t, delta = torch.rand(4, 30, 8), torch.randn(4, 8, 6, 4)
    results = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        leaves = t.clone().requires_grad_(), delta.clone().requires_grad_()
        out = separable_product(*leaves, True)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        assert type(out.grad_fn).__name__ == "_NativeProductBackward"
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_without_a_compiler_the_portable_version_serves(monkeypatch):
    t, delta = torch.rand(2, 30, 8), torch.randn(2, 8, 6, 4)
    expected = separable_product(t, delta, True)
    monkeypatch.setattr("leviathan_ds.model.separable_native.shutil.which", lambda _: None)
    _library.cache_clear()
    try:
        assert _library() is None
        assert torch.allclose(separable_product(t, delta, True), expected, rtol=1e-4)
    finally:
        _library.cache_clear()


def test_blocks_do_not_change_the_result(monkeypatch):
    t, delta = torch.rand(2, 100, 8), torch.randn(2, 8, 6, 4) * 0.1
    whole = portable_separable_product(t, delta, True)
    monkeypatch.setattr("leviathan_ds.model.separable._BLOCK_VALUES_CPU", 8 * 4 * 7)
    assert torch.equal(portable_separable_product(t, delta, True), whole)


def test_a_zero_factor_has_a_finite_right_gradient():
    """φ = 0: the gradient of the factor that is zero is the product of the others."""
    t = torch.full((1, 1, 3), 0.5, dtype=torch.float64)
    delta = torch.zeros(1, 3, 5, 1, dtype=torch.float64)
    delta[0, 1] = -1.0  # φ of the second dimension is 0 for every knot
    delta.requires_grad_()
    out = separable_product(t, delta, True)
    assert out.item() == 0
    out.backward()
    assert delta.grad[0, 1].sum().item() == pytest.approx(1.0)
    assert delta.grad[0, 0].abs().sum().item() == delta.grad[0, 2].abs().sum().item() == 0


@pytest.mark.parametrize("product", [portable_separable_product, separable_product])
def test_a_point_that_is_no_number_stays_by_itself(product):
    """A diverged step must end as a NaN loss, which DeepSpeed skips in bf16, and not on a bad address."""
    t, delta = torch.rand(2, 5, 4), torch.randn(2, 4, 6, 3)
    t[0, 1, 2] = torch.nan
    out = product(t.requires_grad_(), delta.requires_grad_(), True)
    assert out[0, 1].isnan().all()
    assert out.isnan().sum() == 3
    out.sum().backward()
    assert t.grad[0, 1].isnan().any() and not t.grad[1].isnan().any()


def small(**changes) -> SplineGenerator:
    config = GeneratorConfig(seed_size=6, num_heads=2, num_knots=5, rank=3, **changes)
    generator = SplineGenerator(90, 4, config, dtype=torch.float64)
    with torch.no_grad():
        for index, parameter in enumerate(generator.parameters()):
            parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(index))
    return generator


def test_centring_takes_away_one_constant_vector():
    ids = torch.arange(90)
    centred, plain = small(center_product=True), small(center_product=False)
    difference = plain(ids) - centred(ids)
    constant = plain.out_proj.sum((0, 1))
    assert torch.allclose(difference, constant.expand(90, 4))


def test_residual_adds_the_projected_seed():
    ids = torch.arange(90)
    generator = small(residual=True)
    projected = generator.seed(ids) @ generator.residual_proj
    without = small(residual=False)
    assert torch.allclose(generator(ids), without(ids) + projected)


def test_table_is_every_id_in_order():
    generator = small()
    ids = torch.tensor([89, 3, 3, 41])
    assert torch.allclose(generator.table(chunk_tokens=7)[ids], generator(ids))
    assert torch.allclose(generator.table(ids), generator(ids))


def test_bfloat16_weights_keep_the_product_in_float32():
    """The product runs in float32 on rounded parameters; only the output map rounds again."""
    reference = small()
    rounded = small().to(torch.bfloat16)
    with torch.no_grad():
        for parameter, source in zip(reference.parameters(), rounded.parameters(), strict=True):
            parameter.copy_(source)
    ids = torch.arange(90)
    out = rounded(ids)
    assert out.dtype == torch.bfloat16
    error = (out.double() - reference(ids)).norm() / reference(ids).norm()
    assert error < 2**-7


@pytest.mark.parametrize("normalize", [True, False])
def test_the_basis_is_once_continuously_differentiable(normalize):
    """Value and slope agree from both sides of every breakpoint (midway between knots); the second one jumps."""
    num_knots = 8
    breaks = (torch.arange(1 - num_knots, num_knots).double() / 2 + (num_knots - 1) / 2) / (num_knots - 1)
    breaks = breaks[(breaks > 0) & (breaks < 1)]
    step = 1e-5

    def difference(t: Tensor, order: int) -> Tensor:
        """Of one side: the step is half of what keeps all points on that side of t."""
        if order == 0:
            return spline_basis(t, num_knots, normalize)
        return (difference(t + step, order - 1) - difference(t - step, order - 1)) / (2 * step)

    for order, tolerance in ((0, 1e-3), (1, 2e-2)):
        left, right = (difference(breaks + side * 2 * step, order) for side in (-1, 1))
        assert (left - right).abs().max() < tolerance
    halfway = breaks[::2]
    left, right = (difference(halfway + side * 4 * step, 2) for side in (-1, 1))
    assert (left - right).abs().max() > num_knots**2 / 2


@pytest.mark.parametrize("residual", [True, False])
def test_every_gradient_is_that_of_finite_differences(residual):
    """Through the whole generator, float64; the ids share digits, so that codebook rows are summed."""
    generator = small(residual=residual).double()
    names, parameters = zip(*generator.named_parameters(), strict=True)
    ids = torch.tensor([0, 1, 7, 30])

    def embeddings(*values: Tensor) -> Tensor:
        return torch.func.functional_call(generator, dict(zip(names, values, strict=True)), (ids,))

    assert torch.autograd.gradcheck(
        embeddings, [each.detach().requires_grad_() for each in parameters], fast_mode=True
    )
