"""Names of a dataset's files, and writing a file aside before it takes its name."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from data_prep.errors import UserError

_BLOCK_BYTES = 1 << 22


def bin_path(prefix: Path | str) -> Path:
    """The token ids."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """The index of the documents."""
    return Path(f"{prefix}.idx")


def manifest_path(prefix: Path | str) -> Path:
    """What the dataset is; written last, so that its presence means a complete dataset."""
    return Path(f"{prefix}.manifest.json")


def token_counts_path(prefix: Path | str) -> Path:
    """How often each id occurs."""
    return Path(f"{prefix}.token_counts.npy")


def blend_path(prefix: Path | str) -> Path:
    """The weights of the datasets that a run made of the domains."""
    return Path(f"{prefix}.blend.yaml")


TokenizerKind = Literal["sentencepiece", "huggingface", "tiktoken"]
TOKENIZER_SUFFIXES: dict[TokenizerKind, str] = {
    "sentencepiece": ".model",
    "huggingface": ".json",
    "tiktoken": ".tiktoken",
}


def dataset_tokenizer_path(prefix: Path | str, kind: TokenizerKind) -> Path:
    """The copy of the tokenizer that makes the dataset self-contained; it has the usual suffix of its kind."""
    return Path(f"{prefix}.tokenizer{TOKENIZER_SUFFIXES[kind]}")


def partial_path(path: Path) -> Path:
    """Where `path` is written until it is complete: beside it, hence on the same file system."""
    return path.with_name(path.name + ".partial")


def check_named(path: Path, option: str) -> None:
    """Refuse a path without a last part, such as "" or "..", which an unset shell variable leaves, and one that no
    manifest can hold.

    Raises UserError naming the option."""
    if path.name in ("", ".."):
        raise UserError(f"{option} {str(path)!r} names no file; is a shell variable in it unset?")
    check_utf8(path)


def check_utf8(path: Path) -> None:
    """Raise UserError for a name that is no UTF-8, as Linux allows: JSON cannot hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{str(path)!r}: the name is no UTF-8; rename it") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file among the processes of a machine; freed when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that knows no file (a full disk) the name of the one that was written."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def file_digest(path: Path) -> tuple[int, str]:
    """(size in bytes, sha256 in hexadecimal)."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


@contextmanager
def written_aside(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """A binary file that takes the name `path` only if the block ends without an exception.

    durable: it is on the disk by then, so that not even a power failure leaves a cut file under that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with naming(path), partial.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
