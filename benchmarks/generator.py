"""The generator's speed and memory: distinct ids and the fused product against the plain definition.

    python benchmarks/generator.py [--tokens 8192] [--repeats 5] [--device cpu]

Zipf-distributed ids at the paper's sizes (V = 200,376, D = 512), float32, forward and backward. The arms alternate
in one process; peak memory is taken in a fresh process for each arm. Targets: the fused arm at least 40 times as
fast as the plain definition on the same ids, and at most 150 MB.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from measure import alternate, in_fresh_process, peak_memory_mb, ratio, report

from leviathan_ds.config import GeneratorConfig
from leviathan_ds.model.generator import SplineGenerator, reference_separable_product
from leviathan_ds.model.separable import portable_separable_product
from leviathan_ds.model.separable_native import separable_product

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
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
