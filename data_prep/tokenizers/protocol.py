"""What the rest of the project knows of a tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.files import TokenizerKind


class Tokenizer(Protocol):
    """Encodes documents; every implementation is of one file and of nothing else."""

    kind: TokenizerKind
    """The family."""
    path: Path
    """Where it was read, for messages; the name itself for an encoding of a package."""
    content: bytes
    """The file that stands for this tokenizer anywhere else: load_tokenizer reads it without further options."""
    fingerprint: str
    """sha256 of `content`, in hexadecimal."""
    vocab_size: int
    """The highest id and one; ids below it may be without a token. The model may pad its own tables further."""
    eod_id: int
    """The id that ends each document; no text encodes to it."""
    pad_id: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without end-of-document and without any control token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """For each text its ids, [tokens] int32, as `encode` gives them; the arrays may be read-only.

        In the calling thread alone: a pool of processes keeps the cores busy."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; control tokens and ids without a token give no text."""
        ...

    def token_byte_lengths(self) -> NDArray[np.int32]:
        """[vocab_size] bytes of UTF-8 text that each id stands for; 0 for control tokens.

        Summed over the ids of a document it gives len(text.encode()), if the tokenizer is lossless.
        """
        ...
