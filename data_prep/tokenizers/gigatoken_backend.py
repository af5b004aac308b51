"""gigatoken as the encoder of a SentencePiece BPE or tiktoken tokenizer: the same ids, several times faster."""

import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import orjson
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.files import TokenizerKind
from data_prep.tokenizers.protocol import Tokenizer
from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer
from data_prep.tokenizers.tiktoken_ranks import TiktokenTokenizer

if TYPE_CHECKING:
    import gigatoken

# Its caches are never emptied: after this many characters the encoder is made anew. 100 million characters of
# English, code and markup left 90 MB (o200k_base) and 120 MB (SentencePiece) behind; making takes 0.3 s.
_CACHED_CHARACTERS = 100_000_000
_COMPARED_CHARACTERS = 500_000  # of the first documents

# Looks of control tokens, blanks, line ends, digits, marks, scripts, emoji: where encoders differ.
PROBES = (
    "a </s> b<s><unk><pad><|endoftext|><|endofprompt|><|fim_prefix|><0x0A>▁▁ ▁",
    "  two  spaces \t\ttabs\n\n\n  \r\n\u00a0\u2003\u3000 \x0b\x0c\x85 end   ",
    "I'll we'VE it'ſ 'D 1234567890 ٣٤٥ x²³ 3.14e-10 CamelCASEWords ǅungla ÉCOLE école e\u0301",
    "漢字かな カナ 한국어 العربية हिन्दी ไทย Ελληνικά Русский 🙂👩‍👩‍👧🏽 \x00\x1c\x7f\u200b\ufeff\ue000\U0010ffff",
    "if (a!=b){\n\t//---====////\n}\r\n" + " " * 300 + "x" + "\t" * 200 + "\n" + "-" * 500 + "a" * 500,
)


class GigatokenTokenizer:
    """`reference` with another encoder. It is compared with the reference on PROBES and on the first documents.

    Everything but the encoding, the fingerprint among it, is the reference's.
    """

    def __init__(self, reference: Tokenizer) -> None:
        """Raises UserError for a kind that gigatoken cannot encode exactly, and when the package is missing."""
        if isinstance(reference, SentencePieceTokenizer) and not reference.is_bpe:
            raise UserError(f"{reference.path}: gigatoken knows no unigram; leave out --tokenizer_backend")
        if not isinstance(reference, SentencePieceTokenizer | TiktokenTokenizer):
            raise UserError(
                f"{reference.path}: --tokenizer_backend gigatoken serves SentencePiece BPE and tiktoken, not "
                f"{reference.kind}"
            )
        self._reference = reference
        self.kind: TokenizerKind = reference.kind
        self.path, self.content, self.fingerprint = reference.path, reference.content, reference.fingerprint
        self.vocab_size, self.eod_id, self.pad_id = reference.vocab_size, reference.eod_id, reference.pad_id
        self._renew()
        self._num_compared = 0
        for probe in PROBES:
            self._compare(probe, self._encoder.encode(probe))

    def _renew(self) -> None:
        self._num_encoded = 0
        try:
            self._encoder = _encoder(self._reference)
        except ImportError as error:
            raise UserError("gigatoken is not installed; pip install leviathan_ds[data]") from error
        except ValueError as error:
            raise UserError(
                f"{self.path}: gigatoken cannot encode it: {error}; leave out --tokenizer_backend"
            ) from error

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """As the protocol says. Raises UserError when one of the first documents differs from the reference."""
        encoded = []
        for text in texts:
            if self._num_encoded >= _CACHED_CHARACTERS:
                self._renew()
            self._num_encoded += len(text)
            ids = self._encoder.encode(text).view(np.int32)
            if self._num_compared < _COMPARED_CHARACTERS:
                self._num_compared += len(text)
                self._compare(text, ids)
            encoded.append(ids)
        return encoded

    def _compare(self, text: str, ids: NDArray[np.integer]) -> None:
        expected = self._reference.encode_batch([text])[0]
        if not np.array_equal(ids, expected):
            raise UserError(
                f"{self.path}: gigatoken encodes {text[:60]!r} otherwise than {self.kind}; "
                "leave out --tokenizer_backend"
            )

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)

    def token_byte_lengths(self) -> NDArray[np.int32]:
        return self._reference.token_byte_lengths()


def _encoder(reference: SentencePieceTokenizer | TiktokenTokenizer) -> "gigatoken.Tokenizer":
    """gigatoken's tokenizer without any special token, which it would recognise in a text."""
    import gigatoken

    if isinstance(reference, TiktokenTokenizer):
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.write(reference.content)
            file.flush()
            scheme = reference.name.removesuffix("_base")
            return gigatoken.Tokenizer.from_tiktoken(file.name, pretokenizer=scheme, special_tokens={})
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    description = orjson.loads(sentencepiece_to_tokenizer_json(reference.content))
    description["added_tokens"] = [token for token in description["added_tokens"] if not token["special"]]
    return gigatoken.Tokenizer.from_json(orjson.dumps(description))
