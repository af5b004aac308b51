"""What a recipe costs: parameters, floating-point operations, memory per GPU. Arithmetic over the configuration.

Imports no torch, so that `launchers/describe.py` answers at once. Parameter counts are exact (tests compare
them with the built model), FLOPs follow a stated convention (tests compare them with torch's counter), memory
is an estimate.

V vocabulary, D hidden size, L layers, n attention heads, g query groups, c head size, F feed-forward size,
s sequence length, t tensor-parallel size; d, h, κ, r the generator's seed size, heads, knots and rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from leviathan_ds.config import ModelConfig, Precision, Recipe

ZeroStage = Literal[0, 1, 2, 3]

DISTINCT_IDS_PER_TOKEN = 0.45
"""Distinct ids of a micro-batch over its tokens: 3,728 among 8,192 Zipf-distributed ids of V = 200,376.
An assumption; a longer micro-batch repeats more, and the generator is at most a few percent of a step's FLOPs."""

GENERATOR_BLOCK_VALUES = 1 << 24
"""Values φ that exist at once on a GPU (model/separable.py)."""

ZERO3_LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default stage3_max_live_parameters: so many stay gathered on every rank."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of generator or table, body and head; a tied table counts once, as embedding."""

    embedding: int
    body: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.body + self.head


def count_parameters(model: ModelConfig, tensor_parallel_size: int = 1, padded: bool = False) -> ParameterCount:
    """Parameters of the whole model over all tensor-parallel ranks, replicated ones once.

    Args:
        padded: count the rows that are stored (the vocabulary padded for this tensor-parallel size), as
            model.parameters() does; otherwise the true vocabulary's.
    """
    rows = model.padded_vocab_size(tensor_parallel_size) if padded else model.vocabulary
    matrix = rows * model.hidden_size
    embedding = matrix
    if model.embedding == "leviathan":
        embedding = model.generator.num_parameters(model.vocabulary, model.hidden_size)
    head = 0 if model.embedding == "dense_tied" else matrix
    return ParameterCount(embedding, _body_matrices(model) + _norms(model), head)


def parameters_per_rank(model: ModelConfig, tensor_parallel_size: int) -> int:
    """Parameters that one tensor-parallel rank holds before ZeRO: matrices / t, generator and norms whole."""
    count = count_parameters(model, tensor_parallel_size, padded=True)
    replicated = _norms(model) + (count.embedding if model.embedding == "leviathan" else 0)
    return replicated + (count.total - replicated) // tensor_parallel_size


def _layer_matrices(model: ModelConfig) -> int:
    heads = (2 * model.num_attention_heads + 2 * model.query_groups) * model.head_size  # q, output; k, v
    return model.hidden_size * (heads + 3 * model.ffn_size)


def _body_matrices(model: ModelConfig) -> int:
    return model.num_layers * _layer_matrices(model)


def _norms(model: ModelConfig) -> int:
    return (2 * model.num_layers + 1) * model.hidden_size


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations of one training step, forward and backward, per token of the batch."""

    embedding: float
    body: int
    attention: int
    head: int

    @property
    def total(self) -> float:
        return self.embedding + self.body + self.attention + self.head


def flops_per_token(
    model: ModelConfig, sequence_length: int, distinct_ids_per_token: float = DISTINCT_IDS_PER_TOKEN
) -> FlopsPerToken:
    """Model FLOPs per token: 2 a multiply-add, backward twice forward, recomputation not counted.

    | part | forward FLOPs per token |
    |---|---|
    | body | 2 × the parameters of the layers' matrices: D·(2·n·c + 2·g·c + 3·F) each |
    | attention | 4·n·c·s a layer: scores and weighted values over the full s × s square |
    | head | 2·D·V with the true vocabulary; padding is no work of the model |
    | table | 0: a lookup |
    | generator | distinct_ids_per_token × (2·h·d² + (2·3 + 1)·h·d·r + 2·h·r·D), and 2·d·D with the residual |

    The attention convention is PaLM's (arXiv 2204.02311, appendix B), whose MFU most others report; a causal
    kernel skips half of the square, so that MFU flatters long sequences a little. The generator runs once for
    each distinct id of a micro-batch, and is counted by its definition (three non-zero knots, then the
    product), not by what a kernel spends on it. Norms, activation functions, softmax and rotary embedding are
    not counted, as is customary.

    Args:
        sequence_length: tokens a sample.
        distinct_ids_per_token: distinct ids of a micro-batch over its tokens.
    """
    return FlopsPerToken(
        embedding=3 * distinct_ids_per_token * _generator_forward_flops(model),
        body=6 * _body_matrices(model),
        attention=12 * model.num_layers * model.num_attention_heads * model.head_size * sequence_length,
        head=6 * model.hidden_size * model.vocabulary,
    )


def _generator_forward_flops(model: ModelConfig) -> int:
    if model.embedding != "leviathan":
        return 0
    sizes, hidden = model.generator, model.hidden_size
    d, h, r = sizes.seed_size, sizes.num_heads, sizes.rank
    flops = 2 * h * d * d + (2 * 3 + 1) * h * d * r + 2 * h * r * hidden
    return flops + (2 * d * hidden if sizes.residual else 0)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU. The working lines peak at different moments, so their sum errs upwards."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    generator: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss + self.generator


def estimate_memory(recipe: Recipe, data_parallel_size: int, zero_stage: ZeroStage) -> MemoryEstimate:
    """An estimate of the memory of one GPU in training, from reading the code and not from a GPU.

    N parameters of a rank, P = N / data-parallel size, e bytes of the training precision (2 bf16, 4 fp32),
    T tokens of a micro-batch.

    | line | bytes |
    |---|---|
    | weights | e·N; ZeRO-3 e·P and what it keeps gathered: e·min(N, 10⁹) with DeepSpeed's default |
    | gradients | e·N; from ZeRO-2 on e·P |
    | optimizer | fp32 master and two moments, 12·N; from ZeRO-1 on 12·P; fp32 without ZeRO has no master: 8·N |
    | activations | e·T·(L·kept + live + 2·D), see `_body_activations` |
    | loss | logits of one chunk, the head's gradient in float32 and in e |
    | generator | what it keeps for each distinct id, and 4 times its block of values φ, as its backward needs |

    Not counted: communication buckets (ZeRO's reduce_bucket_size, by default 5·10⁸ elements), the CUDA
    context, NCCL, the allocator's fragments, offloading, a validation's logits. Leave some GiB for them.
    """
    model, training = recipe.model, recipe.training
    tp = recipe.parallel.tensor_model_parallel_size
    element = element_bytes(training.precision)
    whole = parameters_per_rank(model, tp)
    part = -(-whole // data_parallel_size)
    tokens = training.micro_batch_size * recipe.data.sequence_length
    weights = element * whole if zero_stage < 3 else element * (part + min(whole, ZERO3_LIVE_PARAMETERS))
    # DeepSpeed's ZeRO optimizers clone the weights into a master copy even in fp32.
    state_bytes = 8 if training.precision == "fp32" and zero_stage == 0 else 12
    return MemoryEstimate(
        weights=weights,
        gradients=element * (whole if zero_stage < 2 else part),
        optimizer=state_bytes * (whole if zero_stage < 1 else part),
        activations=element * tokens * _body_activations(recipe),
        loss=_loss_workspace(model, tp, min(tokens, training.loss_chunk_tokens), element),
        generator=_generator_workspace(model, tokens, element),
    )


def checkpoint_bytes(recipe: Recipe, zero_stage: int) -> int:
    """Bytes of one checkpoint over all ranks, estimated: small files and pickle's framing are left out.

    N parameters of a tensor-parallel rank, e bytes of the training precision: t times e·N of plain weights, and
    in DeepSpeed's files e·N of weights below ZeRO-3, and the optimizer's fp32 master and two moments, 12·N (8·N
    without ZeRO, which has no master).
    """
    tp = recipe.parallel.tensor_model_parallel_size
    element = element_bytes(recipe.training.precision)
    weights = element * (2 if zero_stage < 3 else 1)
    return tp * parameters_per_rank(recipe.model, tp) * (weights + (8 if zero_stage == 0 else 12))


def element_bytes(precision: Precision) -> int:
    """Bytes of an element of weights, gradients and activations in training."""
    return 2 if precision == "bf16" else 4


def _body_activations(recipe: Recipe) -> int:
    """Values per token that the decoder keeps for the backward pass on one rank.

    A layer keeps 4·D (inputs and outputs of two norms; /t under sequence parallelism) and, over t:
    n·c + 2·g·c of the fused QKV output (the values are a view of it), n·c + g·c of rotated queries and keys,
    n·c of the context, 5·F of the MLP (gate and up, SiLU of the gate, up + 0, product).
    Selective recomputation drops the MLP's 5·F, full keeps the layer's input D alone; either way one layer's
    dropped values live again while its backward runs. The final norm keeps 2·D.
    """
    model, tp = recipe.model, recipe.parallel.tensor_model_parallel_size
    hidden = model.hidden_size // (tp if recipe.parallel.sequence_parallel else 1)
    attention = 3 * (model.num_attention_heads + model.query_groups) * model.head_size // tp
    mlp = 5 * model.ffn_size // tp
    layer = 4 * hidden + attention + mlp
    dropped = {"none": 0, "selective": mlp, "full": layer - hidden}[recipe.training.recompute]
    return model.num_layers * (layer - dropped) + dropped + 2 * hidden


def _loss_workspace(model: ModelConfig, tensor_parallel_size: int, live_tokens: int, element: int) -> int:
    rows = model.padded_vocab_size(tensor_parallel_size) // tensor_parallel_size
    # Logits and the head's gradient in float32, and in bf16 each a copy; in fp32 the products work in place.
    return rows * (live_tokens + model.hidden_size) * (4 + (element if element < 4 else 0))


def _generator_workspace(model: ModelConfig, tokens: int, element: int) -> int:
    if model.embedding != "leviathan":
        return 0
    sizes = model.generator
    ids = min(model.vocabulary, int(tokens * DISTINCT_IDS_PER_TOKEN))
    d, h, r = sizes.seed_size, sizes.num_heads, sizes.rank
    # In float32 whatever the precision: seed, and per head projection, normalised projection, latent point.
    kept = ids * (4 * (d + 3 * h * d) + element * (h * r + model.hidden_size))
    return kept + 4 * 4 * min(GENERATOR_BLOCK_VALUES, ids * d * r)


# Dense peaks of the vendors' data sheets in FLOP/s, without sparsity: bf16 matrix units, and fp32 as torch
# multiplies by default (no TF32). Names are those of torch.cuda.get_device_name; a MIG slice or a variant that
# is not listed has another peak and matches nothing.
_PEAK_FLOPS: tuple[tuple[str, float, float | None], ...] = (
    (r"A100-SXM4-(40|80)GB|A100-PCIE-40GB|A100 80GB PCIe", 312e12, 19.5e12),
    (r"H100 80GB HBM3|H100 SXM5?", 989.4e12, 66.9e12),
    (r"H100 PCIe", 756e12, 51.2e12),
    (r"H200", 989.4e12, 66.9e12),
    (r"B200", 2250e12, None),  # published fp32 peaks differ, 75e12 and 80e12
    (r"AMD Instinct MI300X( OAM)?", 1307.4e12, 163.4e12),
)


def device_peak_flops(name: str, precision: Precision) -> float | None:
    """Dense peak of a GPU in FLOP/s by torch's name of it; None for one that is not known, never a guess."""
    for pattern, bf16, fp32 in _PEAK_FLOPS:
        if re.fullmatch(rf"(NVIDIA )?({pattern})", name.strip()):
            return bf16 if precision == "bf16" else fp32
    return None


def mfu(flops: float, tokens_per_s: float, num_devices: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation, 1 for the peak; None where the device's peak is not known.

    Args:
        flops: model FLOPs per token (`flops_per_token(...).total`).
        tokens_per_s: over all devices.
        peak_flops: of one device, in FLOP/s (`device_peak_flops`).
    """
    return None if peak_flops is None else flops * tokens_per_s / (num_devices * peak_flops)
