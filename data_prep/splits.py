"""Which dataset a document belongs to: training, validation or test by its text's hash; a file name for a domain.

A document's place is blake2b (digest size 8) of its text in UTF-8, as a big-endian integer, divided by 2^64. With
the shares `train,validation,test` it is held out for validation below `validation`, for test from there to
`validation + test`, and trained on above. That depends on nothing else: not on the file, not on the order, not on
what else there is. Copies of a text fall on one side.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

from data_prep.errors import UserError

SPLITS = ("train", "validation", "test")
Shares = tuple[float, float, float]
"""Of train, validation and test; they sum to 1."""

_MOST_SLUG_BYTES = 80  # of the 255 that a file's name may have


def parse_shares(text: str) -> Shares:
    """`0.98,0.01,0.01` → shares. Raises UserError for anything but three shares that sum to 1."""
    try:
        train, validation, test = (float(part) for part in text.split(","))
    except ValueError:
        train = validation = test = -1.0
    if min(train, validation, test) < 0 or not abs(train + validation + test - 1) < 1e-9:  # nan, too
        raise UserError(f"--split {text}: three shares of train,validation,test that sum to 1, as 0.98,0.01,0.01")
    return train, validation, test


class HashSplit:
    """Maps texts to the name of their split."""

    def __init__(self, shares: Shares) -> None:
        _, validation, test = shares
        self._validation_end = int(validation * 2**64)
        self._test_end = int((validation + test) * 2**64)

    def of(self, text: bytes) -> str:
        """The split of a document; `text` is its UTF-8."""
        place = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        if place < self._validation_end:
            return "validation"
        return "test" if place < self._test_end else "train"


def slugs(names: Iterable[str]) -> dict[str, str]:
    """A part of a file name for each domain: "Wikipedia (en)" → "wikipedia-en".

    Names that come to the same, to nothing, or to too much get a hash of the name at their end."""
    plain = {name: _slug(name) for name in names}
    used = Counter(plain.values())
    return {
        name: slug
        if slug and used[slug] == 1 and len(slug.encode()) <= _MOST_SLUG_BYTES
        else "-".join(filter(None, [slug.encode()[:_MOST_SLUG_BYTES].decode(errors="ignore"), _short_hash(name)]))
        for name, slug in plain.items()
    }


def _slug(name: str) -> str:
    spaced = "".join(character if character.isalnum() else " " for character in name.lower())
    return "-".join(spaced.split())


def _short_hash(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
