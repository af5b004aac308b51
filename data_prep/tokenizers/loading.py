"""A tokenizer's file or name to the Tokenizer it holds."""

import gzip
import zlib
from pathlib import Path
from typing import Literal, get_args

from data_prep.errors import UserError
from data_prep.tokenizers.gigatoken_backend import GigatokenTokenizer
from data_prep.tokenizers.hugging_face import HuggingFaceTokenizer
from data_prep.tokenizers.protocol import Tokenizer
from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer
from data_prep.tokenizers.tiktoken_ranks import ENCODINGS, TiktokenTokenizer, installed_ranks, is_rank_file

Backend = Literal["reference", "gigatoken"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def load_tokenizer(source: Path | str, eod_token: str | None = None, backend: Backend = "reference") -> Tokenizer:
    """Read a tokenizer.

    source: a SentencePiece .model, a tokenizer.json, a .tiktoken rank file (or .tiktoken.gz), told apart by their
        content; or "o200k_base" or "cl100k_base", whose ranks a package or tiktoken's cache holds.
    eod_token: the token that ends documents, for a tokenizer.json; the other kinds have their own.
    backend: "gigatoken" encodes SentencePiece BPE and tiktoken several times faster, to the same ids.

    Raises UserError (a ValueError) for a missing, empty, truncated or unknown file, for a tokenizer without an
    end-of-document token or whose control tokens a text could produce, and for a backend that does not suit.
    """
    path = Path(source)
    if str(source) in ENCODINGS and not path.exists():
        content = installed_ranks(str(source))
    elif not path.is_file():
        raise UserError(
            f"{path}: no such tokenizer file (nor one of {', '.join(ENCODINGS)}); train one with "
            "python -m data_prep.train_tokenizer"
        )
    else:
        content = _unpacked(path)
    tokenizer = _of_content(path, content, eod_token)
    return GigatokenTokenizer(tokenizer) if backend == "gigatoken" else tokenizer


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if not content:
        raise UserError(f"{path}: is empty")
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: is truncated or damaged ({error})") from error


def _of_content(path: Path, content: bytes, eod_token: str | None) -> Tokenizer:
    if content.lstrip().startswith(b"{"):
        return HuggingFaceTokenizer(path, content, eod_token)
    if eod_token is not None:
        raise UserError(
            f"--eod_token {eod_token}: {path} is no tokenizer.json and has an end of document of its own"
        )
    if is_rank_file(content):
        return TiktokenTokenizer(path, content)
    return SentencePieceTokenizer(path, content)
