"""The plan of a run: its sources cut into pieces of similar size, that any process can read alone.

The plan follows from the sources and the options; it is the same at any number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from data_prep.sources import hub
from data_prep.sources.columns import part_sizes
from data_prep.sources.documents import BadLine, ReadOptions
from data_prep.sources.inputs import Source
from data_prep.sources.streams import COMPRESSIONS, expansion

# Small enough that the last shards keep all workers busy, large enough that the Pile has some ten thousand.
_LEAST_SHARD_BYTES = 4 << 20
_MOST_SHARD_BYTES = 64 << 20
_SHARDS_WANTED = 512

_EXPANSION_SAMPLE_BYTES = 1 << 19
_EXPANSION_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Piece:
    """The records of `source` that begin in [start, end); end None: to the last.

    Positions are bytes of a .jsonl (decompressed) or .txt file, row groups of a .parquet, record batches of
    an .arrow file, and files of a streamed dataset. num_bytes: its share of the source's bytes on the disk;
    over all pieces they sum up."""

    source: Source
    start: int
    end: int | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one worker reads at a time: a piece of a large source, or several small sources whole."""

    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Its share of the sources' bytes on the disk: what a progress bar counts."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        first = self.pieces[0]
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return f"{first.source.path} from {first.start:,}{more}"


def plan_shards(
    sources: Sequence[Source], options: ReadOptions | None = None, shard_bytes: int | None = None
) -> list[Shard]:
    """Cut `sources` into shards of about `shard_bytes` of text (None: 4 to 64 MiB, by the size of it all).

    A compressed file is not read for this. Its number of pieces comes from how well its first half megabyte
    was compressed, with a margin: the last pieces may be empty, and the very last takes whatever remains.

    Raises BadLine for a .parquet or .arrow file whose structure is damaged, unless options.on_error is
    "skip"; then reading it counts the damage.
    """
    options = options or ReadOptions()
    if shard_bytes is None:
        total = sum(source.num_bytes for source in sources)
        shard_bytes = min(max(total // _SHARDS_WANTED, _LEAST_SHARD_BYTES), _MOST_SHARD_BYTES)
    shards: list[Shard] = []
    small: list[Piece] = []
    for source in sources:
        pieces = _pieces(source, options, shard_bytes)
        whole = len(pieces) == 1
        if small and (not whole or sum(p.num_bytes for p in small) + source.num_bytes > shard_bytes):
            shards.append(Shard(tuple(small)))
            small = []
        if whole:
            small += pieces
        else:
            shards += [Shard((piece,)) for piece in pieces]
    return shards + ([Shard(tuple(small))] if small else [])


def _pieces(source: Source, options: ReadOptions, shard_bytes: int) -> list[Piece]:
    if source.format == "text" and options.document_marker is None:
        return [Piece(source, 0, None, source.num_bytes)]
    if source.format in ("parquet", "arrow"):
        return _share(source, _column_starts(source, options, shard_bytes))
    if source.format == "hf-stream":
        return _share(source, range(hub.num_parts(source.path)))
    return _share(source, _byte_starts(source, shard_bytes))


def _byte_starts(source: Source, shard_bytes: int) -> range:
    plain_bytes = float(source.num_bytes)
    if source.path.endswith(COMPRESSIONS):
        plain_bytes *= expansion(source.path, _EXPANSION_SAMPLE_BYTES) * _EXPANSION_MARGIN
    return range(0, max(1, ceil(plain_bytes)), shard_bytes)


def _column_starts(source: Source, options: ReadOptions, shard_bytes: int) -> list[int]:
    """Row groups or record batches are put together until they hold `shard_bytes`."""
    try:
        sizes = part_sizes(source.path)
    except BadLine:
        if options.on_error == "fail":
            raise
        return [0]
    starts, size = [0], 0
    for index, part_bytes in enumerate(sizes):
        if size and size + part_bytes > shard_bytes:
            starts.append(index)
            size = 0
        size += part_bytes
    return starts


def _share(source: Source, starts: Sequence[int]) -> list[Piece]:
    """Pieces that begin at `starts`, the source's bytes dealt out evenly."""
    count = len(starts)
    shares = [source.num_bytes * index // count for index in range(count + 1)]
    return [
        Piece(source, start, end, shares[index + 1] - shares[index])
        for index, (start, end) in enumerate(zip(starts, [*starts[1:], None], strict=True))
    ]
