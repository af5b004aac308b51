"""Finding documents that occurred before: exactly, or nearly so by MinHash.

First every shard's documents are signed (`write_signatures`, in any process); then all signatures are compared
(`find_duplicates`). Of equal documents the first in the plan's order stays, at any number of workers.

exact: 128 bits of a hash of the text. Signatures take 16 bytes a document on the disk; comparing them takes
about 150 MB of memory, however many there are.

near: MinHash of the sets of word n-grams, whose Jaccard similarity it estimates. Signatures take 4 bytes a
permutation and document. Candidates come from datasketch's MinHashLSH, whose tables are in memory: docs/data.md
has figures.
"""

import hashlib
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.files import written_aside
from data_prep.sources import Document, ReadOptions, Shard, read_shard

Method = Literal["exact", "near"]

_COMPARED_DOCUMENTS = 1 << 21  # exact hashes that are sorted at once
_BLOCK_DOCUMENTS = 1024  # signatures held by a worker before it writes them
_BLOCK_NGRAMS = 4096  # of a document, hashed at once: num_permutations numbers for each
_CANDIDATE_SHARE = 0.9  # of near duplicates exactly at the threshold; above it, more
_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class DuplicateOptions:
    """What counts as a duplicate; a dataset's manifest records it.

    near: documents whose word n-grams (of ngram_words words) have an estimated Jaccard similarity of at least
    `threshold`, estimated by num_permutations hashes, with a standard deviation of at most 0.5 / sqrt(of that)."""

    method: Method
    threshold: float = 0.8
    ngram_words: int = 5
    num_permutations: int = 128

    def __post_init__(self) -> None:
        """Raises UserError for values that mean nothing, and if datasketch is needed and missing."""
        if not 0 < self.threshold <= 1:
            raise UserError(f"--near_threshold {self.threshold}: must be above 0 and at most 1")
        if self.num_permutations < 2:
            raise UserError(f"--near_permutations {self.num_permutations}: must be at least 2")
        if self.method == "near":
            _datasketch()

    @property
    def row(self) -> np.dtype:
        """Of one document's signature."""
        return np.dtype(("<u8", 2)) if self.method == "exact" else np.dtype(("<u4", self.num_permutations))


def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError as error:
        raise UserError("--deduplicate near needs datasketch: pip install leviathan_ds[data]") from error
    return datasketch


def write_signatures(path: Path, shard: Shard, read: ReadOptions, options: DuplicateOptions) -> None:
    """Write the signatures of the shard's documents, in order, to `path`, aside and renamed.

    Raises as ShardReader does."""
    documents = (item for _, item in read_shard(shard, read) if isinstance(item, Document))
    sign = _exact_signature if options.method == "exact" else _MinHashes(options)
    with written_aside(path) as file:
        while block := [sign(document.text) for document in islice(documents, _BLOCK_DOCUMENTS)]:
            file.write(b"".join(block))


def find_duplicates(paths: Sequence[Path], options: DuplicateOptions) -> list[NDArray[np.int64]]:
    """For each shard's signatures, in the plan's order: the ascending positions of documents to drop.

    They are what read_shard takes as `drop`. Raises UserError for a file of a wrong size."""
    starts = np.cumsum([0, *(_num_documents(path, options) for path in paths)])
    find = _exact_duplicates if options.method == "exact" else _near_duplicates
    drops = [array("q") for _ in paths]
    for block in find(paths, starts, options):
        shards = np.searchsorted(starts, block, side="right") - 1
        for shard in np.unique(shards):
            drops[shard].frombytes((block[shards == shard] - starts[shard]).tobytes())
    return [np.sort(np.frombuffer(drop, np.int64)) for drop in drops]


def _num_documents(path: Path, options: DuplicateOptions) -> int:
    size = path.stat().st_size
    if size % options.row.itemsize:
        raise UserError(f"{path}: {size} bytes are no multiple of {options.row.itemsize}; remove it and run again")
    return size // options.row.itemsize


def _exact_signature(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _exact_duplicates(
    paths: Sequence[Path], starts: NDArray[np.int64], options: DuplicateOptions
) -> Iterator[NDArray[np.int64]]:
    """Positions among all documents, found in parts: of the hashes with the same rest modulo their number."""
    num_parts = max(1, ceil(int(starts[-1]) / _COMPARED_DOCUMENTS))
    for part in range(num_parts):
        hashes, positions = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)]
        for path, start in zip(paths, starts, strict=False):
            table = np.fromfile(path, options.row)
            mine = np.flatnonzero(table[:, 0] % num_parts == part)
            hashes.append(table[mine])
            positions.append(start + mine)
        hashed, position = np.concatenate(hashes), np.concatenate(positions)
        del hashes, positions
        order = np.lexsort((hashed[:, 1], hashed[:, 0]))  # stable: of equal ones the first comes first
        same = np.all(hashed[order[1:]] == hashed[order[:-1]], axis=1)
        yield position[order[1:][same]]


class _MinHashes:
    """text → the bytes of its MinHash."""

    def __init__(self, options: DuplicateOptions) -> None:
        self._new = _datasketch().MinHash(num_perm=options.num_permutations, hashfunc=_hash_ngram)
        self._ngram_words = options.ngram_words

    def __call__(self, text: str) -> bytes:
        minhash = self._new.copy()
        ngrams = _word_ngrams(text, self._ngram_words)
        while block := list(islice(ngrams, _BLOCK_NGRAMS)):
            minhash.update_batch(block)
        return minhash.hashvalues.astype("<u4").tobytes()


def _hash_ngram(ngram: str) -> int:
    return zlib.crc32(ngram.encode())  # datasketch mixes it well; its own SHA-1 takes four fifths of the time


def _word_ngrams(text: str, size: int) -> Iterator[str]:
    """Each `size` words in a row, or all of a text of fewer words."""
    words = (match[0] for match in _WORD.finditer(text))
    first = list(islice(words, size))
    yield " ".join(first)
    window = first
    for word in words:
        window = [*window[1:], word]
        yield " ".join(window)


def _near_duplicates(
    paths: Sequence[Path], starts: NDArray[np.int64], options: DuplicateOptions
) -> Iterator[NDArray[np.int64]]:
    """Positions among all documents: of each that is near to one that stays."""
    datasketch = _datasketch()
    bands = _bands(options.threshold, options.num_permutations)
    index = datasketch.MinHashLSH(num_perm=options.num_permutations, params=bands)
    minhash = datasketch.MinHash(num_perm=options.num_permutations)
    tables: list[NDArray[np.uint32]] = [
        np.memmap(path, options.row, "r") if path.stat().st_size else np.empty((0, 1), np.uint32) for path in paths
    ]

    def signature(position: int) -> NDArray[np.uint32]:
        shard = int(np.searchsorted(starts, position, side="right")) - 1
        return tables[shard][position - starts[shard]]

    for start, table in zip(starts.tolist(), tables, strict=False):
        dropped = []
        for position, row in enumerate(table, start):
            minhash.hashvalues = np.asarray(row, minhash.hashvalues.dtype)
            candidates = index.query(minhash)
            if any(np.mean(signature(kept) == row) >= options.threshold for kept in candidates):
                dropped.append(position)
            else:
                index.insert(position, minhash, check_duplication=False)
        yield np.array(dropped, np.int64)


def _bands(threshold: float, num_permutations: int) -> tuple[int, int]:
    """(bands, permutations in each): the fewest candidates that still hold 90% of the pairs at the threshold."""
    for size in range(num_permutations // 2, 1, -1):
        bands = num_permutations // size
        if 1 - (1 - threshold**size) ** bands >= _CANDIDATE_SHARE:
            return bands, size
    return num_permutations, 1
