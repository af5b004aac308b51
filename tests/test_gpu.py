"""Every fused path against its definition in float64, on the CPU here and on a GPU where there is one.

`pytest -m gpu tests/test_gpu.py` runs the tests on "cuda"; without it the same tests run on "cpu".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from waiting_cases import waits, waits_of_steps
from workers import WorkerPool

from leviathan_ds.config import EmbeddingKind, GeneratorConfig, ModelConfig, ParallelConfig
from leviathan_ds.data.loader import Batch, collate
from leviathan_ds.model.embedding import DistinctIds, GeneratorEmbedding
from leviathan_ds.model.generator import SplineGenerator, reference_separable_product
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.model.layers import CausalCoreAttention, RMSNorm, document_mask, transformer_config
from leviathan_ds.model.loss import vocab_parallel_linear_cross_entropy
from leviathan_ds.training.step import mean_loss

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]),
]
precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

# Relative norm of a difference: rounding of a few operations in the working precision.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

MODEL = ModelConfig(
    vocab_size=1003,  # pads to 1024
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    generator=GeneratorConfig(seed_size=32, num_heads=2, num_knots=8, rank=16, out_proj_std=0.3),
)


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """No TF32: its 10 bits of mantissa would hide mistakes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def relative(found: Tensor, expected: Tensor) -> float:
    expected = expected.to(found.device)
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-12))


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).requires_grad_()


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Leaves in float64 that hold the same values."""
    return tuple(tensor.detach().double().requires_grad_() for tensor in tensors)


def compare(found: Tensor, expected: Tensor, inputs: Any, exact: Any, dtype: torch.dtype) -> None:
    """Values, and the gradients of all inputs for a random gradient of the result."""
    assert relative(found, expected) < TOLERANCE[dtype]
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(9)).to(found.device, found.dtype)
    found.backward(grad)
    expected.backward(grad.to(expected))
    for ours, theirs in zip(inputs, exact, strict=True):
        assert relative(ours.grad, theirs.grad) < TOLERANCE[dtype]


@precisions
def test_generator(device, dtype):
    """The fused product within the generator: float32 inside, so that bf16 rounds only at the ends."""
    sizes = MODEL.generator
    exact = SplineGenerator(1003, 64, sizes, reference_separable_product, torch.float64).to(device)
    fused = SplineGenerator(1003, 64, sizes).to(device, dtype)
    with torch.no_grad():
        for index, (ours, theirs) in enumerate(zip(fused.parameters(), exact.parameters(), strict=True)):
            ours.copy_(random(*ours.shape, device=device, dtype=dtype, seed=index) * 0.3)
            theirs.copy_(ours)
    ids = torch.arange(0, 1003, 7, device=device)
    compare(fused(ids), exact(ids), fused.parameters(), exact.parameters(), dtype)


def test_separable_product_at_the_papers_sizes(device):
    """One head; t and Δ are float32 whatever the model's dtype."""
    sizes = GeneratorConfig(num_heads=1)
    generator = SplineGenerator(200_376, 512, sizes)
    t = random(1, 256, sizes.seed_size, device=device, dtype=torch.float32).sigmoid().detach().requires_grad_()
    delta = random(1, sizes.seed_size, sizes.num_knots, sizes.rank, device=device, dtype=torch.float32, seed=1)
    delta = (delta * 0.1).detach().requires_grad_()
    exact = double(t, delta)
    found, expected = generator.product(t, delta, True), reference_separable_product(*exact, True)
    compare(found, expected, (t, delta), exact, torch.float32)


@precisions
@pytest.mark.parametrize("chunk_tokens", [64, 1024])
def test_loss(device, dtype, chunk_tokens):
    """In chunks, with padded rows in the head and a token without loss."""
    hidden = random(200, 64, device=device, dtype=dtype)
    weight = (random(1024, 64, device=device, dtype=dtype, seed=1) * 0.1).detach().requires_grad_()
    labels = torch.randint(0, 1003, (200,), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.ones(200, device=device)
    mask[5] = 0
    exact = double(hidden, weight)
    losses = nn.functional.cross_entropy(exact[0] @ exact[1][:1003].T, labels, reduction="none")
    found = vocab_parallel_linear_cross_entropy(hidden, weight, labels, mask, 1003, chunk_tokens)
    compare(found, (losses * mask).sum(), (hidden, weight), exact, dtype)
    assert weight.grad is not None and not weight.grad[1003:].any()


@precisions
def test_distinct_ids(device, dtype):
    """One evaluation for each distinct id, gathered, against one for each token."""
    embedding = built("leviathan", device, dtype).embedding
    assert isinstance(embedding, GeneratorEmbedding)
    plain = SplineGenerator(1003, 64, MODEL.generator, reference_separable_product, torch.float64).to(device)
    with torch.no_grad():
        pairs = zip(embedding.generator.parameters(), plain.parameters(), strict=True)
        for index, (ours, theirs) in enumerate(pairs):
            ours.copy_(random(*ours.shape, device=device, dtype=dtype, seed=index) * 0.3)
            theirs.copy_(ours)
    tokens = torch.randint(0, 60, (4, 32), generator=torch.Generator().manual_seed(3))
    distinct = DistinctIds(*(tensor.to(device) for tensor in DistinctIds.of(tokens)))
    found = embedding(tokens.to(device), distinct)
    expected = plain(tokens.T.flatten().to(device)).unflatten(0, (32, 4))
    compare(found, expected, embedding.parameters(), plain.parameters(), dtype)


@precisions
def test_norm(device, dtype):
    norm = RMSNorm(transformer_config(MODEL, ParallelConfig()), 64, 1e-5).to(device, dtype)
    with torch.no_grad():
        norm.weight.copy_(random(64, device=device, dtype=dtype))
    x = random(16, 2, 64, device=device, dtype=dtype, seed=1)
    exact_x, exact_weight = double(x, norm.weight)
    expected = exact_x / (exact_x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact_weight
    compare(norm(x), expected, (x, norm.weight), (exact_x, exact_weight), dtype)


@precisions
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "documents"])
def test_attention(device, dtype, groups, packed):
    """Causal, with as many and with fewer key and value heads.

    Of packed documents: flash attention in half precision on a GPU, a mask elsewhere."""
    length, batch, heads, size = 48, 2, 8, 64
    shapes = ((length, batch, heads, size), *[(length, batch, groups, size)] * 2)
    inputs = [random(*shape, device=device, dtype=dtype, seed=index) for index, shape in enumerate(shapes)]
    exact = double(*inputs)
    query, key, value = (x.repeat_interleave(heads // x.shape[2], 2).permute(1, 2, 0, 3) for x in exact)
    scores = query @ key.transpose(-1, -2) / size**0.5
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = None
    if packed:
        bounds = torch.tensor([0, 5, 48, 78, 96], dtype=torch.int32, device=device)
        documents = torch.repeat_interleave(torch.arange(4, device=device), bounds.diff()).view(batch, 1, length)
        seen = seen & (documents[..., None] == documents[..., None, :])
        mask = document_mask(bounds, torch.Size((batch, length)), dtype, size)
        assert (mask.dtype is torch.bool) == (dtype is torch.float32 or device == "cpu")
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
    found = CausalCoreAttention(transformer_config(MODEL, ParallelConfig()))(*inputs, attention_mask=mask)
    compare(found, expected.permute(2, 0, 1, 3).flatten(2), inputs, exact, dtype)


def built(embedding: EmbeddingKind, device: str, dtype: torch.dtype) -> LanguageModel:
    config = replace(MODEL, embedding=embedding)
    model = LanguageModel(config, ParallelConfig(), loss_chunk_tokens=24)
    initialize_weights(model, config, seed=1)
    return model.to(device, dtype)


def batch_on(device: str) -> Batch:
    tokens = torch.randint(0, 1003, (4, 33), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(32)
    mask[3] = 0
    batch = collate([{"tokens": row[:-1], "labels": row[1:], "loss_mask": mask} for row in tokens])
    return (batch if device == "cpu" else batch.pin_memory()).to(torch.device(device))


@precisions
@pytest.mark.parametrize("embedding", ["leviathan", "dense_tied", "dense_untied"])
def test_whole_model(device, dtype, embedding):
    """Loss and all gradients against the same model in float64 with plain cross-entropy on whole logits."""
    model, exact = built(embedding, device, dtype), built(embedding, device, torch.float64)
    if isinstance(exact.embedding, GeneratorEmbedding):
        exact.embedding.generator.product = reference_separable_product
    with torch.no_grad():
        for theirs, ours in zip(exact.parameters(), model.parameters(), strict=True):
            theirs.copy_(ours)
    batch = batch_on(device)
    counted = batch.loss_mask.bool()
    expected = nn.functional.cross_entropy(exact(batch.tokens)[counted], batch.labels[counted])
    loss = mean_loss(model, batch)
    loss.backward()
    expected.backward()
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert float(loss) == pytest.approx(float(expected), rel=tolerance / 10)
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative(ours.grad, theirs.grad) < tolerance, name


class _NoHostReads(TorchDispatchMode):
    """The operations that would make a GPU's queue wait for the host, told by name: for the CPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(function):
            raise RuntimeError(f"{function} waits for the device")
        return function(*args, **(kwargs or {}))


@contextmanager
def no_synchronization(device: str) -> Iterator[None]:
    """A RuntimeError wherever the host would wait for the device."""
    if device == "cpu":
        with _NoHostReads():
            yield
    else:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("embedding", ["leviathan", "dense_tied"])
def test_a_step_never_waits_for_the_device(device, embedding):
    """Forward, loss and backward: what surrounds them is DeepSpeed's."""
    model = built(embedding, device, torch.float32)
    batch = batch_on(device)
    mean_loss(model, batch).backward()  # the first call places rotary frequencies and compiles kernels
    with no_synchronization(device):
        mean_loss(model, batch).backward()


@pytest.fixture(scope="module")
def alone() -> Iterator[WorkerPool]:
    pool = WorkerPool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3"])
def test_between_two_logs_only_deepspeed_waits(device, alone, tmp_path, zero):
    """Whole optimizer steps with guard and log. DeepSpeed looks at the gradient once a step."""
    (culprits,) = alone.run(waits_of_steps, zero, tmp_path, False)
    assert culprits, "DeepSpeed's own wait should be seen"
    assert [culprit for culprit in culprits if f"{os.sep}deepspeed{os.sep}" not in culprit] == []


def test_a_wait_of_ours_in_a_step_is_noticed(device, alone, tmp_path):
    (culprits,) = alone.run(waits_of_steps, "zero1", tmp_path, True)
    assert [culprit.split()[-1] for culprit in culprits].count("planted_wait") == 2, culprits


def test_waiting_is_noticed(device):
    tensor = torch.ones(3, device=device)
    with pytest.raises(RuntimeError), no_synchronization(device):
        tensor[0].item()
    with pytest.raises(RuntimeError), no_synchronization(device):
        tensor.nonzero()
    if device == "cuda":  # a copy from pageable memory, which no operation's name tells
        with pytest.raises(RuntimeError), no_synchronization(device):
            torch.tensor([1, 2], device=device)
