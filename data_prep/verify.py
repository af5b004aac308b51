"""Check a dataset from end to end: `python -m data_prep.verify PREFIX`.

Everything the manifest says of the dataset's own files is computed again from them. The source files are
not needed.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep import cli
from data_prep.errors import UserError
from data_prep.files import (
    bin_path,
    dataset_tokenizer_path,
    file_digest,
    idx_path,
    manifest_path,
    token_counts_path,
)
from data_prep.indexed import IndexedReader, token_dtype
from data_prep.lengths import length_statistics
from data_prep.manifest import DataFile, Manifest, content_fingerprint, load_manifest
from data_prep.token_counts import load_token_counts
from data_prep.tokenizers import load_tokenizer

_BLOCK_TOKENS = 1 << 20  # bincount makes an int64 copy of what it counts
_BLOCK_DOCUMENTS = 1 << 20


def verify(prefix: Path | str, report: Callable[[str], None] = lambda line: None) -> Manifest:
    """Check the dataset `prefix` and return its manifest; `report` gets a line for each check passed.

    Raises UserError (a ValueError) naming the file at fault at the first failure.
    """
    manifest = load_manifest(prefix)
    _check_manifest(manifest, prefix)
    report(f"{manifest_path(prefix)}: totals agree with its domains ({len(manifest.domains)})")
    reader = IndexedReader(prefix)
    report(f"{idx_path(prefix)}: header and size are right, and the .bin has the size it describes")
    files = [(idx_path(prefix), manifest.idx), (bin_path(prefix), manifest.bin)]
    if manifest.token_counts:
        files.append((token_counts_path(prefix), manifest.token_counts))
    for path, recorded in files:
        _check_file(path, recorded)
        report(f"{path}: {recorded.bytes:,} bytes, sha256 as recorded")
    _check_tokenizer(manifest, prefix)
    report(f"{dataset_tokenizer_path(prefix, manifest.tokenizer.kind)}: is the recorded tokenizer")
    check_content(manifest, reader, prefix, report)
    return manifest


def check_content(
    manifest: Manifest,
    reader: IndexedReader,
    prefix: Path | str,
    report: Callable[[str], None] = lambda line: None,
) -> NDArray[np.int64]:
    """Check what the .idx and the .bin hold, read through; how often each id occurs [vocab_size].

    Raises UserError as `verify` does."""
    _check_index(manifest, reader, idx_path(prefix))
    report(f"{idx_path(prefix)}: {manifest.documents:,} documents, lengths sum to {manifest.tokens:,} tokens")
    counts = _check_tokens(manifest, reader, bin_path(prefix))
    if manifest.token_counts and np.any(counts != load_token_counts(prefix)):
        raise UserError(f"{token_counts_path(prefix)}: the counts are not those of the .bin")
    report(
        f"{bin_path(prefix)}: ids below {manifest.tokenizer.vocab_size:,}, "
        f"one end-of-document ({manifest.tokenizer.eod_id}) at the end of each document"
    )
    return counts


def _check_manifest(manifest: Manifest, prefix: Path | str) -> None:
    """The manifest agrees with itself."""
    path = manifest_path(prefix)
    domains = manifest.domains.values()
    for name, total, parts in (
        ("documents", manifest.documents, sum(counts.documents for counts in domains)),
        ("tokens", manifest.tokens, sum(counts.tokens for counts in domains)),
        ("text_bytes", manifest.text_bytes, sum(counts.bytes for counts in domains)),
    ):
        if total != parts:
            raise UserError(f"{path}: {name} is {total}, its domains sum to {parts}")
    tokenizer = manifest.tokenizer
    if manifest.fingerprint != content_fingerprint(
        manifest.bin.sha256, manifest.idx.sha256, tokenizer.fingerprint
    ):
        raise UserError(f"{path}: its fingerprint does not follow from its hashes")
    names = (manifest.bin.name, manifest.idx.name, tokenizer.file)
    paths = (bin_path(prefix), idx_path(prefix), dataset_tokenizer_path(prefix, tokenizer.kind))
    expected = tuple(path.name for path in paths)
    if names != expected:
        raise UserError(f"{path}: describes {', '.join(names)}, not the files beside it; was it renamed?")
    # Megatron's tools may have written a small vocabulary as int32 (data_prep.adopt).
    if manifest.dtype not in ("int32", token_dtype(tokenizer.vocab_size).name):
        raise UserError(f"{path}: dtype {manifest.dtype} does not suit {tokenizer.vocab_size} ids")


def _check_file(path: Path, recorded: DataFile) -> None:
    if not path.is_file():
        raise UserError(f"{path}: no such file; prepare the dataset again")
    size, digest = file_digest(path)
    if size != recorded.bytes:
        raise UserError(f"{path}: has {size} bytes, the manifest says {recorded.bytes}")
    if digest != recorded.sha256:
        raise UserError(f"{path}: its sha256 is not the manifest's; the file was changed or is another's")


def _check_tokenizer(manifest: Manifest, prefix: Path | str) -> None:
    recorded = manifest.tokenizer
    tokenizer = load_tokenizer(dataset_tokenizer_path(prefix, recorded.kind))
    for name in ("fingerprint", "kind", "vocab_size", "eod_id", "pad_id"):
        found, said = getattr(tokenizer, name), getattr(recorded, name)
        if found != said:
            raise UserError(f"{tokenizer.path}: its {name} is {found}, the manifest says {said}")


def _check_index(manifest: Manifest, reader: IndexedReader, path: Path) -> None:
    """Lengths, offsets and document indices describe one gapless sequence per document."""
    if reader.dtype.name != manifest.dtype:
        raise UserError(f"{path}: dtype {reader.dtype.name}, the manifest says {manifest.dtype}")
    if not len(reader) == len(reader.lengths) == manifest.documents:
        raise UserError(
            f"{path}: {len(reader)} documents in {len(reader.lengths)} sequences, "
            f"the manifest says {manifest.documents} documents"
        )
    tokens = 0
    for first, last in _ranges(manifest.documents, _BLOCK_DOCUMENTS):
        lengths = reader.lengths[first:last].astype(np.int64)
        ends = tokens + np.cumsum(lengths)
        if lengths.min() < 1:
            raise UserError(f"{path}: document {first + int(lengths.argmin())} has no token")
        if np.any(reader.offsets[first:last] != (ends - lengths) * reader.dtype.itemsize):
            raise UserError(f"{path}: the byte offsets do not follow from the lengths")
        if np.any(reader.document_indices[first : last + 1] != np.arange(first, last + 1)):
            raise UserError(f"{path}: the document indices are not one sequence per document")
        tokens = int(ends[-1])
    blocks = [reader.lengths[first:last] for first, last in _ranges(manifest.documents, _BLOCK_DOCUMENTS)]
    if manifest.lengths and manifest.lengths != length_statistics(blocks):
        raise UserError(f"{path}: its documents' lengths have not the statistics of the manifest")
    if not tokens == manifest.tokens == len(reader.tokens):
        raise UserError(f"{path}: lengths sum to {tokens} tokens, the manifest says {manifest.tokens}")


def _check_tokens(manifest: Manifest, reader: IndexedReader, path: Path) -> NDArray[np.int64]:
    """Ids lie in the vocabulary; each document ends with its only end-of-document. Returns each id's count."""
    tokenizer = manifest.tokenizer
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for first, last in _ranges(manifest.tokens, _BLOCK_TOKENS):
        ids = reader.tokens[first:last]
        wrong = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
        if len(wrong):
            position = first + int(wrong[0])
            document = int(np.searchsorted(reader.offsets, position * reader.dtype.itemsize, "right")) - 1
            raise UserError(
                f"{path}: id {reader.tokens[position]} in document {document} is outside the vocabulary "
                f"of {tokenizer.vocab_size}"
            )
        counts += np.bincount(ids, minlength=tokenizer.vocab_size)
    num_ends = counts[tokenizer.eod_id]
    if num_ends != manifest.documents:
        raise UserError(f"{path}: {num_ends} end-of-document ids in {manifest.documents} documents")
    for first, last in _ranges(manifest.documents, _BLOCK_DOCUMENTS):
        ends = reader.offsets[first:last] // reader.dtype.itemsize + reader.lengths[first:last] - 1
        without = np.flatnonzero(reader.tokens[ends] != tokenizer.eod_id)
        if len(without):
            raise UserError(f"{path}: document {first + int(without[0])} does not end with end-of-document")
    return counts


def _ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, total)) for first in range(0, total, step))


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.verify", "Check an indexed dataset from end to end.")
    parser.add_argument("prefix", type=Path, help="the dataset's path without a suffix")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        verify(options.prefix, print)
        print(f"{options.prefix}: everything agrees with the manifest")

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
