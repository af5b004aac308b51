"""Weights outside a process group: one safetensors file per tensor-parallel rank, and the full model again.

Any ZeRO stage writes the same files (training/checkpoint.py gathers first), so evaluation, generation and
export read a checkpoint of any layout in one process, without DeepSpeed and without unpickling anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from data_prep.errors import UserError
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


def full_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a checkpoint, unsharded, one at a time (vocabulary rows still padded).

    Raises UserError when there is no weight file.
    """
    with ExitStack() as stack:
        shards = [stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(checkpoint)]
        for name in shards[0].keys():
            yield name, registry.rule_for(name).unshard([shard.get_tensor(name) for shard in shards])


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
