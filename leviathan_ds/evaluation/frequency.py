"""Deciles of the vocabulary by how often the training data hold a token: where in them does a model gain?

Each decile holds a tenth of the *training tokens*, not of the vocabulary: of 200,000 ids the rarer half is a
hundredth of any text, and nine deciles of ids would share their noise. So every decile of held-out text is about
equally large, equally well measured, and counts alike in the mean loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_prep.token_counts import load_token_counts
from leviathan_ds.data.index import Part, shares

NUM_DECILES = 10


def training_frequencies(parts: Sequence[Part]) -> NDArray[np.float64]:
    """[V] what part of the training tokens each id is, over datasets (`CheckedData.train`) by their shares.

    Of whole datasets: documents that are held out by their index are counted too. Raises UserError as
    `load_token_counts`.
    """
    counts = [load_token_counts(part.prefix) for part in parts]
    return np.sum([share / each.sum() * each for share, each in zip(shares(parts), counts, strict=True)], axis=0)


def deciles(frequencies: NDArray[np.float64]) -> NDArray[np.int64]:
    """[V] the decile of each id: 0 for the most frequent, 9 for the rarest and for those never seen.

    In descending order of frequency (equal ones by id) an id lies where the middle of its tokens lies. An id with
    more than a tenth of all tokens can leave a decile empty.
    """
    order = np.argsort(-frequencies, kind="stable")
    ordered = frequencies[order]
    middles = np.cumsum(ordered) - ordered / 2
    result = np.empty(len(frequencies), np.int64)
    result[order] = np.minimum(NUM_DECILES - 1, NUM_DECILES * middles / ordered.sum()).astype(np.int64)
    result[frequencies == 0] = NUM_DECILES - 1
    return result
