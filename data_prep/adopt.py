"""Let the trainer read what Megatron's tools prepared: `python -m data_prep.adopt PREFIX --tokenizer FILE`.

PREFIX.bin and PREFIX.idx stay as they are; beside them come a copy of the tokenizer and the manifest. Every id and
every end of a document is looked at first.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
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
    token_counts_path,
    written_aside,
)
from data_prep.indexed import IndexedReader
from data_prep.lengths import length_statistics
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


def adopt(prefix: Path | str, tokenizer: Path | str, eod_token: str | None = None) -> Manifest:
    """Check PREFIX.bin/.idx against the tokenizer that encoded them, and describe them in a manifest.

    Raises UserError (a ValueError), and writes nothing, for a dataset that has a manifest, ids outside the
    vocabulary, documents of several sequences (--split-sentences) or without a token, and documents that do not
    end with their only end-of-document id (--append-eod was left out).
    """
    if manifest_path(prefix).exists():
        raise UserError(f"{manifest_path(prefix)}: exists already; this dataset needs no adoption")
    loaded, reader = load_tokenizer(tokenizer, eod_token), IndexedReader(prefix)
    if len(reader) != len(reader.lengths):
        raise UserError(
            f"{idx_path(prefix)}: {len(reader)} documents of {len(reader.lengths)} sequences; encode them again "
            "without --split-sentences"
        )
    manifest = _describe(Path(prefix), loaded, reader)
    try:
        counts = check_content(manifest, reader, prefix)
    except UserError as error:
        raise UserError(f"{error}; is {tokenizer} its tokenizer, and was it encoded with --append-eod?") from None
    text_bytes = int(counts @ loaded.token_byte_lengths().astype(np.int64))
    with written_aside(dataset_tokenizer_path(prefix, loaded.kind)) as file:
        file.write(loaded.content)
    with written_aside(token_counts_path(prefix)) as file:
        np.save(file, counts)
    manifest = replace(
        manifest,
        text_bytes=text_bytes,
        domains={"unknown": DomainCounts(manifest.documents, manifest.tokens, text_bytes)},
        token_counts=_data_file(token_counts_path(prefix)),
        lengths=length_statistics([reader.lengths]),
    )
    manifest.save(prefix)
    return manifest


def _data_file(path: Path) -> DataFile:
    return DataFile(path.name, *file_digest(path))


def _describe(prefix: Path, tokenizer: Tokenizer, reader: IndexedReader) -> Manifest:
    """What can be said before the tokens are looked at."""
    data, index = _data_file(bin_path(prefix)), _data_file(idx_path(prefix))
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=content_fingerprint(data.sha256, index.sha256, tokenizer.fingerprint),
        sources=(),
        tokenizer=TokenizerInfo(
            tokenizer.kind,
            tokenizer.fingerprint,
            tokenizer.vocab_size,
            tokenizer.eod_id,
            tokenizer.pad_id,
            dataset_tokenizer_path(prefix, tokenizer.kind).name,
        ),
        dtype=reader.dtype.name,
        documents=len(reader),
        tokens=len(reader.tokens),
        text_bytes=0,
        domains={},
        skipped={},
        bin=data,
        idx=index,
    )


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.adopt", "Describe a dataset that Megatron's tools prepared.")
    parser.add_argument("prefix", type=Path, help="the dataset's path without a suffix")
    parser.add_argument("--tokenizer", required=True, help="what encoded it, as preprocess takes it")
    parser.add_argument("--eod_token", help="of a tokenizer.json: the special token that ends documents")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        manifest = adopt(options.prefix, options.tokenizer, options.eod_token)
        print(
            f"{manifest_path(options.prefix)}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
            f"{manifest.text_bytes:,} bytes of text, {manifest.dtype}, each document with its end-of-document"
        )

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
