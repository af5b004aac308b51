"""The generator's speed and memory: distinct ids and the fused product against the plain definition.

    python benchmarks/generator.py [--tokens 8192] [--repeats 5] [--device cpu] [--tensor_parallel 2]

Zipf-distributed ids at the paper's sizes (V = 200,376, D = 512), float32, forward and backward. The arms alternate
in one process; peak memory is taken in a fresh process for each arm. Targets: the fused arm at least 40 times as
fast as the plain definition on the same ids, and at most 150 MB.

With --tensor_parallel 2 two ranks embed the same ids: each all of them, or each its part and an all-gather, with
the sum of the partial gradients (`parallel.split_distinct_ids`).
"""

from __future__ import annotations

import argparse
import statistics

import torch
from measure import alternate, in_fresh_process, on_all_ranks, peak_memory_mb, ratio, report

from leviathan_ds.config import GeneratorConfig, ModelConfig, ParallelConfig
from leviathan_ds.model.embedding import DistinctIds, GeneratorEmbedding
from leviathan_ds.model.generator import SplineGenerator, reference_separable_product
from leviathan_ds.model.separable import portable_separable_product
from leviathan_ds.model.separable_native import separable_product
from leviathan_ds.parallel import registry

VOCABULARY, HIDDEN = 200_376, 512
PLAIN = "plain definition, every token"
PRODUCTS = {
    PLAIN: reference_separable_product,
    "distinct ids, portable product": portable_separable_product,
    "distinct ids, C kernel": separable_product,
}


def zipf_ids(count: int) -> torch.Tensor:
    weights = 1 / torch.arange(1, VOCABULARY + 1).double()
    return torch.multinomial(weights, count, replacement=True, generator=torch.Generator().manual_seed(0))


class Arm:
    """One way to embed the ids; each call is a forward and a backward pass."""

    def __init__(self, name: str, tokens: int, device: str) -> None:
        self.ids = zipf_ids(tokens).to(device)
        self.distinct, self.inverse = torch.unique(self.ids, return_inverse=True)
        self.plain = name == PLAIN
        self.generator = SplineGenerator(VOCABULARY, HIDDEN, GeneratorConfig(), PRODUCTS[name]).to(device)
        with torch.no_grad():
            for index, parameter in enumerate(self.generator.parameters()):
                parameter.normal_(0, 0.1, generator=torch.Generator(device).manual_seed(index))
                parameter.grad = torch.zeros_like(parameter)
        self.upstream = torch.ones(tokens, HIDDEN, device=device)

    def __call__(self) -> None:
        if self.plain:
            embeddings = self.generator(self.ids)
        else:
            embeddings = torch.nn.functional.embedding(self.inverse, self.generator(self.distinct))
        embeddings.backward(self.upstream)


def peak(name: str, tokens: int, device: str) -> float:
    arm = Arm(name, tokens, device)
    if not arm.plain:
        Arm(name, 64, device)()  # threads and compiled code are no memory of the call
    return peak_memory_mb(arm)


class RankArm:
    """A rank's embedding of a micro-batch, forward and backward, with what tensor parallelism adds to it."""

    def __init__(self, tokens: int, parallel: ParallelConfig) -> None:
        model = ModelConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN)
        self.embedding = GeneratorEmbedding(model, parallel)
        with torch.no_grad():
            for index, parameter in enumerate(self.embedding.parameters()):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(index))
        wrapper = torch.nn.Module()
        wrapper.embedding = self.embedding
        registry.complete_partial_gradients(wrapper, parallel)
        self.tokens = zipf_ids(tokens).view(-1, 512)
        self.distinct = DistinctIds.of(self.tokens)

    def __call__(self) -> None:
        self.embedding(self.tokens, self.distinct).sum().backward()


def time_ranks(size: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    arms = {
        "every rank all ids": RankArm(tokens, ParallelConfig(size, split_distinct_ids=False)),
        "ids split over ranks": RankArm(tokens, ParallelConfig(size)),
    }
    return alternate(arms, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensor_parallel", type=int, default=1)
    options = parser.parse_args()
    if options.tensor_parallel > 1:
        size = options.tensor_parallel
        times = on_all_ranks(size, time_ranks, size, options.tokens, options.repeats)[0]
        for name, seconds in times.items():
            speedup = 1 / ratio(times, name, "every rank all ids")
            report("generator", arm=name, ranks=size, seconds=statistics.median(seconds), speedup=speedup)
        return
    names = [name for name in PRODUCTS if options.device == "cpu" or name != "distinct ids, C kernel"]
    arms = {name: Arm(name, options.tokens, options.device) for name in names}
    distinct = len(arms[PLAIN].distinct)
    times = alternate(arms, options.repeats)
    for name in names:
        report(
            "generator",
            arm=name,
            distinct_ids=distinct,
            seconds=statistics.median(times[name]),
            speedup=1 / ratio(times, name, PLAIN),
            peak_mb=in_fresh_process(peak, name, options.tokens, options.device),
        )


if __name__ == "__main__":
    main()
