"""Train a SentencePiece tokenizer: `python -m data_prep.train_tokenizer --input FILE... --output tok.model`.

The tokenizer is lossless (but for U+2581, see SentencePieceTokenizer): identity normalisation, whitespace
kept, no dummy prefix, byte fallback, the newline a symbol of its own. Ids: 0 <unk>, 1 <s>, 2 </s> (the
end-of-document), 3 the newline, 4 to 259 the bytes; no padding id.

One document in twenty is held out, to measure the compression of each domain on text that was not trained on.
Training is reproducible: same inputs and options, same bytes.
"""

import hashlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from data_prep import cli
from data_prep.domain_sample import BLOCK_CHARACTERS, DomainSample, DomainWeights
from data_prep.errors import UserError
from data_prep.files import check_named, written_aside
from data_prep.sources import (
    DEFAULT_DOMAIN_KEY,
    DEFAULT_TEXT_KEY,
    INPUT_HELP,
    OnError,
    ReadOptions,
    iter_documents,
)
from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer

ModelType = Literal["bpe", "unigram"]

_HELD_OUT = 20  # one document in so many
_MEASURED_BYTES = 4_000_000  # of held-out text are encoded, alike of all domains
_LEAST_VOCABULARY = 260  # 4 special pieces and 256 bytes
_NUM_THREADS = 2  # fixed: the number is stored in the model, and unigram's sums depend on it


@dataclass(frozen=True)
class PieceRules:
    """What a piece may hold; whatever the choice, the tokenizer is lossless.

    split_digits: each digit is a piece of its own.
    split_by_whitespace: a piece holds spaces only at its start, else also between words.
    whitespace_pieces: runs of spaces become pieces.
    whitespace_as_suffix: a space belongs to the word before it, not to the one after; does not export.
    max_piece_length: in characters.
    """

    split_digits: bool = True
    split_by_whitespace: bool = True
    whitespace_pieces: bool = True
    whitespace_as_suffix: bool = False
    max_piece_length: int = 16


@dataclass(frozen=True)
class Compression:
    """Of one domain: bytes that were trained on; bytes and tokens of its measured text."""

    sample_bytes: int
    measured_bytes: int
    measured_tokens: int


@dataclass(frozen=True)
class TrainedTokenizer:
    """What was trained, on how much; `held_out`: whether what was measured was kept out of it, which a single
    document cannot be; `on_all_text`: whether the sample is all the text, so that no weight decided about it."""

    path: Path
    fingerprint: str
    vocab_size: int
    domains: dict[str, Compression]
    held_out: bool
    on_all_text: bool

    @property
    def total(self) -> Compression:
        rows = self.domains.values()
        return Compression(
            sum(row.sample_bytes for row in rows),
            sum(row.measured_bytes for row in rows),
            sum(row.measured_tokens for row in rows),
        )


def train_tokenizer(
    inputs: Sequence[Path | str],
    output: Path | str,
    vocab_size: int,
    *,
    model_type: ModelType = "bpe",
    pieces: PieceRules = PieceRules(),
    sample_bytes: int = 16_000_000,
    domain_weights: str = "size",
    seed: int = 0,
    text_key: str = DEFAULT_TEXT_KEY,
    domain_key: str = DEFAULT_DOMAIN_KEY,
    on_error: OnError = "fail",
) -> TrainedTokenizer:
    """Train on a sample of at most `sample_bytes` of the inputs' text and write `output`.

    Holds the sample in memory, never the corpus. Raises UserError (a ValueError) for unusable inputs and
    for a vocabulary that the text cannot fill or that is too small for its characters.
    """
    output = Path(output)
    check_named(output, "--output")
    if output.is_dir():
        raise UserError(f"--output {output} is a directory; name the .model file to write in it")
    if not _LEAST_VOCABULARY <= vocab_size < 2**31:
        raise UserError(f"--vocab_size {vocab_size}: give at least {_LEAST_VOCABULARY} and less than 2^31")
    training = DomainSample(sample_bytes, DomainWeights(domain_weights), seed)
    measured = DomainSample(_MEASURED_BYTES, DomainWeights("uniform"), seed)
    for document in iter_documents(inputs, ReadOptions(text_key, domain_key, on_error)):
        (measured if is_held_out(document.text) else training).add(document)
    # Of very few documents there may be nothing to train on, or nothing to measure.
    sample = training.blocks() or measured.blocks()
    if not sample:
        raise UserError(f"{', '.join(map(str, inputs))}: no text to train on; see --text_key")
    held_out = bool(training.num_bytes and measured.num_bytes)
    model = _train([block for _, block in sample], vocab_size, model_type, pieces)
    tokenizer = SentencePieceTokenizer(output, model)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(f"--vocab_size {vocab_size}: the text fills only {tokenizer.vocab_size}; give more text")
    domains = _measure(tokenizer, sample, measured.blocks() if held_out else sample)
    with written_aside(output) as file:
        file.write(model)
    return TrainedTokenizer(output, tokenizer.fingerprint, vocab_size, domains, held_out, training.is_whole)


def is_held_out(text: str) -> bool:
    """Whether a document is kept out of every training sample: a function of its text alone.

    Its place among 2^64 is the one by which preprocess --split sorts it, which takes validation and test documents
    from the first places: up to a twentieth of the corpus, no tokenizer was trained on them."""
    place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return place < 2**64 // _HELD_OUT


def _train(sample: list[str], vocab_size: int, model_type: ModelType, pieces: PieceRules) -> bytes:
    """The bytes of the trained .model."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=(line for block in sample for line in block.split("\n") if line),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            # Lossless: what goes in comes out, spaces and line ends included.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=pieces.whitespace_pieces,
            split_by_whitespace=pieces.split_by_whitespace,
            treat_whitespace_as_suffix=pieces.whitespace_as_suffix,
            max_sentencepiece_length=pieces.max_piece_length,
            byte_fallback=True,
            user_defined_symbols=["\n"],  # lines are trained without it; as one symbol it merges with nothing
            split_digits=pieces.split_digits,
            max_sentence_length=4 * BLOCK_CHARACTERS,  # bytes; longer lines would be dropped silently
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _vocabulary_error(vocab_size, str(error)) from error
    return model.getvalue()


def _vocabulary_error(vocab_size: int, message: str) -> Exception:
    """The library's message in the project's words; any other failure stays as it is."""
    if largest := re.search(r"too high .*value <= (\d+)", message):
        return UserError(f"--vocab_size {vocab_size}: the text suffices for at most {largest[1]}")
    if smallest := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(f"--vocab_size {vocab_size}: the characters of the text need at least {smallest[1]}")
    return RuntimeError(f"SentencePiece training failed: {message}")


def _measure(
    tokenizer: SentencePieceTokenizer, sample: list[tuple[str, str]], measured: list[tuple[str, str]]
) -> dict[str, Compression]:
    """By domain; checks on the way that the measured blocks survive the round trip."""
    rows = {domain: [0, 0, 0] for domain in sorted({domain for domain, _ in [*sample, *measured]})}
    for domain, block in sample:
        rows[domain][0] += len(block.encode())
    for domain, block in measured:
        ids = tokenizer.encode(block)
        if tokenizer.decode(ids) != block.replace("▁", " "):
            raise RuntimeError(f"the trained tokenizer does not give back {block[:80]!r}")
        rows[domain][1] += len(block.encode())
        rows[domain][2] += len(ids)
    return {domain: Compression(*row) for domain, row in rows.items()}


def _print_compression(trained: TrainedTokenizer) -> None:
    from rich.console import Console
    from rich.table import Table

    measured = (
        "held-out bytes" if trained.held_out else "bytes measured"
    )  # of too few documents: the sample itself
    table = Table(
        "domain", title=f"{trained.path}: {trained.vocab_size:,} pieces, sha256 {trained.fingerprint[:16]}"
    )
    for heading in ("sample bytes", measured, "tokens", "bytes/token"):
        table.add_column(heading, justify="right")

    def add_row(name: str, row: Compression) -> None:
        ratio = f"{row.measured_bytes / row.measured_tokens:.2f}" if row.measured_tokens else "-"
        counts = (row.sample_bytes, row.measured_bytes, row.measured_tokens)
        table.add_row(name, *(f"{count:,}" for count in counts), ratio)

    for name, row in trained.domains.items():
        add_row(name, row)
    table.add_section()
    add_row("total", trained.total)
    Console().print(table)


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.train_tokenizer", "Train a SentencePiece tokenizer.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=INPUT_HELP)
    add("--output", type=Path, required=True, help="the .model to write")
    add(
        "--vocab_size",
        type=cli.positive_int,
        default=8192,
        help="pieces, bytes and controls included",
    )
    add("--model_type", choices=get_args(ModelType), default="bpe", help="bpe exports exactly")
    add("--sample_bytes", type=cli.positive_int, default=16_000_000, help="train on at most this much text")
    add(
        "--domain_weights",
        default="size",
        help="the domains' shares of the sample: size, uniform, pile, or a YAML file of {domain: weight}",
    )
    add("--seed", type=int, default=0, help="of the sample")
    add("--no_split_digits", action="store_true", help="let digits form longer pieces")
    add("--no_split_by_whitespace", action="store_true", help="let pieces reach over spaces between words")
    add("--no_whitespace_pieces", action="store_true", help="let no runs of spaces be pieces")
    add("--whitespace_as_suffix", action="store_true", help="put a space with the word before it; does not export")
    add("--max_piece_length", type=cli.positive_int, default=16, help="in characters")
    add("--text_key", default=DEFAULT_TEXT_KEY, help="where a record has its text; dots reach into objects")
    add("--domain_key", default=DEFAULT_DOMAIN_KEY, help="where a record has its domain's name")
    add("--on_error", choices=get_args(OnError), default="fail", help="at a line that cannot be read")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        trained = train_tokenizer(
            options.input,
            options.output,
            options.vocab_size,
            model_type=options.model_type,
            pieces=PieceRules(
                split_digits=not options.no_split_digits,
                split_by_whitespace=not options.no_split_by_whitespace,
                whitespace_pieces=not options.no_whitespace_pieces,
                whitespace_as_suffix=options.whitespace_as_suffix,
                max_piece_length=options.max_piece_length,
            ),
            sample_bytes=options.sample_bytes,
            domain_weights=options.domain_weights,
            seed=options.seed,
            text_key=options.text_key,
            domain_key=options.domain_key,
            on_error=options.on_error,
        )
        _print_compression(trained)
        if trained.on_all_text and options.domain_weights != "size":
            print(
                f"--domain_weights {options.domain_weights} decided nothing: all text fits into "
                f"--sample_bytes {options.sample_bytes}"
            )

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
