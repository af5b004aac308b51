"""What a run would cost, from a sample of its inputs."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_prep.encode import EncodeOptions, Progress, ShardEncoder
from data_prep.errors import UserError
from data_prep.indexed import token_dtype
from data_prep.progress import duration
from data_prep.sources import Piece, Source, plan_shards
from data_prep.sources.streams import COMPRESSIONS, expansion
from data_prep.tokenizers import Tokenizer

_SAMPLE_SHARD_BYTES = 1 << 20
_SAMPLE_SHARDS = 24
_SAMPLE_S = 20.0
_INDEX_BYTES = 20  # of a document in the .idx


def estimate(sources: Sequence[Source], tokenizer: Tokenizer, options: EncodeOptions, workers: int) -> str:
    """A line each for documents, tokens, time and disk, from up to 24 samples of 1 MiB, spread over the inputs.

    They are encoded in this process, for at most 20 s, and in a temporary folder. Compressed files are sampled
    at their start only. Time is that of one process divided by `workers`."""
    expansions = {source: _expansion(source) for source in sources}
    shards = [
        shard
        for shard in plan_shards(sources, options.read, _SAMPLE_SHARD_BYTES)
        if not (shard.pieces[0].source.path.endswith(COMPRESSIONS) and shard.pieces[0].start)
    ]
    stride = max(1, len(shards) // _SAMPLE_SHARDS)
    sampled_bytes, done = 0.0, Progress()
    with tempfile.TemporaryDirectory(prefix="data_prep_") as folder:
        encoder = ShardEncoder(tokenizer, replace(options, folder=Path(folder)))
        start = time.monotonic()
        for number, shard in enumerate(shards[::stride][:_SAMPLE_SHARDS]):
            last = Progress()

            def report(progress: Progress) -> None:
                nonlocal last
                last = progress

            encoder.encode(number, shard, None, report)
            done += last
            sampled_bytes += sum(_plain_bytes(piece, expansions[piece.source]) for piece in shard.pieces)
            if time.monotonic() - start > _SAMPLE_S:
                break
        seconds = time.monotonic() - start
    if not done.tokens:
        raise UserError(f"{sources[0].path}: no document with text in the sample; see --text_key")
    scale = max(1.0, sum(source.num_bytes * expansions[source] for source in sources) / sampled_bytes)
    documents, tokens, text_bytes = (round(scale * n) for n in (done.documents, done.tokens, done.text_bytes))
    disk = tokens * token_dtype(tokenizer.vocab_size).itemsize + documents * _INDEX_BYTES
    return "\n".join(
        [
            f"from a sample of {done.text_bytes:,} bytes of text, {done.documents:,} documents, {seconds:.1f} s:",
            f"about {documents:,} documents, {text_bytes:,} bytes of text, {tokens:,} tokens "
            f"({text_bytes / tokens:.2f} bytes per token)",
            f"about {duration(scale * seconds / workers)} (h:mm:ss) with {workers} workers, if each has a core: "
            f"{text_bytes / (scale * seconds) / 1e6:.1f} MB/s each",
            f"about {disk / 1e9:.2f} GB on the disk, twice that while the parts are joined",
        ]
    )


def _expansion(source: Source) -> float:
    """Bytes of content for each byte on the disk, where shards are cut by content."""
    return expansion(source.path, _SAMPLE_SHARD_BYTES) if source.path.endswith(COMPRESSIONS) else 1.0


def _plain_bytes(piece: Piece, expansion: float) -> float:
    """Of a piece's content; of formats that are not cut by bytes, its share of the bytes on the disk."""
    if piece.source.format not in ("jsonl", "text"):
        return piece.num_bytes
    whole = piece.source.num_bytes * expansion
    return (whole if piece.end is None else min(piece.end, whole)) - min(piece.start, whole)
