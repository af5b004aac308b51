"""How often each token id occurs in a dataset: {prefix}.token_counts.npy, or counted from the .bin."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.indexed import IndexedReader
from data_prep.manifest import load_manifest

_BLOCK_TOKENS = 1 << 24  # ids looked at at once


def token_counts_path(prefix: Path | str) -> Path:
    """The counts."""
    return Path(f"{prefix}.token_counts.npy")


def load_token_counts(prefix: Path | str) -> NDArray[np.int64]:
    """[vocab_size] how often each id occurs in the dataset, end-of-document included.

    Raises UserError for a dataset that is not whole, and for counts that are not this dataset's.
    """
    manifest = load_manifest(prefix)
    vocab_size = manifest.tokenizer.vocab_size
    path = token_counts_path(prefix)
    if path.is_file():
        counts = np.load(path)
        if counts.shape != (vocab_size,) or counts.sum() != manifest.tokens:
            raise UserError(f"{path}: not the counts of this dataset; delete it, or prepare the dataset again")
        return counts
    tokens = IndexedReader(prefix).tokens
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        counts += np.bincount(tokens[start : start + _BLOCK_TOKENS], minlength=vocab_size)
    return counts
