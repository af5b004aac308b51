"""How often each token id occurs in a dataset: PREFIX.token_counts.npy, or a count of its .bin."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.files import token_counts_path
from data_prep.indexed import IndexedReader
from data_prep.manifest import load_manifest

_BLOCK_TOKENS = 1 << 20


def load_token_counts(prefix: Path | str) -> NDArray[np.int64]:
    """[vocab_size] how often each id occurs in the dataset `prefix`, end-of-document included.

    Datasets without the file are counted, block by block. Raises UserError for a dataset that is not whole, and
    for counts that are not of it."""
    manifest = load_manifest(prefix)
    if manifest.token_counts is None:
        return count_tokens(IndexedReader(prefix).tokens, manifest.tokenizer.vocab_size)
    path = token_counts_path(prefix)
    try:
        counts = np.load(path)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); prepare the dataset again") from error
    if counts.shape != (manifest.tokenizer.vocab_size,) or counts.sum() != manifest.tokens:
        raise UserError(f"{path}: is not of this dataset; prepare it again")
    return counts


def count_tokens(ids: NDArray[np.integer], vocab_size: int) -> NDArray[np.int64]:
    """[vocab_size] how often each of `ids` [n] occurs; a mapped array is read in blocks."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(ids), _BLOCK_TOKENS):
        counts += np.bincount(ids[start : start + _BLOCK_TOKENS], minlength=vocab_size)
    return counts
