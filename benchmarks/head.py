"""The output head's loss: chunked with its gradient formed in the forward, against megatron-core's whole one.

    python benchmarks/head.py [--tensor_parallel 2] [--tokens 4096] [--repeats 5] [--dtype bf16]

V = 200,376 (padded for tensor parallelism), D = 512; loss and both gradients. The arms alternate in one job; peak
memory is that of a fresh job for each arm. With --tensor_parallel 2 two processes share the vocabulary. Targets:
peak memory at most 1/8, time at most 1.05 times, loss and gradients equal to 1e-5.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from measure import alternate, on_all_ranks, peak_memory_mb, ratio, report
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

from leviathan_ds.config import ModelConfig
from leviathan_ds.model.loss import vocab_parallel_linear_cross_entropy
from leviathan_ds.parallel import topology

VOCABULARY, HIDDEN = 200_376, 512
ARMS = ("megatron-core, unchunked", "chunked")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Arm:
    """One way to compute the mean loss and its gradients."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        device, dtype = topology.device(), DTYPES[options.dtype]
        rows = (
            ModelConfig(vocab_size=VOCABULARY).padded_vocab_size(options.tensor_parallel)
            // options.tensor_parallel
        )
        own = torch.Generator().manual_seed(1 + topology.tensor_parallel_rank())
        weight = torch.randn(rows, HIDDEN, generator=own) * 0.02
        padding = rows * (topology.tensor_parallel_rank() + 1) - VOCABULARY
        if padding > 0:
            weight[-padding:] = 0
        shared = torch.Generator().manual_seed(0)
        hidden = torch.randn(options.tokens, HIDDEN, generator=shared)
        self.labels = torch.randint(0, VOCABULARY, (options.tokens,), generator=shared).to(device)
        self.hidden = hidden.to(device, dtype).requires_grad_()
        self.weight = weight.to(device, dtype).requires_grad_()
        self.loss_weights = torch.full((options.tokens,), 1 / options.tokens, device=device)
        self.padding, self.chunk_tokens, self.chunked = max(0, padding), options.chunk_tokens, name == "chunked"

    def __call__(self) -> None:
        self.hidden.grad = self.weight.grad = None
        hidden = copy_to_tensor_model_parallel_region(self.hidden)
        if self.chunked:
            self.loss = vocab_parallel_linear_cross_entropy(
                hidden, self.weight, self.labels, self.loss_weights, VOCABULARY, self.chunk_tokens
            )
        else:
            logits = (hidden @ self.weight.T).float()
            if self.padding:
                logits[:, -self.padding :] = -torch.inf
            losses = vocab_parallel_cross_entropy(logits[:, None], self.labels[:, None])[:, 0]
            self.loss = (losses * self.loss_weights).sum()
        self.loss.backward()

    def result(self) -> dict[str, torch.Tensor]:
        assert self.hidden.grad is not None and self.weight.grad is not None
        return {"loss": self.loss.detach(), "hidden": self.hidden.grad, "weight": self.weight.grad}


def time_arms(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    arms = {name: Arm(name, options) for name in ARMS}
    times = alternate(arms, options.repeats)
    expected, found = (arms[name].result() for name in ARMS)
    errors = {key: float((found[key] - expected[key]).norm() / expected[key].norm()) for key in expected}
    return times, errors


def measure_peak(options: argparse.Namespace, name: str) -> float:
    return peak_memory_mb(Arm(name, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor_parallel", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk_tokens", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    options = parser.parse_args()
    size = options.tensor_parallel
    peaks = {name: max(on_all_ranks(size, measure_peak, options, name)) for name in ARMS}
    times, errors = on_all_ranks(size, time_arms, options)[0]
    for name in ARMS:
        report(
            "head",
            arm=name,
            tensor_parallel=size,
            dtype=options.dtype,
            tokens=options.tokens,
            seconds=statistics.median(times[name]),
            time_ratio=ratio(times, name, ARMS[0]),
            peak_mb=peaks[name],
            memory_ratio=peaks[name] / peaks[ARMS[0]],
            **({} if name == ARMS[0] else {f"{key}_error": value for key, value in errors.items()}),
        )


if __name__ == "__main__":
    main()
