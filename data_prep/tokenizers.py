"""One protocol for all tokenizers, and the SentencePiece one.

No text can produce a control token: a literal `</s>` in a document is encoded as ordinary pieces.
"""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError

_WORD_BOUNDARY = "▁"  # SentencePiece's picture of a space


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer."""

    kind: str
    """The family: "sentencepiece"."""
    path: Path
    fingerprint: str
    """sha256 of the file, in hexadecimal."""
    vocab_size: int
    """Number of ids; every id is below it. The model may pad its own tables further."""
    eod_id: int
    """The id that ends each document; no text encodes to it."""
    pad_id: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without end-of-document and without any control token."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; control tokens give no text."""
        ...

    def token_byte_lengths(self) -> NDArray[np.int32]:
        """[vocab_size] bytes of UTF-8 text that each id stands for; 0 for control tokens.

        Summed over the ids of a document it gives len(text.encode()), if the tokenizer is lossless.
        """
        ...


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Read a tokenizer file.

    Raises UserError (a ValueError) for a missing, empty, truncated or unknown file, and for a tokenizer
    without an end-of-document token.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file; train one with python -m data_prep.train_tokenizer")
    return SentencePieceTokenizer(path, path.read_bytes())


class SentencePieceTokenizer:
    """A SentencePiece .model (BPE or unigram); end-of-document is its eos token.

    SentencePiece writes a space as U+2581, so a U+2581 in the text decodes to a space: the one
    character that the tokenizers of data_prep.train_tokenizer do not give back.
    """

    kind = "sentencepiece"

    def __init__(self, path: Path, model: bytes) -> None:
        """`model` is the file's content. Raises UserError as load_tokenizer does."""
        from sentencepiece import SentencePieceProcessor

        if not _has_all_parts(model):
            problem = "is empty" if not model else "is truncated or no SentencePiece .model"
            raise UserError(f"{path}: {problem}")
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"{path}: is truncated or no SentencePiece .model") from error
        self.path = path
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0:
            raise UserError(f"{path}: has no eos token to end documents with; train it with an eos_id")
        if not self._processor.is_control(self.eod_id):
            # A "user defined" eos would be matched in the text, and a document could end itself.
            raise UserError(f"{path}: its eos token is no control token, so text could produce it")
        pad_id = self._processor.pad_id()
        self.pad_id: int | None = pad_id if pad_id >= 0 else None

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def token_byte_lengths(self) -> NDArray[np.int32]:
        """[vocab_size] int32; a word boundary counts as one space, a byte-fallback piece as one byte.

        The unknown token, which byte fallback never uses, counts 0 like the control tokens."""
        processor = self._processor
        lengths = np.zeros(self.vocab_size, np.int32)
        for token in range(self.vocab_size):
            if processor.is_byte(token):
                lengths[token] = 1
            elif not (processor.is_control(token) or processor.is_unknown(token)):
                lengths[token] = len(processor.id_to_piece(token).replace(_WORD_BOUNDARY, " ").encode())
        return lengths


def _has_all_parts(model: bytes) -> bool:
    """Whether a ModelProto has its pieces (field 1), trainer (2) and normalizer (3) specification.

    The library loads a file cut exactly between two pieces without complaint; the specifications come
    after the pieces, so their absence shows the cut.
    """
    fields, position = set[int](), 0
    try:
        while position < len(model):
            tag, position = _varint(model, position)
            if tag & 7 != 2:  # every top-level field is length-delimited
                return False
            size, position = _varint(model, position)
            position += size
            fields.add(tag >> 3)
    except IndexError:
        return False
    return position == len(model) and fields >= {1, 2, 3}


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(value, next position) of a protobuf varint."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
