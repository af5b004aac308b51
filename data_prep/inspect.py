"""Look into a dataset: `python -m data_prep.inspect PREFIX [--documents N] [--first i] [--plots DIR]`.

Prints what the dataset is and some of its documents, decoded, with their ids and boundaries; draws the
distribution of document lengths and the frequency of token ids. A dataset without a manifest, as
megatron-core's own tools write them, is shown without text.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import cli
from data_prep.errors import UserError
from data_prep.files import bin_path, idx_path, manifest_path
from data_prep.indexed import IndexedReader
from data_prep.manifest import Manifest, load_manifest
from data_prep.summary import print_summary
from data_prep.token_counts import count_tokens, load_token_counts
from data_prep.tokenizers import Tokenizer, load_tokenizer

_BLOCK_DOCUMENTS = 1 << 20
_LAST_IDS = 8  # shown of a document that is not shown whole
_BINS_PER_DECADE = 12


class Dataset:
    """A dataset and what is known of it; without a manifest, neither tokenizer nor vocabulary is."""

    def __init__(self, prefix: Path) -> None:
        """Raises UserError for a .bin and .idx that do not fit, and a manifest or tokenizer that is not theirs."""
        self.prefix = prefix
        self.reader = IndexedReader(prefix)
        self.manifest: Manifest | None = None
        self.tokenizer: Tokenizer | None = None
        if not manifest_path(prefix).exists():
            return
        self.manifest = manifest = load_manifest(prefix)
        found = (len(self.reader), len(self.reader.tokens), self.reader.dtype.name)
        said = (manifest.documents, manifest.tokens, manifest.dtype)
        if found != said:
            raise UserError(
                f"{manifest_path(prefix)}: says {said[0]} documents, {said[1]} tokens, {said[2]}; "
                f"the files hold {found[0]}, {found[1]}, {found[2]}; prepare the dataset again"
            )
        path = prefix.parent / manifest.tokenizer.file
        self.tokenizer = load_tokenizer(path)
        if self.tokenizer.fingerprint != manifest.tokenizer.fingerprint:
            raise UserError(f"{path}: is not the tokenizer of this dataset (its fingerprint differs)")

    def document_lengths(self) -> Iterator[NDArray[np.int64]]:
        """Tokens of the documents, in order, in bounded blocks."""
        indices = self.reader.document_indices
        for start in range(0, len(self.reader), _BLOCK_DOCUMENTS):
            ends = np.asarray(indices[start : start + _BLOCK_DOCUMENTS + 1])
            sums = np.cumsum(self.reader.lengths[ends[0] : ends[-1]], dtype=np.int64)
            yield np.diff(np.concatenate([[0], sums])[ends - ends[0]])

    def token_counts(self) -> NDArray[np.int64]:
        """[vocabulary, or largest id + 1] how often each id occurs."""
        if self.manifest:
            return load_token_counts(self.prefix)
        return count_tokens(self.reader.tokens, int(self.reader.tokens.max()) + 1)


def describe(dataset: Dataset) -> Iterator[str]:
    """Lines on the dataset as a whole, with the checks that it has passed."""
    reader, manifest = dataset.reader, dataset.manifest
    yield (
        f"{dataset.prefix}: {len(reader):,} documents in {len(reader.lengths):,} sequences, "
        f"{len(reader.tokens):,} tokens, {reader.dtype.name}"
    )
    yield f"{idx_path(dataset.prefix)}: header, size and the size of {bin_path(dataset.prefix).name} agree"
    if manifest is None:
        yield f"{manifest_path(dataset.prefix)}: no such file, so tokenizer and domains are unknown: ids only"
        return
    tokenizer = manifest.tokenizer
    yield (
        f"{manifest_path(dataset.prefix)}: documents, tokens and dtype as in the index; "
        "python -m data_prep.verify checks everything"
    )
    padding = "none" if tokenizer.pad_id is None else tokenizer.pad_id
    yield (
        f"{tokenizer.file}: {tokenizer.kind}, {tokenizer.vocab_size:,} ids, end-of-document {tokenizer.eod_id}, "
        f"padding {padding}, sha256 {tokenizer.fingerprint[:16]} as recorded"
    )


def show_document(dataset: Dataset, number: int, num_ids: int) -> Iterator[str]:
    """Lines on document `number`: where it lies, its first `num_ids` ids (and last few), their text."""
    reader = dataset.reader
    ids = reader[number]
    sequence = int(reader.document_indices[number])
    starts_inside = sequence < len(reader.offsets)  # not so for an empty document at the end
    start = int(reader.offsets[sequence]) // reader.dtype.itemsize if starts_inside else len(reader.tokens)
    place = f"tokens {start:,} to {start + len(ids):,}, {len(ids):,} long"
    yield f"document {number:,}: {place}{_ending(dataset, ids)}"
    whole = len(ids) <= num_ids + _LAST_IDS
    parts = [ids] if whole else [ids[:num_ids], ids[-_LAST_IDS:]]
    between = f" ... {len(ids) - num_ids - _LAST_IDS:,} more ... "
    yield f"  ids   {between.join(' '.join(map(str, part)) for part in parts)}"
    if dataset.tokenizer:
        yield f"  text  {between.join(repr(dataset.tokenizer.decode(part.tolist())) for part in parts)}"


def _ending(dataset: Dataset, ids: NDArray[np.integer]) -> str:
    """Whether end-of-document is where it belongs: once, at the end."""
    if dataset.tokenizer is None:
        return ""
    places = np.flatnonzero(ids == dataset.tokenizer.eod_id)
    if places.tolist() == [len(ids) - 1]:
        return ", ends with its only end-of-document"
    return f", WRONG: {len(places)} end-of-document, the last id is {ids[-1] if len(ids) else 'missing'}"


def draw(dataset: Dataset, folder: Path) -> tuple[Path, Path]:
    """Write both plots to `folder`, which is made if need be; their paths."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"{dataset.prefix.name}.{name}.png" for name in ("lengths", "frequencies"))
    for path, fill in zip(paths, (_draw_lengths, _draw_frequencies), strict=True):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        fill(dataset, axes)
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
    return paths[0], paths[1]


def length_bins(longest: int) -> NDArray[np.floating]:
    """Edges of bins for lengths of 1 to `longest`, of one width on a logarithmic axis but for rounding."""
    edges = np.floor(np.geomspace(1, longest + 1, max(2, int(np.log10(longest + 1) * _BINS_PER_DECADE))))
    edges[-1] = longest + 1  # rounding down must leave no bin of one length, too thin to see, for the longest
    return np.unique(edges)


def _draw_lengths(dataset: Dataset, axes: Any) -> None:
    """Documents, and the tokens in them, by the documents' length."""
    longest = max(int(block.max()) for block in dataset.document_lengths())
    edges = length_bins(longest)
    documents, tokens = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for lengths in dataset.document_lengths():
        documents += np.histogram(lengths, edges)[0]
        tokens += np.histogram(lengths, edges, weights=lengths)[0]
    total_documents, total_tokens = len(dataset.reader), len(dataset.reader.tokens)
    for shares, name in ((documents / total_documents, "of documents"), (tokens / total_tokens, "of tokens")):
        axes.stairs(100 * shares, edges, fill=True, alpha=0.45, label=f"% {name}")
    axes.set(
        xscale="log",
        xlim=(max(1, edges[np.flatnonzero(documents)[0]]), longest * 1.1),
        xlabel="document length (tokens, end-of-document included)",
        ylabel="share of all (%)",
        title=f"{dataset.prefix.name}: {total_documents:,} documents, {total_tokens:,} tokens",
    )
    axes.legend()


def _draw_frequencies(dataset: Dataset, axes: Any) -> None:
    """Occurrences of the ids by their rank."""
    counts = dataset.token_counts()
    present = np.sort(counts[counts > 0])[::-1]
    axes.plot(np.arange(1, len(present) + 1), present, drawstyle="steps-mid")
    never = len(counts) - len(present)
    vocabulary = (
        f"{never:,} of {len(counts):,} ids never occur" if dataset.manifest else f"largest id {len(counts) - 1:,}"
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="rank of the token id",
        ylabel="occurrences",
        title=f"{dataset.prefix.name}: {len(present):,} distinct ids; {vocabulary}",
    )


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.inspect", "Show documents and figures of an indexed dataset.")
    add = parser.add_argument
    add("prefix", type=Path, help="the dataset's path without a suffix")
    add("--documents", type=int, default=3, help="how many documents to print")
    add("--first", type=int, default=0, help="number of the first, from 0; negative: from the end")
    add("--tokens", type=cli.positive_int, default=64, help="ids to print from the beginning of a document")
    add("--plots", type=Path, metavar="DIR", help="where to draw document lengths and token frequencies")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        if options.documents < 0:
            raise UserError(f"--documents {options.documents}: must not be negative")
        dataset = Dataset(options.prefix)
        total = len(dataset.reader)
        first = options.first + total if options.first < 0 else options.first
        if not 0 <= first < total:
            raise UserError(f"--first {options.first}: the dataset has {total:,} documents")
        print(*describe(dataset), sep="\n")
        if dataset.manifest:
            print_summary({dataset.prefix: dataset.manifest}, dataset.prefix)
        for number in range(first, min(first + options.documents, total)):
            print("", *show_document(dataset, number, options.tokens), sep="\n")
        if options.plots:
            print("", *draw(dataset, options.plots), sep="\n")

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
