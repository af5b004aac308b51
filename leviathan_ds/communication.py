"""What a rank communicates in one optimizer step, as a closed formula. Arithmetic over the configuration.

Imports no torch. `parallel/collectives.py` counts the same in a real run, and tests demand equality to the byte.
docs/scaling.md writes the formula out and says what follows from it.

t tensor-parallel size, N data-parallel size, e bytes of the training precision, T tokens of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from leviathan_ds.accounting import DISTINCT_IDS_PER_TOKEN, ZeroStage, element_bytes
from leviathan_ds.config import Recipe, integer_root

Group = Literal["dp", "tp", "world"]
"""Data-parallel, tensor-parallel, or all ranks. All ranks are "dp" or "tp" where they are one such group."""
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]

Traffic = Counter[tuple[Group, Kind]]
"""Bytes by group and kind of collective, of the whole tensor: reduced, gathered, or about to be scattered."""


@dataclass(frozen=True)
class Zero3Limits:
    """Keys of DeepSpeed's zero_optimization that decide what ZeRO-3 gathers again; its defaults."""

    param_persistence_threshold: int = 100_000
    """Elements up to which a parameter stays whole on every rank between steps."""
    max_reuse_distance: int = 1_000_000_000
    """A gathered parameter is kept if fewer elements than these are used before it is used again."""


class _Tensor(NamedTuple):
    """A parameter of one tensor-parallel rank."""

    module: str
    name: str
    numel: int
    decayed: bool


def communication(
    recipe: Recipe,
    zero_stage: ZeroStage,
    world_size: int,
    distinct_ids: Sequence[int] | None = None,
    limits: Zero3Limits | None = None,
) -> Traffic:
    """Bytes that each rank passes to collectives in one optimizer step, that of a run with its guard, exactly.

    Steps that are logged or skipped add what docs/scaling.md says. Groups of one rank move nothing. Exact for the
    configurations of ds_configs/ from the third step on (ZeRO-3 traces the first two), without overlap_comm or
    offloading; under ZeRO-3 also without prefetching or for models of less than half `max_reuse_distance`: a
    prefetch can keep parameters that it would else have released.

    Args:
        distinct_ids: of each micro-batch, where the tensor-parallel ranks share the generator
            (`parallel.split_distinct_ids`); None: as many as accounting assumes.
        limits: of ZeRO-3, by default DeepSpeed's.
    """
    tp = recipe.parallel.tensor_model_parallel_size
    passes = recipe.gradient_accumulation_steps(world_size)
    data_parallel_size = world_size // tp
    traffic: Traffic = Counter()
    if data_parallel_size > 1:
        traffic += _data_parallel(recipe, zero_stage, data_parallel_size, passes, limits or Zero3Limits())
    if tp > 1:
        for kind, num_bytes in _activations(recipe).items():
            traffic["tp", kind] += passes * num_bytes
        if recipe.model.embedding == "leviathan" and recipe.parallel.split_distinct_ids:
            tokens = recipe.training.micro_batch_size * recipe.data.sequence_length
            assumed = [int(tokens * DISTINCT_IDS_PER_TOKEN)] * passes
            traffic += _shared_generator(recipe, assumed if distinct_ids is None else distinct_ids)
    return (
        traffic + _norms_and_overflow(recipe, zero_stage, data_parallel_size) + _votes(zero_stage, tp, world_size)
    )


def _data_parallel(recipe: Recipe, zero_stage: ZeroStage, size: int, passes: int, limits: Zero3Limits) -> Traffic:
    """Gradients and weights over the data-parallel ranks.

    | stage | gradients | weights |
    |---|---|---|
    | 0 | all-reduce e·P once | |
    | 1 | all-reduce e·P once, in bf16 padded as the weights | all-gather e·P, each optimizer group padded to 2·N |
    | 2 | all-reduce e·P for each micro-batch | the same |
    | 3 | reduce-scatter e·P for each micro-batch, each tensor padded to N | all-gather: tensors up to \
`param_persistence_threshold` once, others for each micro-batch (`_gathers`) |

    DeepSpeed's stages 1 and 2 reduce by all-reduce and drop what is not theirs.
    """
    e = element_bytes(recipe.training.precision)
    tensors = _tensors(recipe)
    if zero_stage < 3:
        groups = Counter[tuple[float, float]]()
        for tensor in tensors:
            groups[_optimizer_group(recipe, tensor)] += tensor.numel
        weights = e * sum(_padded(numel, 2 * size) for numel in groups.values())
        gradients = e * sum(groups.values()) * (passes if zero_stage == 2 else 1)
        if zero_stage == 1 and recipe.training.precision == "bf16":
            gradients = weights
        return Counter({("dp", "all_reduce"): gradients, ("dp", "all_gather"): weights if zero_stage else 0})
    padded = {(tensor.module, tensor.name): _padded(tensor.numel, size) for tensor in tensors}
    persistent = [tensor for tensor in tensors if tensor.numel <= limits.param_persistence_threshold]
    gathered = sum(padded[tensor.module, tensor.name] for tensor in persistent)
    for tensor in set(tensors) - set(persistent):
        times = _gathers(recipe, tensors, tensor, limits.max_reuse_distance)
        gathered += passes * times * padded[tensor.module, tensor.name]
    return Counter(
        {("dp", "reduce_scatter"): e * passes * sum(padded.values()), ("dp", "all_gather"): e * gathered}
    )


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def _gathers(recipe: Recipe, tensors: Sequence[_Tensor], tensor: _Tensor, max_reuse_distance: int) -> int:
    """How often ZeRO-3 gathers a tensor for one micro-batch: at its first use, and after every long pause."""
    elements = Counter[str]()
    for each in tensors:
        elements[each.module] += each.numel
    users = {tensor.module}
    if recipe.model.embedding == "dense_tied":
        elements["head"] = elements["table"]
        users |= {"head"} if tensor.module == "table" else set()
    gathers, distance = 0, max_reuse_distance
    for module in _module_calls(recipe):
        if module in users:
            gathers += distance >= max_reuse_distance
            distance = 0
        else:
            distance += elements[module]
    return gathers


def _module_calls(recipe: Recipe) -> Iterator[str]:
    """Modules in the order in which forward and backward use them, recomputation included."""
    layers = range(recipe.model.num_layers)
    input_module = "generator" if recipe.model.embedding == "leviathan" else "table"
    ends = ["final_layernorm", "head"]
    attention, mlp = ["input_layernorm", "qkv", "proj"], ["pre_mlp_layernorm", "fc1", "fc2"]
    yield input_module
    for layer in layers:
        yield from (f"{layer}.{module}" for module in attention + mlp)
    yield from ends
    yield from reversed(ends)
    again = {"none": [], "selective": mlp[1:], "full": attention + mlp}[recipe.training.recompute]
    for layer in reversed(layers):
        yield from (f"{layer}.{module}" for module in again)
        yield from (f"{layer}.{module}" for module in reversed(attention + mlp))
    yield input_module


def _activations(recipe: Recipe) -> dict[Kind, int]:
    """Over the tensor-parallel ranks for one micro-batch, with A = e·T·D bytes of hidden states.

    Without sequence parallelism all-reduces: two forward and two backward a layer, one behind the head, one
    behind a table. With it each becomes a reduce-scatter and an all-gather, every column-parallel input is
    gathered once more for its weight's gradient, and the norms' partial gradients are summed. The loss sums
    three float32 values a token. A recomputed layer repeats its forward's.
    """
    model, training = recipe.model, recipe.training
    e = element_bytes(training.precision)
    tokens = training.micro_batch_size * recipe.data.sequence_length
    hidden = e * tokens * model.hidden_size
    layers, table = model.num_layers, model.embedding != "leviathan"
    repeated = layers * {"none": 0, "selective": 1, "full": 2}[training.recompute]
    loss = 4 * 3 * tokens
    if not recipe.parallel.sequence_parallel:
        return {"all_reduce": hidden * (4 * layers + 1 + table + repeated) + loss}
    norms = e * (2 * layers + 1) * model.hidden_size
    return {
        "all_reduce": norms + loss,
        "all_gather": hidden * (6 * layers + 2 + repeated),
        "reduce_scatter": hidden * (4 * layers + 1 + table + repeated),
    }


def _shared_generator(recipe: Recipe, distinct_ids: Sequence[int]) -> Traffic:
    """Ranks that share the generator gather e·m·D bytes of embeddings and sum its e·G bytes of gradients."""
    e, tp = element_bytes(recipe.training.precision), recipe.parallel.tensor_model_parallel_size
    generator = sum(tensor.numel for tensor in _tensors(recipe) if tensor.module == "generator")
    traffic: Traffic = Counter()
    for ids in distinct_ids:
        traffic["tp", "all_gather"] += e * _padded(ids, tp) * recipe.model.hidden_size
        traffic["tp", "all_reduce"] += e * generator
    return traffic


def _norms_and_overflow(recipe: Recipe, zero_stage: ZeroStage, data_parallel_size: int) -> Traffic:
    """The few bytes of gradient norms and overflow checks, as DeepSpeed computes them for each stage."""
    bf16 = recipe.training.precision == "bf16"
    groups = len({_optimizer_group(recipe, tensor) for tensor in _tensors(recipe)})
    dp, tp = {
        0: (4, 4),
        1: (0, 4) if bf16 else (4 * groups, 4 * groups),
        2: (4 * groups + bf16, 4 * groups + bf16),
        3: (8 * groups, 8 * groups),
    }[zero_stage]
    traffic: Traffic = Counter()
    if data_parallel_size > 1:
        traffic["dp", "all_reduce"] = dp
    if recipe.parallel.tensor_model_parallel_size > 1:
        traffic["tp", "all_reduce"] = tp
    return traffic


def _votes(zero_stage: ZeroStage, tensor_parallel_size: int, world_size: int) -> Traffic:
    """Over all ranks, in float32: the guard's ballot of three (`faults.StepGuard.vote`), and at ZeRO-0, where
    DeepSpeed does not look itself, whether the gradient is finite (`engine.step`)."""
    if world_size == 1:
        return Counter()
    group: Group = "dp" if tensor_parallel_size == 1 else "tp" if tensor_parallel_size == world_size else "world"
    return Counter({(group, "all_reduce"): 4 * 3 + (4 if zero_stage == 0 else 0)})


def _optimizer_group(recipe: Recipe, tensor: _Tensor) -> tuple[float, float]:
    """Weight decay and learning-rate scale: what tells `registry.optimizer_groups` apart."""
    training = recipe.training
    decays = tensor.decayed or (tensor.module == "generator" and training.decay_generator_vectors)
    scales = {
        "generator": training.generator_lr_scale,
        "table": training.table_lr_scale,
        "head": training.head_lr_scale,
    }
    return (training.weight_decay if decays else 0.0, scales.get(tensor.module, 1.0))


def _tensors(recipe: Recipe) -> list[_Tensor]:
    """The parameters of one tensor-parallel rank, a shared one once."""
    model, tp = recipe.model, recipe.parallel.tensor_model_parallel_size
    hidden, head = model.hidden_size, model.head_size
    matrix = model.padded_vocab_size(tp) // tp * hidden
    tensors = []
    if model.embedding == "leviathan":
        sizes = model.generator
        d, h, r = sizes.seed_size, sizes.num_heads, sizes.rank
        k = sizes.num_coordinates
        tensors += [
            _Tensor("generator", "codebooks", k * integer_root(model.vocabulary, k) * d, False),
            _Tensor("generator", "norm_weight", h * d, False),
            _Tensor("generator", "norm_bias", h * d, False),
            _Tensor("generator", "seed_proj", h * d * d, True),
            _Tensor("generator", "spline_delta", h * d * sizes.num_knots * r, True),
            _Tensor("generator", "out_proj", h * r * hidden, True),
        ]
        if sizes.residual:
            tensors.append(_Tensor("generator", "residual_proj", d * hidden, True))
    else:
        tensors.append(_Tensor("table", "weight", matrix, True))
    for layer in range(model.num_layers):
        qkv = hidden * (model.num_attention_heads + 2 * model.query_groups) * head // tp
        tensors += [
            _Tensor(f"{layer}.input_layernorm", "weight", hidden, False),
            _Tensor(f"{layer}.qkv", "weight", qkv, True),
            _Tensor(f"{layer}.proj", "weight", hidden * model.num_attention_heads * head // tp, True),
            _Tensor(f"{layer}.pre_mlp_layernorm", "weight", hidden, False),
            _Tensor(f"{layer}.fc1", "weight", 2 * hidden * model.ffn_size // tp, True),
            _Tensor(f"{layer}.fc2", "weight", hidden * model.ffn_size // tp, True),
        ]
    tensors.append(_Tensor("final_layernorm", "weight", hidden, False))
    if model.embedding != "dense_tied":
        tensors.append(_Tensor("head", "weight", matrix, True))
    return tensors
