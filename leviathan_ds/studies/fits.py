"""The power law of loss in parameters, the dense model that equals a run, tokens to a loss. Numbers in and out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

HUBER_DELTA = 1e-3  # in log loss: beyond it a run counts linearly, as in Chinchilla's fit (arXiv 2203.15556)
MIN_SIZES = 4  # three sizes determine the three parameters and leave nothing to test them by
WIDEST = 2.0  # ratio of the interval's ends beyond which an equivalent size says little
EDGE = 1.02  # a run this near the smallest or largest dense size counts as at the end of them
_LEVELS = (2.5, 97.5)
_EXPONENTS = (0.01, 3.0)  # α's bounds


@dataclass(frozen=True)
class PowerLaw:
    """L(N) = E + A·N^-α, in nats per token over parameters."""

    irreducible: float
    """E."""
    amplitude: float
    """A."""
    exponent: float
    """α."""

    def loss(self, parameters: float) -> float:
        return self.irreducible + self.amplitude * parameters**-self.exponent

    def size_at(self, loss: float) -> float:
        """Parameters of the dense model with this loss; inf at or below E."""
        if loss <= self.irreducible:
            return math.inf
        log_size = (math.log(self.amplitude) - math.log(loss - self.irreducible)) / self.exponent
        return math.exp(log_size) if log_size < 700 else math.inf


@dataclass(frozen=True)
class Fit:
    """A power law with the laws of resampled runs, and why not to rely on it."""

    law: PowerLaw
    resampled: tuple[PowerLaw, ...]
    sizes: tuple[float, ...]
    """Distinct, ascending."""
    warnings: tuple[str, ...]

    def interval(self, values: Sequence[float]) -> tuple[float, float]:
        """The 95% interval of a number that every resampled law gave."""
        low, high = np.percentile(np.asarray(values), _LEVELS, method="nearest")  # inf stays inf
        return float(low), float(high)


@dataclass(frozen=True)
class Equivalent:
    """The dense model with the loss of some runs."""

    size: float
    multiplier: float
    """Over the runs' own parameters."""
    interval: tuple[float, float]
    """95%, of the multiplier: over resampled dense runs and these runs' seeds."""
    supported: bool
    """Whether the dense runs can answer, for better or worse: four sizes, some smaller and some larger than these
    runs. It depends on nothing that the runs turned out to be, so that it selects no outcome."""
    warnings: tuple[str, ...]


def fit_power_law(sizes: Sequence[float], losses: Sequence[float], num_starts: int = 3) -> PowerLaw:
    """Robust least squares in log loss from the best of 38 starts, one for each α.

    With x = log N and log L = log(e^(a - α·x) + e^e), over a, log α and e; e below the smallest loss. Raises
    ValueError with fewer than three distinct sizes.
    """
    if len(set(sizes)) < 3:
        raise ValueError("a power law with an offset has three parameters: it needs three sizes")
    log_size, loss = np.log(np.asarray(sizes, float)), np.asarray(losses, float)
    center = log_size.mean()
    x, log_loss, lowest = log_size - center, np.log(loss), math.log(loss.min())

    def residuals(theta: np.ndarray) -> np.ndarray:
        a, log_exponent, e = theta
        return np.logaddexp(a - np.exp(log_exponent) * x, e) - log_loss

    def jacobian(theta: np.ndarray) -> np.ndarray:
        a, log_exponent, e = theta
        exponent = np.exp(log_exponent)
        share = 1 / (1 + np.exp(e - a + exponent * x))  # of the loss that is reducible
        return np.stack([share, -share * exponent * x, 1 - share], 1)

    def start(exponent: float) -> list[float]:
        """For a given α the law is linear in E and A: plain least squares, relative errors."""
        columns = np.stack([np.ones_like(x), np.exp(-exponent * x)], 1) / loss[:, None]
        irreducible, amplitude = np.linalg.lstsq(columns, np.ones_like(loss), rcond=None)[0]
        irreducible = min(max(irreducible, 1e-3 * loss.min()), 0.999 * loss.min())
        amplitude = max(amplitude, 1e-3 * (loss.max() - irreducible))
        return [math.log(amplitude), math.log(exponent), math.log(irreducible)]

    starts = sorted(
        map(start, np.geomspace(*_EXPONENTS, 40)[1:-1]), key=lambda each: np.abs(residuals(np.array(each))).sum()
    )
    bounds = ([-np.inf, math.log(_EXPONENTS[0]), lowest - 12], [np.inf, math.log(_EXPONENTS[1]), lowest])
    found = [
        least_squares(
            residuals,
            each,
            jacobian,  # pyright: ignore[reportArgumentType]: a callable, as scipy documents
            bounds=bounds,
            loss="huber",
            f_scale=HUBER_DELTA,
            xtol=1e-10,
            ftol=1e-10,
        )
        for each in starts[:num_starts]
    ]
    a, log_exponent, e = min(found, key=lambda each: each.cost).x
    exponent = math.exp(log_exponent)
    return PowerLaw(math.exp(e), math.exp(a + exponent * center), exponent)


def fit_dense(sizes: Sequence[float], losses: Sequence[float], resamples: int = 200, seed: int = 0) -> Fit:
    """A power law through dense runs; its uncertainty by drawing runs with replacement (three sizes at least).

    Raises ValueError with fewer than three distinct sizes.
    """
    law = fit_power_law(sizes, losses)
    rng = np.random.default_rng(seed)
    all_sizes, all_losses = np.asarray(sizes, float), np.asarray(losses, float)
    resampled = []
    while len(resampled) < resamples:
        drawn = rng.integers(0, len(all_sizes), len(all_sizes))
        if len(set(all_sizes[drawn])) >= 3:
            resampled.append(fit_power_law(all_sizes[drawn].tolist(), all_losses[drawn].tolist(), num_starts=1))
    distinct = tuple(sorted(set(all_sizes.tolist())))
    warnings = []
    if len(distinct) < MIN_SIZES:
        warnings.append(f"{len(distinct)} sizes for three parameters: the curve is drawn through them, not tested")
    if law.irreducible < 0.05 * min(losses):
        warnings.append("E is near nought: the runs show no flattening, so the law is a plain power of N")
    if not 1.02 * _EXPONENTS[0] < law.exponent < 0.98 * _EXPONENTS[1]:
        warnings.append("α is at its bound: the runs do not determine it")
    return Fit(law, tuple(resampled), distinct, tuple(warnings))


def equivalent(fit: Fit, parameters: float, losses: Sequence[float], seed: int = 0) -> Equivalent:
    """The dense size of the mean loss of runs (one for each seed) of `parameters` parameters."""
    rng = np.random.default_rng(seed)
    observed = np.asarray(losses, float)
    size = fit.law.size_at(float(observed.mean()))
    multipliers = [
        law.size_at(float(rng.choice(observed, len(observed)).mean())) / parameters for law in fit.resampled
    ]
    low, high = fit.interval(multipliers)
    smallest, largest = fit.sizes[0], fit.sizes[-1]
    inside = smallest * EDGE < parameters < largest / EDGE
    warnings = list(fit.warnings)
    if not inside:
        warnings.append(
            f"own size at or beyond the ends of the dense runs' {smallest:,.0f} to {largest:,.0f} parameters"
        )
    if not math.isfinite(size):
        warnings.append("the loss lies at or below E: no dense size has it")
    elif not smallest <= size <= largest:
        warnings.append(
            f"extrapolated: the dense runs say {'more' if size > largest else 'less'} than "
            f"{(largest if size > largest else smallest) / parameters:.2f} ×, the law the rest"
        )
    if not high < WIDEST * low:
        warnings.append(f"the interval spans more than a factor of {WIDEST:g}")
    supported = inside and len(fit.sizes) >= MIN_SIZES
    return Equivalent(size, size / parameters, (low, high), supported, tuple(warnings))


def tokens_to_reach(tokens: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Tokens at which a curve of evaluations first reaches a loss, interpolated linearly; None: it never does."""
    points = sorted(zip(tokens, losses, strict=True))
    for index, (at, loss) in enumerate(points):
        if loss <= target:
            if index == 0:
                return float(at)
            before, higher = points[index - 1]
            return before + (at - before) * (higher - target) / (higher - loss)
    return None
