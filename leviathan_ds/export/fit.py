"""A generator whose table comes close to a given one: a short regression, for runs that begin with another model.

A generator has far fewer parameters than a table and its rows span at most heads × rank dimensions: the result is
an approximation, and what it misses is reported. V vocabulary, D hidden size, n ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from leviathan_ds.config import ModelConfig, ParallelConfig
from leviathan_ds.model.embedding import GeneratorEmbedding
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.parallel import topology

NUM_GROUPS = 10


@dataclass(frozen=True)
class FitOptions:
    """The regression: Adam with a cosine schedule, each step on `batch_ids` distinct ids drawn by `seed`."""

    steps: int = 2000
    batch_ids: int = 1024
    lr: float = 3e-3
    seed: int = 1234


DEFAULT_FIT = FitOptions()


@dataclass(frozen=True)
class Error:
    """Of a group of rows: ‖fitted - given‖ / ‖given‖ over all their numbers, and the mean cosine of a row."""

    relative: float
    cosine: float


@dataclass(frozen=True)
class Fit:
    """A fitted generator's parameters by name, float32 on the CPU, and its table's error."""

    generator: dict[str, Tensor]
    error: Error
    row_squares: NDArray[np.float64]
    """[V, 2] squared norms of the rows' errors and of the given rows."""
    row_cosines: NDArray[np.float64]
    """[V]"""

    def by_frequency(self, counts: NDArray[np.int64]) -> list[Error]:
        """The error of ten groups of equally many ids, those that occur most first. counts: [at most V]."""
        padded = np.zeros(len(self.row_cosines), np.int64)
        padded[: len(counts)] = counts
        groups = np.array_split(np.argsort(-padded, kind="stable"), NUM_GROUPS)
        return [_error(self.row_squares[ids], self.row_cosines[ids]) for ids in groups]


def fit_generator(table: Float[Tensor, "V D"], model: ModelConfig, options: FitOptions = DEFAULT_FIT) -> Fit:
    """Fit a new generator of the recipe's sizes to a table. Deterministic on one device, which is this process's.

    Needs `topology.initialize(1)`.
    """
    embedding = GeneratorEmbedding(model, ParallelConfig())
    initialize_weights(nn.ModuleDict({"embedding": embedding}), model, options.seed)
    generator = embedding.generator.to(topology.device())
    table = table.to(topology.device())
    # The regression is of a table with standard deviation 1: its own would make the rate of Adam too high or low.
    scale = table.std().clamp_min(torch.finfo(torch.float32).tiny)
    optimizer = torch.optim.Adam(generator.parameters(), lr=options.lr)
    draw = torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        rate = options.lr * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = torch.randperm(len(table), generator=draw)[: options.batch_ids].to(table.device)
        loss = nn.functional.mse_loss(generator(ids), table[ids] / scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        generator.out_proj.mul_(scale)
        if model.generator.residual:
            generator.residual_proj.mul_(scale)
    squares, cosines = _rows(generator, table)
    weights = {name: parameter.detach().cpu() for name, parameter in generator.named_parameters()}
    return Fit(weights, _error(squares, cosines), squares, cosines)


def _rows(generator: nn.Module, table: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    squares, cosines = [], []
    with torch.no_grad():
        for ids in torch.arange(len(table), device=table.device).split(8192):
            found, given = generator(ids), table[ids]
            squares.append(torch.stack([(found - given).square().sum(-1), given.square().sum(-1)], -1).cpu())
            cosines.append(nn.functional.cosine_similarity(found, given, dim=-1).cpu())
    return torch.cat(squares).double().numpy(), torch.cat(cosines).double().numpy()


def _error(squares: NDArray[np.float64], cosines: NDArray[np.float64]) -> Error:
    missed, given = squares.sum(0)
    return Error(math.sqrt(missed / given) if given else math.inf, float(cosines.mean()))
