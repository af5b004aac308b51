"""Train a SentencePiece tokenizer: `python -m data_prep.train_tokenizer --input FILE... --output tok.model`.

The tokenizer is lossless (but for U+2581, see SentencePieceTokenizer): identity normalisation, whitespace
kept, no dummy prefix, byte fallback, the newline a symbol of its own. Ids: 0 <unk>, 1 <s>, 2 </s> (the
end-of-document), 3 the newline, 4 to 259 the bytes; no padding id.

Training is reproducible: same inputs and options, same bytes.
"""

import heapq
import io
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from data_prep import cli
from data_prep.errors import UserError
from data_prep.files import check_named, written_aside
from data_prep.sources import (
    DEFAULT_DOMAIN_KEY,
    DEFAULT_TEXT_KEY,
    SUFFIXES,
    Document,
    OnError,
    check_sources,
    iter_documents,
)
from data_prep.tokenizers import SentencePieceTokenizer

ModelType = Literal["bpe", "unigram"]

_BLOCK_CHARACTERS = 8192  # the unit of sampling: small beside the sample, long beside a word
_MEASURED_BYTES = 2_000_000  # of the sample are encoded to measure the compression
_LEAST_VOCABULARY = 260  # 4 special pieces and 256 bytes
_NUM_THREADS = 2  # fixed: the number is stored in the model, and unigram's sums depend on it


@dataclass(frozen=True)
class TrainedTokenizer:
    """`sample_bytes` of text were trained on; `bytes_per_token` on a part of them."""

    path: Path
    fingerprint: str
    vocab_size: int
    sample_bytes: int
    bytes_per_token: float


def train_tokenizer(
    inputs: Sequence[Path | str],
    output: Path | str,
    vocab_size: int,
    *,
    model_type: ModelType = "bpe",
    sample_bytes: int = 16_000_000,
    seed: int = 0,
    split_digits: bool = True,
    text_key: str = DEFAULT_TEXT_KEY,
    on_error: OnError = "fail",
) -> TrainedTokenizer:
    """Train on a uniform sample of at most `sample_bytes` of the inputs' text and write `output`.

    Holds the sample in memory, never the corpus. Raises UserError (a ValueError) for unusable inputs and
    for a vocabulary that the text cannot fill or that is too small for its characters.
    """
    paths, output = [Path(path) for path in inputs], Path(output)
    check_named(output, "--output")
    if output.is_dir():
        raise UserError(f"--output {output} is a directory; name the .model file to write in it")
    if not _LEAST_VOCABULARY <= vocab_size < 2**31:
        raise UserError(f"--vocab_size {vocab_size}: give at least {_LEAST_VOCABULARY} and less than 2^31")
    check_sources(paths)
    documents = iter_documents(paths, text_key, DEFAULT_DOMAIN_KEY, on_error)
    sample = sample_blocks(documents, sample_bytes, seed)
    if not sample:
        raise UserError(f"{', '.join(map(str, paths))}: no text to train on; see --text_key")
    model = _train(sample, vocab_size, model_type, split_digits)
    tokenizer = SentencePieceTokenizer(output, model)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(f"--vocab_size {vocab_size}: the text fills only {tokenizer.vocab_size}; give more text")
    num_bytes = sum(len(block.encode()) for block in sample)
    bytes_per_token = _measure(tokenizer, sample[:: num_bytes // _MEASURED_BYTES + 1])
    with written_aside(output) as file:
        file.write(model)
    return TrainedTokenizer(output, tokenizer.fingerprint, vocab_size, num_bytes, bytes_per_token)


def sample_blocks(documents: Iterable[Document], sample_bytes: int, seed: int) -> list[str]:
    """A uniform sample of the documents' blocks, at most `sample_bytes` of UTF-8, in their order.

    A reservoir by random keys: the blocks with the smallest keys stay. All of the text if it is less.
    """
    generator = random.Random(seed)
    reservoir: list[tuple[float, int, str, int]] = []  # a heap by -key: the largest key on top
    total = 0
    for number, block in enumerate(block for document in documents for block in _blocks(document.text)):
        size = len(block.encode())
        heapq.heappush(reservoir, (-generator.random(), number, block, size))
        total += size
        while total > sample_bytes and len(reservoir) > 1:
            total -= heapq.heappop(reservoir)[3]
    return [block for _, _, block, _ in sorted(reservoir, key=lambda entry: entry[1])]


def _blocks(text: str) -> Iterator[str]:
    """Cut `text` into blocks of about _BLOCK_CHARACTERS, at line ends where there are any."""
    start = 0
    while start < len(text):
        end = start + _BLOCK_CHARACTERS
        if end < len(text):
            line_end = text.rfind("\n", start, end)
            end = line_end + 1 if line_end >= start else end
        yield text[start:end]
        start = end


def _train(sample: list[str], vocab_size: int, model_type: ModelType, split_digits: bool) -> bytes:
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
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            user_defined_symbols=["\n"],  # lines are trained without it; as one symbol it merges with nothing
            split_digits=split_digits,
            max_sentence_length=4 * _BLOCK_CHARACTERS,  # bytes; longer lines would be dropped silently
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


def _measure(tokenizer: SentencePieceTokenizer, blocks: list[str]) -> float:
    """Bytes per token; checks on the way that the blocks survive the round trip."""
    num_bytes = num_tokens = 0
    for block in blocks:
        ids = tokenizer.encode(block)
        if tokenizer.decode(ids) != block.replace("▁", " "):
            raise RuntimeError(f"the trained tokenizer does not give back {block[:80]!r}")
        num_bytes += len(block.encode())
        num_tokens += len(ids)
    return num_bytes / num_tokens


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.train_tokenizer", "Train a SentencePiece tokenizer.")
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, help=f"files: {', '.join(SUFFIXES)}")
    add("--output", type=Path, required=True, help="the .model to write")
    add(
        "--vocab_size",
        type=cli.positive_int,
        default=8192,
        help="pieces, bytes and controls included",
    )
    add("--model_type", choices=get_args(ModelType), default="bpe", help="bpe exports exactly")
    add("--sample_bytes", type=cli.positive_int, default=16_000_000, help="train on at most this much text")
    add("--seed", type=int, default=0, help="of the sample")
    add("--no_split_digits", action="store_true", help="let digits form longer pieces")
    add("--text_key", default=DEFAULT_TEXT_KEY, help="where a record has its text; dots reach into objects")
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
            sample_bytes=options.sample_bytes,
            seed=options.seed,
            split_digits=not options.no_split_digits,
            text_key=options.text_key,
            on_error=options.on_error,
        )
        print(
            f"{trained.path}: {trained.vocab_size:,} pieces from {trained.sample_bytes:,} bytes of text, "
            f"{trained.bytes_per_token:.2f} bytes per token, sha256 {trained.fingerprint[:16]}"
        )

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
