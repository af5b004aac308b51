"""Theorem 1.1 of the paper, run: sums of products of one-dimensional functions are dense in C([0,1]^d).

A smooth function is approximated by Σ_ρ Π_c φ_{c,ρ}(x_c), each φ a combination of the generator's own B-splines;
the largest error over [0,1]^d falls as modes (ρ) and knots are added. R modes, κ knots, d dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from leviathan_ds.model.generator import spline_basis

Function = Callable[..., np.ndarray]

FUNCTIONS: dict[str, tuple[int, Function]] = {
    "sin 2π(x + y)": (2, lambda x, y: np.sin(2 * np.pi * (x + y))),
    "exp(−8(x − y)²)": (2, lambda x, y: np.exp(-8 * (x - y) ** 2)),
    "1 / (1 + 4‖x − ½‖²), d = 3": (
        3,
        lambda x, y, z: 1 / (1 + 4 * ((x - 0.5) ** 2 + (y - 0.5) ** 2 + (z - 0.5) ** 2)),
    ),
}
_POINTS = {2: 96, 3: 72}  # of the grid in each dimension, for the fit; errors are taken between them
_SWEEPS = 40


def basis(points: np.ndarray, num_knots: int) -> np.ndarray:
    """The generator's normalised quadratic B-splines, [n, κ]."""
    return spline_basis(torch.from_numpy(points), num_knots, True).numpy()


def errors(
    dimensions: int, function: Function, num_knots: int, modes: Sequence[int], seed: int = 0
) -> list[float]:
    """Largest error over the largest value of |f|, for each number of modes (ascending).

    Alternating least squares on a grid; each further mode starts from what the ones before leave, so that the fit
    never gets worse.
    """
    n = _POINTS[dimensions]
    grid = np.linspace(0, 1, n)
    between = (grid[1:] + grid[:-1]) / 2
    values = function(*np.meshgrid(*[grid] * dimensions, indexing="ij"))
    truth = function(*np.meshgrid(*[between] * dimensions, indexing="ij"))
    on_grid, inverse = basis(grid, num_knots), np.linalg.pinv(basis(grid, num_knots))
    rng = np.random.default_rng(seed)
    coefficients = [np.zeros((num_knots, 0)) for _ in range(dimensions)]
    found = []
    for count in modes:
        added = count - coefficients[0].shape[1]
        coefficients = [np.hstack([each, rng.normal(0, 0.5, (num_knots, added))]) for each in coefficients]
        coefficients[0][:, count - added :] = 0  # the sum is unchanged until the first solve
        for _ in range(_SWEEPS):
            for axis in range(dimensions):
                others = [on_grid @ each for place, each in enumerate(coefficients) if place != axis]
                unfolded = np.moveaxis(values, axis, 0).reshape(n, -1)
                # φ = B C, so that f ≈ B C Kᵀ with K the other factors' products at every grid point.
                solution = np.linalg.lstsq(_products(others), (inverse @ unfolded).T, rcond=1e-10)[0].T
                scale = np.linalg.norm(solution, axis=0) + 1e-300
                coefficients[axis] = solution / (scale if axis < dimensions - 1 else 1)
        factors = [basis(between, num_knots) @ each for each in coefficients]
        approximation = (_products(factors[:-1]) @ factors[-1].T).reshape(truth.shape)
        found.append(float(np.abs(approximation - truth).max() / np.abs(truth).max()))
    return found


def _products(factors: list[np.ndarray]) -> np.ndarray:
    """Products of one row of each factor, for all combinations of rows: [Π n_c, R]."""
    result = factors[0]
    for factor in factors[1:]:
        result = (result[:, None] * factor[None]).reshape(-1, factor.shape[1])
    return result


def demonstration(
    modes: Sequence[int] = (1, 2, 3, 4, 6, 8), knots: Sequence[int] = (4, 8, 16, 32)
) -> list[dict[str, Any]]:
    """A row for each function and number of knots: the error at each number of modes."""
    return [
        {
            "function": name,
            "knots": num_knots,
            "errors": dict(zip(modes, errors(d, f, num_knots, modes), strict=True)),
        }
        for name, (d, f) in FUNCTIONS.items()
        for num_knots in knots
    ]
