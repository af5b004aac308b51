"""What every parameter is: the one table that tensor parallelism, the optimizer, checks and export read.

A parameter is either sharded over the tensor-parallel ranks along one dimension, or replicated on all of
them. The gradient of a replicated parameter is full on every rank (its output enters the column-parallel
layers through a region whose backward sums over the ranks), or partial where the module sees only this rank's
part of the sequence or of the distinct ids: then `complete_partial_gradients` sums it.
A parameter that no rule knows is an error at start-up, not a silent guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from leviathan_ds.config import ParallelConfig, TrainingConfig
from leviathan_ds.parallel import topology

Component = Literal["generator", "embedding", "body", "head"]


@dataclass(frozen=True)
class ParameterRule:
    """How the parameters whose full name matches `pattern` behave.

    Attributes:
        shard_dim: dimension split over the tensor-parallel ranks; None for a replicated parameter.
        num_stacked: matrices stacked along shard_dim (2 for SwiGLU's gate and up), each split by itself.
        partial_with: the switch of ParallelConfig under which each rank's gradient covers only its tokens or ids.
        undecayed: no weight decay; for the generator's (codebooks, LayerNorms) by the recipe's switch.
        is_vocabulary: the sharded dimension is the padded vocabulary.
    """

    pattern: str
    component: Component
    shard_dim: int | None = None
    num_stacked: int = 1
    partial_with: Literal["sequence_parallel", "split_distinct_ids"] | None = None
    undecayed: bool = False
    is_vocabulary: bool = False

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """This rank's part of a full parameter."""
        if self.shard_dim is None or size == 1:
            return full
        parts = [
            stacked.chunk(size, self.shard_dim)[rank] for stacked in full.chunk(self.num_stacked, self.shard_dim)
        ]
        return torch.cat(parts, self.shard_dim)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full parameter from the parts of all tensor-parallel ranks, in rank order."""
        if self.shard_dim is None or len(shards) == 1:
            return shards[0]
        stacked = zip(*(shard.chunk(self.num_stacked, self.shard_dim) for shard in shards), strict=True)
        return torch.cat([torch.cat(parts, self.shard_dim) for parts in stacked], self.shard_dim)

    def padded(self, full: Tensor, shape: Sequence[int]) -> Tensor:
        """A vocabulary's rows cut or filled with zeros to `shape`; any other parameter as it is.

        Their number depends on the tensor-parallel size; no computation reads those beyond the true vocabulary.
        """
        if not self.is_vocabulary or full.shape[0] == shape[0]:
            return full
        resized = full.new_zeros(shape)
        rows = min(full.shape[0], shape[0])
        resized[:rows] = full[:rows]
        return resized

    def full_shape(self, local: Sequence[int], size: int) -> list[int]:
        shape = list(local)
        if self.shard_dim is not None:
            shape[self.shard_dim] *= size
        return shape


_GENERATOR = r"embedding\.generator\."
_LAYER = r"decoder\.layers\.\d+\."
RULES: tuple[ParameterRule, ...] = (
    ParameterRule(
        _GENERATOR + r"(codebooks|norm_weight|norm_bias)",
        "generator",
        partial_with="split_distinct_ids",
        undecayed=True,
    ),
    ParameterRule(
        _GENERATOR + r"(seed_proj|spline_delta|out_proj|residual_proj)",
        "generator",
        partial_with="split_distinct_ids",
    ),
    ParameterRule(r"embedding\.word_embeddings\.weight", "embedding", shard_dim=0, is_vocabulary=True),
    ParameterRule(
        _LAYER + r"(input_layernorm|pre_mlp_layernorm)\.weight",
        "body",
        partial_with="sequence_parallel",
        undecayed=True,
    ),
    ParameterRule(_LAYER + r"self_attention\.linear_qkv\.weight", "body", shard_dim=0),
    ParameterRule(_LAYER + r"self_attention\.linear_proj\.weight", "body", shard_dim=1),
    ParameterRule(_LAYER + r"mlp\.linear_fc1\.weight", "body", shard_dim=0, num_stacked=2),
    ParameterRule(_LAYER + r"mlp\.linear_fc2\.weight", "body", shard_dim=1),
    ParameterRule(r"decoder\.final_layernorm\.weight", "body", partial_with="sequence_parallel", undecayed=True),
    ParameterRule(r"output_layer\.weight", "head", shard_dim=0, is_vocabulary=True),
)


def rule_for(name: str) -> ParameterRule:
    """The one rule of a parameter's name. Raises KeyError if none or several match."""
    matching = [rule for rule in RULES if re.fullmatch(rule.pattern, name)]
    if len(matching) != 1:
        raise KeyError(
            f"parameter {name!r} matches {len(matching)} rules of leviathan_ds.parallel.registry; add one rule "
            "that says whether it is sharded and how its gradient comes about"
        )
    return matching[0]


def named_rules(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterRule]]:
    """Every parameter of the model with its rule, in the model's order; shared parameters once."""
    for name, parameter in model.named_parameters():
        yield name, parameter, rule_for(name)


def mark_tensor_parallel(model: nn.Module) -> None:
    """Set the attributes by which DeepSpeed counts each parameter once in the gradient norm."""
    for _, parameter, rule in named_rules(model):
        parameter.tensor_model_parallel = rule.shard_dim is not None  # pyright: ignore
        parameter.partition_dim = -1 if rule.shard_dim is None else rule.shard_dim  # pyright: ignore


def complete_partial_gradients(model: nn.Module, parallel: ParallelConfig) -> None:
    """Make partial gradients full inside autograd: a sum over the tensor-parallel ranks.

    A hook on the parameter runs before anything sees the gradient, so DeepSpeed, whose own hooks know
    nothing of tensor parallelism, accumulates, reduces and clips a full gradient at every ZeRO stage.
    """
    if parallel.tensor_model_parallel_size == 1:
        return
    group = parallel_state.get_tensor_model_parallel_group()

    def sum_over_ranks(grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)  # a hook may not change its argument
        dist.all_reduce(grad, group=group)
        return grad

    for _, parameter, rule in named_rules(model):
        if rule.partial_with is not None and getattr(parallel, rule.partial_with):
            parameter.register_hook(sum_over_ranks)


def group_names(names: Iterable[str], training: TrainingConfig) -> dict[tuple[float, float], list[str]]:
    """(weight decay, learning-rate scale) of each of AdamW's groups → the names of its parameters.

    Norm weights never decay; the generator's vectors (codebooks, LayerNorms) by the switch.
    """
    scales = {
        "generator": training.generator_lr_scale,
        "embedding": training.table_lr_scale,
        "head": training.head_lr_scale,
    }
    groups: dict[tuple[float, float], list[str]] = {}
    for name in names:
        rule = rule_for(name)
        decays = not rule.undecayed or (rule.component == "generator" and training.decay_generator_vectors)
        key = (training.weight_decay if decays else 0.0, scales.get(rule.component, 1.0))
        groups.setdefault(key, []).append(name)
    return groups


def optimizer_groups(model: nn.Module, training: TrainingConfig) -> list[dict]:
    """Parameter groups for AdamW: with and without decay, and apart by learning-rate scale."""
    parameters = dict(model.named_parameters())
    groups = group_names(parameters, training)
    return [
        {"params": [parameters[name] for name in names], "weight_decay": decay, "lr_scale": scale}
        for (decay, scale), names in groups.items()
    ]


def differing_replicas(
    named_tensors: Iterable[tuple[str, Tensor]], data_parallel_replicas: bool
) -> dict[str, list[int]]:
    """Parameters whose replicas are not bitwise equal, each with the ranks that deviate from most others.

    Every tensor is read twice where it lies, and 8 bytes of it travel. Collective over all ranks; returns the
    same on every rank.

    Args:
        named_tensors: what this rank holds of every parameter, in the same order on all ranks.
        data_parallel_replicas: whether data-parallel ranks hold the same (ZeRO below 3) or each their own
            partition, which then only its tensor-parallel peers can repeat.
    """
    names, checksums = zip(*((name, bit_checksum(tensor)) for name, tensor in named_tensors), strict=True)
    ours = torch.stack([checksum.to(topology.device()) for checksum in checksums])  # offloaded ones too
    every = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(every, ours)
    found = torch.stack(every).cpu()  # [ranks, parameters]
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    ranks = torch.arange(len(found))
    differing = {}
    for column, name in enumerate(names):
        # Ranks with the same number hold the same: neighbours share a data-parallel rank (topology.initialize).
        holds = torch.zeros_like(ranks)
        if not data_parallel_replicas:
            holds += ranks // tensor_parallel * tensor_parallel
        if rule_for(name).shard_dim is not None:
            holds += ranks % tensor_parallel
        deviating = []
        for replicas in (ranks[holds == number] for number in holds.unique()):
            values, counts = found[replicas, column].unique(return_counts=True)
            usual = values[counts.argmax()]
            if len(values) > 1:  # of two that differ, nobody can say which is right
                tie = counts.max() * 2 <= len(replicas)
                deviating += (replicas if tie else replicas[found[replicas, column] != usual]).tolist()
        if deviating:
            differing[name] = sorted(deviating)
    return differing


def bit_checksum(tensor: Tensor) -> Tensor:
    """An int64 scalar of a tensor's bits, on its device; one changed element changes it, so does a swap of two.

    Sums of integers, weighted by row and by column: exact, so that their order cannot matter.
    """
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    bits = tensor.detach().contiguous().view(integer).reshape(rows, tensor.numel() // rows)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for dim, multiplier in ((1, 0x5851F42D4C957F2D), (0, 0x14057B7EF767814F)):
        sums = bits.sum(dim, dtype=torch.int64)
        weights = (torch.arange(len(sums), device=sums.device) * 2 + 1) * multiplier  # odd, so never a zero factor
        total = total + (sums * (weights ^ (weights >> 29))).sum()
    return total
