"""The accounting against the built model: its parameters, torch's FLOP counter, what autograd keeps."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from leviathan_ds import accounting
from leviathan_ds.config import (
    DataConfig,
    GeneratorConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainingConfig,
)
from leviathan_ds.model import separable
from leviathan_ds.model.generator import SplineGenerator, reference_separable_product
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import registry, topology

BATCH, SEQUENCE = 2, 32
TINY = ModelConfig(
    vocab_size=1000,  # 1024 stored
    hidden_size=64,
    num_layers=3,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=96,
    generator=GeneratorConfig(seed_size=16, num_heads=2, num_knots=5, rank=8),
)
UNTIED = replace(TINY, embedding="dense_untied")


@pytest.fixture(autouse=True, scope="module")
def process_groups() -> Iterator[None]:
    topology.initialize(1)
    yield
    topology.shutdown()


@pytest.mark.parametrize(
    "model",
    [
        TINY,
        UNTIED,
        replace(TINY, embedding="dense_tied"),
        replace(TINY, num_query_groups=None, ffn_hidden_size=None),
        replace(TINY, kv_channels=24),
        replace(TINY, generator=replace(TINY.generator, residual=True, num_coordinates=2)),
    ],
)
def test_parameters_of_each_component_equal_the_built_model(model: ModelConfig) -> None:
    built = {"embedding": 0, "body": 0, "head": 0}
    true_rows = dict(built)
    for _, parameter, rule in registry.named_rules(LanguageModel(model, ParallelConfig())):
        component = "embedding" if rule.component == "generator" else rule.component
        built[component] += parameter.numel()
        true_rows[component] += (parameter[: model.vocabulary] if rule.is_vocabulary else parameter).numel()
    assert vars(accounting.count_parameters(model, padded=True)) == built
    assert vars(accounting.count_parameters(model)) == true_rows
    assert accounting.parameters_per_rank(model, 1) == sum(built.values())


@pytest.mark.parametrize("embedding", ["leviathan", "dense_tied", "dense_untied"])
def test_parameters_per_rank_follow_the_registry(embedding: str) -> None:
    model = replace(TINY, embedding=embedding)  # pyright: ignore[reportArgumentType]
    built = LanguageModel(model, ParallelConfig())
    # 1000 rows are padded to 1024 at TP 1 and at TP 2, so the shards of the TP 1 model are TP 2's.
    expected = sum(rule.shard(parameter, 0, 2).numel() for _, parameter, rule in registry.named_rules(built))
    assert accounting.parameters_per_rank(model, 2) == expected


def test_padding_grows_with_tensor_parallelism_and_is_told_apart() -> None:
    count = accounting.count_parameters(UNTIED, tensor_parallel_size=8, padded=True)
    assert count.head == count.embedding == 1024 * 64
    assert accounting.count_parameters(replace(UNTIED, vocab_size=1025), 8, padded=True).head == 1536 * 64
    assert accounting.count_parameters(UNTIED).head == 1000 * 64


@pytest.mark.parametrize("embedding", ["dense_tied", "dense_untied"])
@pytest.mark.parametrize("groups", [2, 4])
def test_flops_of_a_training_step_equal_torchs_count(embedding: str, groups: int) -> None:
    # Tables only look up, so all matrix products are the body's, the attention's and the head's. The head's
    # three run inside the forward of its autograd function, where the counter, a dispatch mode, sees them.
    model = replace(TINY, embedding=embedding, num_query_groups=groups)  # pyright: ignore[reportArgumentType]
    counter = _count_step(_filled(model))
    expected = accounting.flops_per_token(model, SEQUENCE)
    padding = 6 * (model.padded_vocab_size(1) - model.vocabulary) * model.hidden_size
    assert counter.get_total_flops() == (expected.total + padding) * BATCH * SEQUENCE
    by_module = counter.get_flop_counts()
    head = sum(by_module["LanguageModel.output_layer"].values())
    assert head == (expected.head + padding) * BATCH * SEQUENCE


def test_head_outweighs_a_small_body_at_the_papers_vocabulary() -> None:
    model = ModelConfig(vocab_size=200_376, embedding="dense_untied", hidden_size=256, num_layers=9)
    flops = accounting.flops_per_token(model, 512)
    assert flops.head == 6 * 256 * 200_376
    assert flops.head > 4 * (flops.body + flops.attention)


def test_recomputation_is_no_model_work() -> None:
    plain, recomputed = (_count_step(_filled(UNTIED, kind)).get_total_flops() for kind in ("none", "full"))
    expected = accounting.flops_per_token(UNTIED, SEQUENCE)
    # A recomputed layer runs its forward once more: a third of its training FLOPs.
    assert recomputed - plain == (expected.body + expected.attention) // 3 * BATCH * SEQUENCE


@pytest.mark.parametrize("residual", [False, True])
def test_flops_of_the_generator_equal_torchs_count_of_its_definition(residual: bool) -> None:
    # With three knots all are non-zero, so the definition's dense sum over knots is the three-knot one.
    sizes = GeneratorConfig(seed_size=16, num_heads=2, num_knots=3, rank=8, residual=residual)
    generator = SplineGenerator(1000, 64, sizes, product=reference_separable_product)
    for parameter in generator.parameters():
        nn.init.normal_(parameter)
    num_ids = 50
    with FlopCounterMode(display=False) as counter:
        generator(torch.arange(num_ids)).sum().backward()
    model = replace(TINY, generator=sizes)
    expected = accounting.flops_per_token(model, SEQUENCE, distinct_ids_per_token=1.0).embedding
    product = 3 * sizes.num_heads * sizes.seed_size * sizes.rank  # elementwise: the counter does not see it
    assert counter.get_total_flops() == (expected - product) * num_ids
    half = accounting.flops_per_token(model, SEQUENCE, distinct_ids_per_token=0.5).embedding
    assert half == expected / 2


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_estimated_activations_are_what_autograd_keeps(recompute: str, groups: int) -> None:
    model = replace(UNTIED, num_query_groups=groups)
    recipe = Recipe(
        model=model,
        data=DataConfig(sequence_length=SEQUENCE),
        training=TrainingConfig(micro_batch_size=BATCH, recompute=recompute, precision="fp32"),  # pyright: ignore
    )
    estimate = accounting.estimate_memory(recipe, 1, 2).activations
    kept = _bytes_kept_by_the_decoder(_filled(model, recompute))
    hidden, heads = model.hidden_size, model.num_attention_heads
    mlp = 5 * model.ffn_size
    layer = 4 * hidden + 3 * (heads + groups) * model.head_size + mlp
    recomputed = {"none": 0, "selective": mlp, "full": layer - hidden}[recompute]  # one layer's, in backward
    # Beyond the estimate: on the CPU a norm keeps its input over its rms as well (the GPU's kernel does not)
    # and the rms itself, softmax one statistic a head, rotary its angles (shared by the batch).
    norms = 1 if recompute == "full" else 2 * model.num_layers + 1
    extra = norms * (hidden + 1)
    if recompute != "full":
        extra += model.num_layers * (heads + 4 * model.head_size // BATCH)
    assert kept + 4 * BATCH * SEQUENCE * (recomputed - extra) == estimate


def test_memory_follows_zero_precision_and_tensor_parallelism() -> None:
    training = TrainingConfig(precision="bf16")
    recipe = Recipe(model=UNTIED, training=training)
    stored = accounting.count_parameters(UNTIED, padded=True).total
    zero = [accounting.estimate_memory(recipe, 4, stage) for stage in (0, 1, 2, 3)]
    part = -(-stored // 4)
    assert [m.weights for m in zero] == [2 * stored, 2 * stored, 2 * stored, 2 * (part + stored)]
    assert [m.gradients for m in zero] == [2 * stored, 2 * stored, 2 * part, 2 * part]
    assert [m.optimizer for m in zero] == [12 * stored, 12 * part, 12 * part, 12 * part]
    fp32 = accounting.estimate_memory(replace(recipe, training=replace(training, precision="fp32")), 4, 0)
    assert (fp32.weights, fp32.optimizer) == (4 * stored, 8 * stored)

    halves = accounting.estimate_memory(replace(recipe, parallel=ParallelConfig(2)), 4, 0)
    assert zero[0].loss == 2 * halves.loss
    assert zero[0].activations / 2 < halves.activations < zero[0].activations
    sharded = accounting.estimate_memory(replace(recipe, parallel=ParallelConfig(2, True)), 4, 0)
    assert sharded.activations == zero[0].activations / 2


def test_memory_of_the_loss_stops_growing_at_one_chunk() -> None:
    def loss(micro_batch_size: int) -> int:
        training = TrainingConfig(micro_batch_size=micro_batch_size, loss_chunk_tokens=1024)  # 512 a sequence
        return accounting.estimate_memory(Recipe(model=UNTIED, training=training), 1, 2).loss

    # bf16: logits in float32 and bf16, the gradient of the head likewise.
    assert loss(1) == 6 * 1024 * (512 + 64)
    assert loss(2) == loss(8) == 6 * 1024 * (1024 + 64)


def test_memory_of_the_generator() -> None:
    dense, leviathan = (accounting.estimate_memory(Recipe(model=model), 1, 0) for model in (UNTIED, TINY))
    assert dense.generator == 0 < leviathan.generator
    assert dense.total == sum(vars(dense).values())
    assert accounting.GENERATOR_BLOCK_VALUES == separable._BLOCK_VALUES_GPU


class _PeakOfTensors(TorchDispatchMode):
    """The most bytes that the storages of tensors made in this context held at once."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._tensors += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._tensors = [tensor for tensor in self._tensors if tensor() is not None]
        storages = (tensor.untyped_storage() for ref in self._tensors if (tensor := ref()) is not None)
        self.peak = max(self.peak, sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        return result


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_the_generators_backward_holds_four_blocks_at_once(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's knots and rank, and a block that outweighs the coefficients as a GPU's does."""
    ids, d, knots, rank = 256, 32, 16, 64
    monkeypatch.setattr(separable, "_BLOCK_VALUES_CPU", ids * d * rank)
    t = torch.rand(1, num_blocks * ids, d, requires_grad=True)
    delta = torch.randn(1, d, knots, rank, requires_grad=True)
    with _PeakOfTensors() as tensors:
        separable.portable_separable_product(t, delta, True).sum().backward()
    whole = 4 * (4 * t.numel() + 4 * delta.numel() + 2 * num_blocks * ids * rank)  # t, Δ, M and their gradients
    block = 4 * ids * d * rank
    assert 3.5 * block < tensors.peak - whole < 4 * block


def test_peaks_are_dense_and_unknown_devices_have_none() -> None:
    assert accounting.device_peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert accounting.device_peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert accounting.device_peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert accounting.device_peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert accounting.device_peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert accounting.device_peak_flops("NVIDIA B200", "bf16") == 2250e12
    assert accounting.device_peak_flops("AMD Instinct MI300X", "bf16") == 1307.4e12
    assert accounting.device_peak_flops("NVIDIA B200", "fp32") is None
    for unknown in ("", "cpu", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090"):
        assert accounting.device_peak_flops(unknown, "bf16") is None


def test_mfu_is_a_fraction_of_all_devices_peak_or_nothing() -> None:
    assert accounting.mfu(2e9, tokens_per_s=1e5, num_devices=2, peak_flops=1e15) == pytest.approx(0.1)
    assert accounting.mfu(2e9, 1e5, 2, None) is None


def _filled(model: ModelConfig, recompute: str = "none") -> LanguageModel:
    built = LanguageModel(model, ParallelConfig(), recompute)  # pyright: ignore[reportArgumentType]
    for name, parameter in built.named_parameters():
        nn.init.ones_(parameter) if re.search("norm", name) else nn.init.normal_(parameter, std=0.02)
    return built


def _count_step(model: LanguageModel) -> FlopCounterMode:
    tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE)
    # The plain attention: fused kernels recompute scores in backward, which the counter would count.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return counter


def _bytes_kept_by_the_decoder(model: LanguageModel) -> int:
    """Bytes of the distinct storages saved for backward by the decoder, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    hidden = torch.randn(SEQUENCE, BATCH, model.model_config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=model.rotary(SEQUENCE))
    return sum(storage.nbytes() for storage in storages.values()) + output.nbytes
