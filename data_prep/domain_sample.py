"""A bounded sample of a corpus, its domains in chosen proportions, drawn in one pass.

The domains and their sizes are known only at the end of that pass, so blocks of text compete for one budget: each
domain keeps those with the smallest random keys, and whenever all are too much, the domain with the most bytes for
its weight gives up its last one. At the end each holds a uniform sample of itself; domains too small for their
share are there whole, and the others share the rest by weight.
"""

import heapq
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from data_prep.errors import UserError
from data_prep.sources import Document

PILE_WEIGHTS = Path(__file__).parent / "pile_weights.yaml"
BLOCK_CHARACTERS = 8192  # the unit of sampling: small beside the sample, long beside a word


class DomainSample:
    """At most `max_bytes` of UTF-8 text (or one block), by domain. Memory is that of the sample."""

    def __init__(self, max_bytes: int, weights: "DomainWeights", seed: int) -> None:
        self._max_bytes, self._weights = max_bytes, weights
        self._generator = random.Random(seed)
        # For each domain a heap by -key: the block with the largest key on top.
        self._blocks: dict[str, list[tuple[float, int, str, str, int]]] = {}
        self._bytes: dict[str, int] = {}
        self._number = 0
        self.is_whole = True
        """Whether all text that was added is in the sample: then weights had nothing to decide."""

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def add(self, document: Document) -> None:
        """Raises UserError for a domain without a weight."""
        pool = self._weights.pool(document.domain)
        heap = self._blocks.setdefault(pool, [])
        for block in cut_blocks(document.text):
            size = len(block.encode())
            heapq.heappush(heap, (-self._generator.random(), self._number, document.domain, block, size))
            self._bytes[pool] = self._bytes.get(pool, 0) + size
            self._number += 1
            while self.num_bytes > self._max_bytes and sum(map(len, self._blocks.values())) > 1:
                self._give_up()

    def _give_up(self) -> None:
        fullest = max(self._bytes, key=lambda pool: self._bytes[pool] / self._weights.weight(pool))
        self.is_whole = False
        self._bytes[fullest] -= heapq.heappop(self._blocks[fullest])[-1]

    def blocks(self) -> list[tuple[str, str]]:
        """(domain, text) of each block, in the order of the corpus."""
        entries = (entry for heap in self._blocks.values() for entry in heap)
        return [(domain, block) for _, _, domain, block, _ in sorted(entries, key=lambda entry: entry[1])]


class DomainWeights:
    """How much of a sample each domain is to have."""

    def __init__(self, choice: str) -> None:
        """choice: "size" (as much as it has of the corpus), "uniform", "pile" (the paper's weights) or a YAML file
        with a weight for each domain. Raises UserError naming the file for one that cannot be read as such."""
        self._choice = choice
        self._weights = (
            None if choice in ("size", "uniform") else _read(PILE_WEIGHTS if choice == "pile" else Path(choice))
        )

    def pool(self, domain: str) -> str:
        """The name under which a domain competes: by size all are one. Raises UserError where it has no weight."""
        if self._weights is not None and domain not in self._weights:
            raise UserError(f"--domain_weights {self._choice}: no weight for the domain {domain!r} of the text")
        return "" if self._choice == "size" else domain

    def weight(self, pool: str) -> float:
        return 1.0 if self._weights is None else self._weights[pool]


def _read(path: Path) -> Mapping[str, float]:
    """The weights of {domain: weight}, or of a list of {name: ..., weight: ...} as in pile_weights.yaml."""
    try:
        content: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--domain_weights: {path} cannot be read ({reason}); or give size, uniform or pile"
        ) from error
    if isinstance(content, list) and all(isinstance(entry, dict) for entry in content):
        entries = [(entry.get("name"), entry.get("weight")) for entry in content]
    else:
        entries = list(content.items()) if isinstance(content, dict) else []
    if not entries:
        raise UserError(f"{path}: holds no weights, as in `Wikipedia (en): 3.0`")
    weights: dict[str, float] = {}
    for name, weight in entries:
        if (
            not isinstance(name, str)
            or isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or weight <= 0
        ):
            raise UserError(f"{path}: {name!r}: {weight!r} is no domain with a weight above zero")
        weights[name] = weight
    return weights


def cut_blocks(text: str) -> Iterator[str]:
    """Cut `text` into blocks of about BLOCK_CHARACTERS, at line ends where there are any."""
    start = 0
    while start < len(text):
        end = start + BLOCK_CHARACTERS
        if end < len(text):
            line_end = text.rfind("\n", start, end)
            end = line_end + 1 if line_end >= start else end
        yield text[start:end]
        start = end
