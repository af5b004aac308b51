"""SentencePiece's .model files: BPE and unigram, with and without byte fallback."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.files import TokenizerKind

_WORD_BOUNDARY = "▁"  # SentencePiece's picture of a space
_BLOCK_CHARACTERS = 1000  # measured: 64 to 4000 differ little, 1000 is the best


class SentencePieceTokenizer:
    """A SentencePiece .model (BPE or unigram); end-of-document is its eos token.

    SentencePiece writes a space as U+2581, so a U+2581 in the text decodes to a space: the one
    character that the tokenizers of data_prep.train_tokenizer do not give back.
    """

    kind: TokenizerKind = "sentencepiece"

    def __init__(self, path: Path, model: bytes) -> None:
        """`model` is the file's content. Raises UserError as load_tokenizer does."""
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

        if not _has_all_parts(model):
            problem = "is empty" if not model else "is truncated or no SentencePiece .model"
            raise UserError(f"{path}: {problem}")
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"{path}: is truncated or no SentencePiece .model") from error
        proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
        proto.ParseFromString(model)
        self.is_bpe: bool = proto.trainer_spec.model_type == proto.trainer_spec.BPE
        self._cut = _exact_cut(proto) if self.is_bpe else None
        self.path, self.content = path, model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0:
            # Missing, or "user defined" instead of control, in which case text could produce it.
            raise UserError(f"{path}: has no eos control token to end documents with; train another")
        pad_id = self._processor.pad_id()
        self.pad_id: int | None = pad_id if pad_id >= 0 else None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """As the protocol says. BPE is encoded in short blocks where that is exact: it is faster, and the time and
        memory that the library takes for a document grow faster than its length."""
        blocks, counts = [], []
        for text in texts:
            count = len(blocks)
            blocks.extend(self._blocks(text))
            counts.append(len(blocks) - count)
        encoded: list[NDArray[np.int32]] = self._processor.encode(blocks, return_type="numpy", num_threads=1)
        documents, position = [], 0
        for count in counts:
            parts = encoded[position : position + count]
            documents.append(parts[0] if count == 1 else np.concatenate(parts))
            position += count
        return documents

    def _blocks(self, text: str) -> list[str]:
        if self._cut is None:
            return [text]
        blocks, start = [], 0
        while len(text) - start > _BLOCK_CHARACTERS and (cut := self._cut.search(text, start + _BLOCK_CHARACTERS)):
            blocks.append(text[start : cut.start()])
            start = cut.start()
        return [*blocks, text[start:]]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))

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


def _exact_cut(proto: Any) -> re.Pattern[str] | None:
    """Where a text may be cut without a change of its BPE ids: a pattern of places, or None for nowhere.

    BPE joins two neighbours only into a piece of the model. So nothing reaches over a place between two characters
    that are neighbours in no piece: after a line end where the newline is a piece of its own and in no other, and
    before a space after something else where no piece has a space but at its start. What looks beyond neighbours
    must be off: normalisation and a dummy prefix. Unknown neighbours are joined too: newline and space must be
    known.
    """
    normalizer = proto.normalizer_spec
    if (
        normalizer.precompiled_charsmap
        or normalizer.add_dummy_prefix
        or normalizer.remove_extra_whitespaces
        or not normalizer.escape_whitespaces
        or proto.trainer_spec.treat_whitespace_as_suffix
    ):
        return None
    piece_type = proto.SentencePiece
    known = {piece.piece for piece in proto.pieces if piece.type in (piece_type.NORMAL, piece_type.USER_DEFINED)}
    places = []
    if "\n" in known and not any("\n" in piece for piece in known - {"\n"}):
        places.append(r"(?<=\n)")
    inner_space = re.compile(f"[^{_WORD_BOUNDARY}]{_WORD_BOUNDARY}| ")
    if _WORD_BOUNDARY in known and not any(inner_space.search(piece) for piece in known):
        places.append(f"(?<=[^ {_WORD_BOUNDARY}])(?= )")
    return re.compile("|".join(places)) if places else None


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
