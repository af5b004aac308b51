"""Weights outside a process group: one safetensors file per tensor-parallel rank, and the full model again.

Any ZeRO stage writes the same files (training/checkpoint.py gathers first), so evaluation, generation and
export read a checkpoint of any layout in one process, without DeepSpeed and without unpickling anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from data_prep.errors import UserError
from leviathan_ds.model.tensor_files import TensorFiles
from leviathan_ds.parallel import registry, topology

SHARD_FILES = "weights_tp*.safetensors"


def shard_file(tensor_parallel_rank: int) -> str:
    return f"weights_tp{tensor_parallel_rank:02d}.safetensors"


def weight_files(checkpoint: Path) -> list[Path]:
    """The weights of every tensor-parallel rank, in rank order.

    Raises UserError when there is none.
    """
    paths = sorted(checkpoint.glob(SHARD_FILES))
    if not paths:
        raise UserError(f"{checkpoint} holds no weights_tp*.safetensors; it is not a checkpoint of this trainer")
    return paths


class CheckpointWeights:
    """Every parameter of a checkpoint, unsharded, read when it is asked for (vocabulary rows still padded).

    Attributes:
        shapes: of every full parameter, by name.
        dtypes: likewise.

    Raises UserError when there is no weight file.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._shards = [TensorFiles([path]) for path in weight_files(checkpoint)]
        first, size = self._shards[0], len(self._shards)
        self.dtypes = first.dtypes
        self.shapes = {
            name: registry.rule_for(name).full_shape(shape, size) for name, shape in first.shapes.items()
        }

    def tensor(self, name: str) -> Tensor:
        """A full parameter."""
        return registry.rule_for(name).unshard([shard.tensor(name) for shard in self._shards])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a parameter whose rows are the vocabulary."""
        assert registry.rule_for(name).is_vocabulary
        per_rank = self._shards[0].shapes[name][0]
        return torch.cat(
            [
                shard.rows(name, max(0, start - rank * per_rank), min(per_rank, stop - rank * per_rank))
                for rank, shard in enumerate(self._shards)
                if start < (rank + 1) * per_rank and stop > rank * per_rank
            ]
        )


def full_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a checkpoint, unsharded, one at a time (vocabulary rows still padded).

    Raises UserError when there is no weight file.
    """
    weights = CheckpointWeights(checkpoint)
    for name in weights.shapes:
        yield name, weights.tensor(name)


def load_full_weights(model: nn.Module, checkpoint: Path) -> None:
    """Fill a model of any tensor-parallel degree from a checkpoint of any other.

    Vocabulary rows beyond the true vocabulary may differ in number: padding depends on the degree. Raises
    UserError when names or shapes do not match.
    """
    rank, size = topology.tensor_parallel_rank(), topology.tensor_parallel_size()
    parameters = {name: (parameter, rule) for name, parameter, rule in registry.named_rules(model)}
    seen = set()
    for name, full in full_weights(checkpoint):
        if name not in parameters:
            raise UserError(f"{checkpoint} holds {name}, which the recipe's model does not have")
        parameter, rule = parameters[name]
        shape = rule.full_shape(parameter.shape, size)
        full = rule.padded(full, shape)
        if list(full.shape) != shape:
            raise UserError(f"{checkpoint}: {name} is {list(full.shape)}, the recipe's model wants {shape}")
        with torch.no_grad():
            parameter.copy_(rule.shard(full, rank, size))
        seen.add(name)
    missing = parameters.keys() - seen
    if missing:
        raise UserError(f"{checkpoint} lacks {', '.join(sorted(missing))}")
