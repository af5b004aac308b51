"""Documents to an indexed dataset: `python -m data_prep.preprocess --input FILE... --tokenizer ...`.

Everything is written to `*.partial` beside the output and renamed at the end, the manifest last: where
there is a manifest, there is a complete dataset.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import get_args

from data_prep import cli
from data_prep.batches import EncodedBatch, EncodeOptions
from data_prep.encode import SourceReader, WorkerDied, encode_sources
from data_prep.errors import UserError
from data_prep.files import (
    bin_path,
    check_named,
    dataset_tokenizer_path,
    file_digest,
    idx_path,
    manifest_path,
    naming,
    partial_path,
)
from data_prep.indexed import IndexedWriter, token_dtype
from data_prep.manifest import (
    FORMAT_VERSION,
    DataFile,
    DomainCounts,
    Manifest,
    SourceFile,
    TokenizerInfo,
    content_fingerprint,
)
from data_prep.sources import DEFAULT_DOMAIN_KEY, DEFAULT_TEXT_KEY, SUFFIXES, OnError, check_sources
from data_prep.tokenizers import Tokenizer, load_tokenizer

ProgressHook = Callable[[int, int, int], None]
"""Called now and then with (bytes read, documents, tokens)."""


class _Totals:
    """Counts added up over the batches."""

    def __init__(self) -> None:
        self.domains: dict[str, DomainCounts] = {}
        self.skipped = Counter[str]()

    def add(self, batch: EncodedBatch) -> None:
        self.skipped.update(batch.skipped)
        for name, more in batch.domains.items():
            old = self.domains.get(name, DomainCounts(0, 0, 0))
            self.domains[name] = DomainCounts(
                old.documents + more.documents, old.tokens + more.tokens, old.bytes + more.bytes
            )


def preprocess(
    inputs: Sequence[Path | str],
    tokenizer: Path | str,
    output_prefix: Path | str,
    *,
    workers: int = 1,
    text_key: str = DEFAULT_TEXT_KEY,
    domain_key: str = DEFAULT_DOMAIN_KEY,
    on_error: OnError = "fail",
    overwrite: bool = False,
    progress: ProgressHook | None = None,
) -> Manifest:
    """Encode the documents of `inputs` into `{output_prefix}.bin/.idx/.manifest.json/.tokenizer.model`.

    The bytes of the result depend on the inputs and the tokenizer, not on `workers`. Raises UserError
    (a ValueError) for the user's mistakes, an input without a token among them, and WorkerDied; either
    way it leaves no file behind.
    """
    paths = [Path(path) for path in inputs]
    prefix = Path(output_prefix)
    check_named(prefix, "--output_prefix")
    check_sources(paths)
    loaded = load_tokenizer(tokenizer)
    targets = [bin_path(prefix), idx_path(prefix), dataset_tokenizer_path(prefix), manifest_path(prefix)]
    existing = [path for path in targets if path.exists()]
    if existing and not overwrite:
        raise UserError(f"{existing[0]}: exists already; pass --overwrite or another --output_prefix")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    options = EncodeOptions(loaded.path, text_key, domain_key, on_error)
    source = SourceReader(paths, skip_damaged=on_error == "skip")
    try:
        with naming(prefix):
            totals = _write_partial(source, options, loaded, targets, workers=workers, progress=progress)
        manifest = _describe(prefix, source, loaded, totals)
        _publish(targets[:-1], manifest, prefix)
    finally:
        for path in targets:
            partial_path(path).unlink(missing_ok=True)
    return manifest


def _write_partial(
    source: SourceReader,
    options: EncodeOptions,
    tokenizer: Tokenizer,
    targets: list[Path],
    *,
    workers: int,
    progress: ProgressHook | None,
) -> _Totals:
    """Write the .bin, .idx and tokenizer copy under their partial names."""
    totals = _Totals()
    bin_file, idx_file, tokenizer_file, _ = map(partial_path, targets)
    with (
        closing(encode_sources(source, options, workers)) as batches,
        IndexedWriter(bin_file, idx_file, tokenizer.vocab_size, tokenizer.eod_id) as writer,
    ):
        for batch in batches:
            writer.add(batch.ids, batch.lengths)
            totals.add(batch)
            if progress:
                progress(source.num_bytes, writer.num_documents, writer.num_tokens)
        if source.num_damaged:
            totals.skipped["truncated_file"] += source.num_damaged
        if writer.num_tokens == 0:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(totals.skipped.items()))
            names = ", ".join(str(reader.path) for reader in source.finished)
            raise UserError(f"{names}: no document with text (skipped: {reasons or 'none'}); see --text_key")
        writer.finish()
    shutil.copyfile(tokenizer.path, tokenizer_file)
    return totals


def _describe(prefix: Path, source: SourceReader, tokenizer: Tokenizer, totals: _Totals) -> Manifest:
    """The manifest of what lies under the partial names."""
    files = []
    for path in (bin_path(prefix), idx_path(prefix)):
        files.append(DataFile(path.name, *file_digest(partial_path(path))))
    tokenizer_copy = dataset_tokenizer_path(prefix)
    if file_digest(partial_path(tokenizer_copy))[1] != tokenizer.fingerprint:
        raise UserError(f"{tokenizer.path}: changed while it was in use; run again")
    counts = totals.domains.values()
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=content_fingerprint(files[0].sha256, files[1].sha256, tokenizer.fingerprint),
        sources=tuple(SourceFile(str(done.path), done.num_bytes, done.sha256) for done in source.finished),
        tokenizer=TokenizerInfo(
            tokenizer.kind,
            tokenizer.fingerprint,
            tokenizer.vocab_size,
            tokenizer.eod_id,
            tokenizer.pad_id,
            tokenizer_copy.name,
        ),
        dtype=token_dtype(tokenizer.vocab_size).name,
        documents=sum(count.documents for count in counts),
        tokens=sum(count.tokens for count in counts),
        text_bytes=sum(count.bytes for count in counts),
        domains=dict(sorted(totals.domains.items())),
        skipped=dict(sorted(totals.skipped.items())),
        bin=files[0],
        idx=files[1],
    )


def _publish(targets: list[Path], manifest: Manifest, prefix: Path) -> None:
    """Give the files their names, the manifest last; an overwritten dataset loses its manifest first."""
    manifest_path(prefix).unlink(missing_ok=True)
    for path in targets:
        partial_path(path).replace(path)
    manifest.save(prefix)


@contextmanager
def _progress_display(total_bytes: int) -> Iterator[ProgressHook | None]:
    """A progress bar on stderr when that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total_bytes)

        def update(num_bytes: int, documents: int, tokens: int) -> None:
            bar.update(task, completed=num_bytes, description=f"{documents:,} documents  {tokens:,} tokens")

        yield update


def _print_summary(manifest: Manifest, prefix: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("domain", title=f"{prefix}: {manifest.dtype}, fingerprint {manifest.fingerprint[:16]}")
    for heading in ("documents", "tokens", "bytes", "bytes/token"):
        table.add_column(heading, justify="right")

    def add_row(name: str, counts: DomainCounts) -> None:
        per_token = f"{counts.bytes / counts.tokens:.2f}"
        table.add_row(name, f"{counts.documents:,}", f"{counts.tokens:,}", f"{counts.bytes:,}", per_token)

    for name, counts in manifest.domains.items():
        add_row(name, counts)
    table.add_section()
    add_row("total", DomainCounts(manifest.documents, manifest.tokens, manifest.text_bytes))
    console = Console()
    console.print(table)
    for reason, count in manifest.skipped.items():
        console.print(f"skipped {count:,}: {reason}")


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.preprocess", "Encode documents into an indexed dataset.")
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, help=f"files in order: {', '.join(SUFFIXES)}")
    add("--tokenizer", type=Path, required=True, help="SentencePiece .model")
    add("--output_prefix", type=Path, required=True, help="the dataset's path without a suffix")
    add("--workers", type=cli.positive_int, default=2, help="encoding processes; the output is the same")
    add("--text_key", default=DEFAULT_TEXT_KEY, help="where a record has its text; dots reach into objects")
    add("--domain_key", default=DEFAULT_DOMAIN_KEY, help="where a record has its domain's name")
    add("--on_error", choices=get_args(OnError), default="fail", help="at a line that cannot be read")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        check_sources(options.input)
        with _progress_display(sum(path.stat().st_size for path in options.input)) as progress:
            manifest = preprocess(
                options.input,
                options.tokenizer,
                options.output_prefix,
                workers=options.workers,
                text_key=options.text_key,
                domain_key=options.domain_key,
                on_error=options.on_error,
                overwrite=options.overwrite,
                progress=progress,
            )
        _print_summary(manifest, options.output_prefix)

    try:
        return cli.run(command)
    except WorkerDied as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
