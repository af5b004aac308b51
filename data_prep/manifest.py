"""{prefix}.manifest.json: what a dataset holds, what it was made of, and the hashes to check it by."""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from data_prep.errors import UserError
from data_prep.files import TokenizerKind, bin_path, manifest_path, written_aside
from data_prep.lengths import LengthStatistics

FORMAT_VERSION = 1


@dataclass(frozen=True)
class SourceFile:
    """An input as it was read: its name as given, its size on the disk, its sha256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class DataFile:
    """A file of the dataset; `name` is relative to the manifest's folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer; `file` is the copy beside the manifest, `fingerprint` its sha256."""

    kind: TokenizerKind
    fingerprint: str
    vocab_size: int
    eod_id: int
    pad_id: int | None
    file: str


@dataclass(frozen=True)
class DomainCounts:
    """Documents, tokens (end-of-document included) and bytes of UTF-8 text of one domain."""

    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Subset:
    """Which documents of its sources a dataset holds: those of a split, or of a domain, or of both.

    shares: of train, validation and test, as they were asked for; data_prep.splits says what falls where."""

    split: str | None
    shares: tuple[float, float, float] | None
    domain: str | None


@dataclass(frozen=True)
class Manifest:
    """A dataset's description. `fingerprint` identifies its content: tokens, documents, tokenizer.

    skipped: by reason, over all that was made of the sources in one run. options: what else shaped the dataset.
    The last four are missing in datasets made before they were recorded."""

    format_version: int
    fingerprint: str
    sources: tuple[SourceFile, ...]
    tokenizer: TokenizerInfo
    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    domains: dict[str, DomainCounts]
    skipped: dict[str, int]
    bin: DataFile
    idx: DataFile
    token_counts: DataFile | None = None
    lengths: LengthStatistics | None = None
    subset: Subset | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def save(self, prefix: Path | str) -> None:
        """Write `{prefix}.manifest.json`, aside and renamed."""
        with written_aside(manifest_path(prefix)) as file:
            file.write(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def content_fingerprint(bin_sha256: str, idx_sha256: str, tokenizer_fingerprint: str) -> str:
    """sha256 in hexadecimal over what identifies a dataset's content, whatever its name and place."""
    return hashlib.sha256(f"{bin_sha256} {idx_sha256} {tokenizer_fingerprint}".encode()).hexdigest()


def load_manifest(prefix: Path | str) -> Manifest:
    """Read `{prefix}.manifest.json`.

    Raises UserError (a ValueError) naming the file when it is missing (then the dataset is not
    complete), broken, or of another format version.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        way_out = (
            "if Megatron's tools made the dataset, describe it with python -m data_prep.adopt"
            if bin_path(prefix).is_file()
            else "prepare the dataset with python -m data_prep.preprocess"
        )
        raise UserError(f"{path}: no such file; {way_out}")
    try:
        fields = orjson.loads(path.read_bytes())
        version = fields["format_version"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is broken ({error!r}); prepare the dataset again") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version}, this program reads {FORMAT_VERSION}")
    try:
        return _from_json(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is broken ({error}); prepare the dataset again") from error


def _subset(split: str | None, shares: list[float] | None, domain: str | None) -> Subset:
    return Subset(split, (shares[0], shares[1], shares[2]) if shares else None, domain)


def _from_json(fields: dict[str, Any]) -> Manifest:
    nested = {
        "sources": tuple(SourceFile(**source) for source in fields["sources"]),
        "tokenizer": TokenizerInfo(**fields["tokenizer"]),
        "domains": {name: DomainCounts(**counts) for name, counts in fields["domains"].items()},
        "bin": DataFile(**fields["bin"]),
        "idx": DataFile(**fields["idx"]),
    }
    for key, make in (("token_counts", DataFile), ("lengths", LengthStatistics), ("subset", _subset)):
        if fields.get(key) is not None:
            nested[key] = make(**fields[key])
    return Manifest(**(fields | nested))
