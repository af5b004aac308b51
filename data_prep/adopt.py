"""Let the trainer read what Megatron's tools prepared: `python -m data_prep.adopt PREFIX --tokenizer FILE`.

PREFIX.bin and PREFIX.idx stay as they are; beside them come a copy of the tokenizer and the manifest. Every id and
every end of a document is looked at first.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep import cli
from data_prep.errors import UserError
from data_prep.files import (
    bin_path,
    dataset_tokenizer_path,
    file_digest,
    idx_path,
    manifest_path,
    written_aside,
)
from data_prep.indexed import IndexedReader
from data_prep.manifest import (
    FORMAT_VERSION,
    DataFile,
    DomainCounts,
    Manifest,
    TokenizerInfo,
    content_fingerprint,
)
from data_prep.tokenizers import Tokenizer, load_tokenizer
from data_prep.verify import check_content

_BLOCK_TOKENS = 1 << 22


def adopt(prefix: Path | str, tokenizer: Path | str) -> Manifest:
    """Check PREFIX.bin/.idx against the tokenizer that encoded them, and describe them in a manifest.

    Raises UserError (a ValueError), and writes nothing, for a dataset that has a manifest, ids outside the
    vocabulary, documents of several sequences (--split-sentences) or without a token, and documents that do not
    end with their only end-of-document id (--append-eod was left out).
    """
    if manifest_path(prefix).exists():
        raise UserError(f"{manifest_path(prefix)}: exists already; this dataset needs no adoption")
    loaded, reader = load_tokenizer(tokenizer), IndexedReader(prefix)
    if len(reader) != len(reader.lengths):
        raise UserError(
            f"{idx_path(prefix)}: {len(reader)} documents of {len(reader.lengths)} sequences; encode them again "
            "without --split-sentences"
        )
    manifest = _describe(Path(prefix), loaded, reader)
    try:
        check_content(manifest, reader, prefix)
    except UserError as error:
        raise UserError(f"{error}; is {tokenizer} its tokenizer, and was it encoded with --append-eod?") from None
    with written_aside(dataset_tokenizer_path(prefix)) as file, loaded.path.open("rb") as source:
        shutil.copyfileobj(source, file)
    manifest.save(prefix)
    return manifest


def _describe(prefix: Path, tokenizer: Tokenizer, reader: IndexedReader) -> Manifest:
    files = [DataFile(path.name, *file_digest(path)) for path in (bin_path(prefix), idx_path(prefix))]
    counts = DomainCounts(len(reader), len(reader.tokens), _text_bytes(tokenizer, reader))
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=content_fingerprint(files[0].sha256, files[1].sha256, tokenizer.fingerprint),
        sources=(),
        tokenizer=TokenizerInfo(
            tokenizer.kind,
            tokenizer.fingerprint,
            tokenizer.vocab_size,
            tokenizer.eod_id,
            tokenizer.pad_id,
            dataset_tokenizer_path(prefix).name,
        ),
        dtype=reader.dtype.name,
        documents=counts.documents,
        tokens=counts.tokens,
        text_bytes=counts.bytes,
        domains={"unknown": counts},
        skipped={},
        bin=files[0],
        idx=files[1],
    )


def _text_bytes(tokenizer: Tokenizer, reader: IndexedReader) -> int:
    """What the tokens stand for; ids outside the vocabulary, which `check_content` refuses, count nothing."""
    lengths, total = tokenizer.token_byte_lengths().astype(np.int64), 0
    for start in range(0, len(reader.tokens), _BLOCK_TOKENS):
        ids = reader.tokens[start : start + _BLOCK_TOKENS]
        total += int(lengths[ids[(ids >= 0) & (ids < len(lengths))]].sum())
    return total


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.adopt", "Describe a dataset that Megatron's tools prepared.")
    parser.add_argument("prefix", type=Path, help="the dataset's path without a suffix")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the tokenizer file that encoded it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        manifest = adopt(options.prefix, options.tokenizer)
        print(
            f"{manifest_path(options.prefix)}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
            f"{manifest.text_bytes:,} bytes of text, {manifest.dtype}, each document with its end-of-document"
        )

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
