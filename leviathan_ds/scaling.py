"""Predicts the time of a step on many GPUs: FLOPs and bytes over assumed rates. Arithmetic, no measurement.

Imports no torch. `python benchmarks/scale.py --predict` prints it, docs/scaling.md says what it leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from leviathan_ds import accounting
from leviathan_ds.accounting import ZeroStage
from leviathan_ds.communication import Kind, communication
from leviathan_ds.config import Recipe

# Passes over the network of each byte of a ring collective, times (n - 1) / n.
_RING_PASSES: dict[Kind, int] = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "reduce": 1,
}


@dataclass(frozen=True)
class Cluster:
    """Assumed rates of one GPU; the defaults are the data sheet's of an H100 SXM with 400 Gb/s InfiniBand."""

    peak_flops: float = 989.4e12
    """Dense bf16."""
    compute_utilization: float = 0.45
    """Share of the peak that the computation alone attains."""
    nvlink_bytes_per_s: float = 450e9
    """In each direction."""
    network_bytes_per_s: float = 50e9
    """In each direction, one adapter a GPU."""
    link_utilization: float = 0.8
    """Share of a link's rate that large collectives attain."""
    gpus_per_node: int = 8

    def collective_s(self, kind: Kind, num_bytes: float, size: int, stride: int) -> float:
        """Seconds of a ring collective over `size` ranks that lie `stride` apart; latency not counted.

        A group that leaves its node does so over as many adapters as it has members in a node.
        """
        if size == 1:
            return 0.0
        in_node = max(1, min(size, self.gpus_per_node // stride))
        rate = self.nvlink_bytes_per_s
        if size > in_node:
            rate = min(self.network_bytes_per_s * in_node, rate)
        return _RING_PASSES[kind] * (size - 1) / size * num_bytes / (rate * self.link_utilization)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by what they are spent on."""

    compute_s: float
    data_parallel_s: float
    """With the few bytes over all ranks."""
    tensor_parallel_s: float

    @property
    def total_s(self) -> float:
        """Nothing overlaps, as in the files of ds_configs/ (overlap_comm is off)."""
        return self.compute_s + self.data_parallel_s + self.tensor_parallel_s

    @property
    def overlapped_s(self) -> float:
        """Data-parallel collectives hidden behind computation as far as they fit: a lower bound."""
        return max(self.compute_s, self.data_parallel_s) + self.tensor_parallel_s

    @property
    def communication_share(self) -> float:
        return 1 - self.compute_s / self.total_s


def predict_step(recipe: Recipe, zero_stage: ZeroStage, world_size: int, cluster: Cluster) -> StepTime:
    """Raises UserError for a number of ranks that does not divide the global batch."""
    tp = recipe.parallel.tensor_model_parallel_size
    tokens = recipe.training.global_batch_size * recipe.data.sequence_length
    flops = accounting.flops_per_token(recipe.model, recipe.data.sequence_length).total
    groups = {"dp": (world_size // tp, tp), "tp": (tp, 1), "world": (world_size, 1)}  # size and stride
    spent = dict.fromkeys(groups, 0.0)
    for (group, kind), num_bytes in communication(recipe, zero_stage, world_size).items():
        spent[group] += cluster.collective_s(kind, num_bytes, *groups[group])
    return StepTime(
        compute_s=tokens * flops / (world_size * cluster.peak_flops * cluster.compute_utilization),
        data_parallel_s=spent["dp"] + spent["world"],
        tensor_parallel_s=spent["tp"],
    )


def with_batch(recipe: Recipe, global_batch_size: int, world_size: int) -> Recipe | None:
    """The recipe at a global batch in sequences, in micro-batches no larger than its own that divide a rank's
    share; None where a rank would get less than a sequence."""
    data_parallel_size = world_size // recipe.parallel.tensor_model_parallel_size
    share, rest = divmod(global_batch_size, data_parallel_size)
    if share == 0 or rest:
        return None
    largest = min(share, recipe.training.micro_batch_size)
    micro = next(size for size in range(largest, 0, -1) if share % size == 0)
    training = replace(recipe.training, micro_batch_size=micro, global_batch_size=global_batch_size)
    return replace(recipe, training=training)
