"""The generator's speed: distinct ids and the fused product against the plain definition, in one process.

    python benchmarks/generator.py [--tokens 8192] [--repeats 5]

Zipf-distributed ids at the paper's sizes (V = 200,376, D = 512), float32, forward and backward. The arms
alternate; medians are printed as JSON lines, with their ratio to the plain definition on all ids, which runs
once (it takes long).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from leviathan_ds.config import GeneratorConfig
from leviathan_ds.model.generator import SplineGenerator, reference_separable_product
from leviathan_ds.model.separable import portable_separable_product
from leviathan_ds.model.separable_native import separable_product

VOCABULARY, HIDDEN = 200_376, 512
PRODUCTS = {
    "plain": reference_separable_product,  # on every token's id
    "distinct, portable": portable_separable_product,
    "distinct, C kernel": separable_product,
}


def build(arm: str) -> SplineGenerator:
    generator = SplineGenerator(VOCABULARY, HIDDEN, GeneratorConfig(), PRODUCTS[arm])
    with torch.no_grad():
        for index, parameter in enumerate(generator.parameters()):
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(index))
    return generator


def zipf_ids(count: int) -> torch.Tensor:
    weights = 1 / torch.arange(1, VOCABULARY + 1).double()
    return torch.multinomial(weights, count, replacement=True, generator=torch.Generator().manual_seed(0))


def forward_backward(generator: SplineGenerator, arm: str, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    start = time.perf_counter()
    if arm == "plain":
        embeddings = generator(ids)
    else:
        distinct, inverse = torch.unique(ids, return_inverse=True)
        embeddings = torch.nn.functional.embedding(inverse, generator(distinct))
    middle = time.perf_counter()
    embeddings.backward(torch.ones_like(embeddings))
    return middle - start, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    ids = zipf_ids(options.tokens)
    generators = {arm: build(arm) for arm in PRODUCTS}
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in PRODUCTS}
    for repeat in range(options.repeats):
        for arm, generator in generators.items():
            if arm != "plain" or repeat == 0:
                times[arm].append(forward_backward(generator, arm, ids))
    plain = sum(times["plain"][0])
    for arm, measured in times.items():
        forward, backward = (statistics.median(part) for part in zip(*measured, strict=True))
        record = {"benchmark": "generator", "arm": arm, "forward_s": forward, "backward_s": backward}
        print(
            json.dumps({**record, "speedup": plain / (forward + backward)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
