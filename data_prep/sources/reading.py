"""A shard's documents, each with its place."""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from data_prep import filters
from data_prep.sources import columns, hub
from data_prep.sources.documents import (
    BadLine,
    Document,
    Place,
    ReadOptions,
    Skip,
    invalid_utf8,
    load_record,
    to_document,
)
from data_prep.sources.inputs import Format, check_unchanged, expand_inputs
from data_prep.sources.shards import Piece, Shard, plan_shards
from data_prep.sources.streams import LineStream

Record = bytes | dict[str, Any] | BadLine
"""A line of JSON, a record that is parsed already, or why this one (alone) cannot be read."""

_UTF8_BOM = b"\xef\xbb\xbf"


class Tally:
    """What reading a shard adds up: a hash of its content, and how far it is."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.done_bytes = 0  # on the disk, of finished pieces
        self.piece_bytes = 0  # of the piece in hand, at most its num_bytes; compressed, an estimate

    def add(self, content: bytes) -> None:
        """Count a record's bytes."""
        self.hash.update(content)
        self.piece_bytes += len(content)


def read_shard(shard: Shard, options: ReadOptions, drop: NDArray[np.int64] | None = None) -> "ShardReader":
    """Iterates over (Place, Document | Skip) of `shard`, in order; see ShardReader."""
    return ShardReader(shard, options, drop)


class ShardReader:
    """One pass over the records of a shard.

    What cannot be read raises BadLine, naming file and line, or with options.on_error "skip" comes as a
    Skip; after damaged data the rest of that file is lost. Documents that options.filter refuses come as
    Skip("filtered"). Raises UserError for a file that changed since the plan was made.
    """

    def __init__(self, shard: Shard, options: ReadOptions, drop: NDArray[np.int64] | None = None) -> None:
        """`drop`: sorted positions, among the Documents that would come, of those that come as
        Skip("duplicate") instead (data_prep.duplicates)."""
        self._shard = shard
        self._options = options
        self._drop = np.empty(0, np.int64) if drop is None else drop
        self._tally = Tally()
        self._piece_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of the sources' bytes on the disk, those read so far: the progress bar's measure.

        shard.num_bytes at the end."""
        return self._tally.done_bytes + min(self._tally.piece_bytes, self._piece_bytes)

    @property
    def sha256(self) -> str:
        """Of the content read so far; at the end, of the shard's whole content, decompressed."""
        return self._tally.hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[Place, Document | Skip]]:
        drop, ordinal = iter(self._drop.tolist()), 0
        next_drop = next(drop, None)
        for place, parsed in self._filtered():
            if isinstance(parsed, Document):
                if ordinal == next_drop:
                    parsed, next_drop = Skip("duplicate"), next(drop, None)
                ordinal += 1
            yield place, parsed

    def _filtered(self) -> Iterator[tuple[Place, Document | Skip]]:
        for piece in self._shard.pieces:
            check_unchanged(piece.source)
            self._piece_bytes = piece.num_bytes
            try:
                for place, record in _READERS[piece.source.format](piece, self._options, self._tally):
                    yield place, self._parse(place, record)
            except BadLine as error:
                if self._options.on_error == "fail":
                    raise
                yield Place(piece.source.path), Skip(error.reason)
            self._tally.done_bytes += piece.num_bytes
            self._tally.piece_bytes = 0

    def _parse(self, place: Place, record: Record) -> Document | Skip:
        try:
            if isinstance(record, BadLine):
                raise record
            fields = load_record(record, place) if isinstance(record, bytes) else record
            if isinstance(fields, Skip):
                return fields
            parsed = to_document(fields, place, self._options)
            wanted = self._options.filter
            if wanted is None or isinstance(parsed, Skip):
                return parsed
            kept = filters.keeps(wanted, place, parsed.text, parsed.domain, fields)
            return parsed if kept else Skip("filtered")
        except BadLine as error:
            if self._options.on_error == "fail":
                raise
            return Skip(error.reason)


_kept: list[tuple[LineStream, int]] = []
"""At most one compressed file, open where the last piece of it ended: no line begins between the int, that
piece's end, and the stream's position."""


def _opened(piece: Piece) -> LineStream:
    """The piece's file, not beyond its first line.

    A process that reads pieces of one compressed file in their order decompresses it once."""
    while _kept:
        stream, end = _kept.pop()
        if stream.path == piece.source.path and end <= piece.start:
            return stream
        stream.close()
    return LineStream(piece.source.path)


def _lines(piece: Piece, options: ReadOptions, tally: Tally) -> Iterator[tuple[Place, bytes]]:
    """The lines that begin in the piece, without their ends."""
    stream = _opened(piece)
    finished = False
    try:
        try:
            stream.skip_to(piece.start)
        except BadLine:
            if options.on_error == "fail":
                raise
            return  # the piece that the damage lies in counts it
        before = stream.disk_bytes
        while piece.end is None or stream.position < piece.end:
            place = stream.place
            line = stream.readline()
            if not line:
                break
            tally.add(line)
            if stream.compressed:
                tally.piece_bytes = stream.disk_bytes - before
            if stream.position == len(line):
                line = line.removeprefix(_UTF8_BOM)
            yield place, line.rstrip(b"\r\n")
        finished = True
    finally:
        if finished and stream.compressed and piece.end is not None:
            _kept.append((stream, piece.end))
        else:
            stream.close()


def _texts(piece: Piece, options: ReadOptions, tally: Tally) -> Iterator[tuple[Place, Record]]:
    """The documents of a .txt file: all of it, or what begins in the piece right after a marker's line."""
    if options.document_marker is not None:
        for place, text in _marked(piece, options.document_marker.encode()):
            tally.add(text)
            yield place, _text_record(text, place, options)
    else:
        place = Place(piece.source.path)
        text = Path(piece.source.path).read_bytes()
        tally.add(text)
        yield place, _text_record(text, place, options)


def _text_record(text: bytes, place: Place, options: ReadOptions) -> dict[str, Any] | BadLine:
    try:
        return {options.text_key: text.removeprefix(_UTF8_BOM).decode()}
    except UnicodeDecodeError as error:
        return invalid_utf8(place, error)


def _marked(piece: Piece, marker: bytes) -> Iterator[tuple[Place, bytes]]:
    """What lies between lines equal to `marker`, without its last line end; nothing between two in a row."""
    with closing(LineStream(piece.source.path)) as stream:
        # Back to where a marker may begin that ends at the start: its line end may be two bytes long.
        stream.skip_to(piece.start - len(marker) - 2)
        inside, lines, place = piece.start == 0, list[bytes](), stream.place
        while inside or piece.end is None or stream.position < piece.end:
            line = stream.readline()
            if line and _without_end(line) != marker:
                if inside:
                    lines.append(line)
                continue
            if lines:
                yield place, _without_end(b"".join(lines))
            if not line:
                return
            inside = piece.start <= stream.position and (piece.end is None or stream.position < piece.end)
            lines, place = [], stream.place


def _without_end(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _rows(piece: Piece, options: ReadOptions, tally: Tally) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of a file of columns or of a streamed dataset, hashed as the JSON that they would be."""
    if piece.source.format == "hf-stream":
        records = hub.streamed_rows(piece.source.path, piece.start, piece.end)
    else:
        records = columns.rows(piece.source.path, piece.start, piece.end, options)
    for place, record in records:
        tally.add(orjson.dumps(record, default=repr, option=orjson.OPT_NON_STR_KEYS))
        yield place, record


_READERS: dict[Format, Callable[[Piece, ReadOptions, Tally], Iterator[tuple[Place, Record]]]] = {
    "jsonl": _lines,
    "text": _texts,
    "parquet": _rows,
    "arrow": _rows,
    "hf-stream": _rows,
}


def iter_documents(
    inputs: Sequence[str | Path], options: ReadOptions | None = None, skipped: Counter[str] | None = None
) -> Iterator[Document]:
    """The documents of `inputs`, in this process; `skipped`, when given, counts by reason what gave none.

    Raises as expand_inputs, plan_shards and ShardReader do."""
    options = options or ReadOptions()
    with tempfile.TemporaryDirectory(prefix="data_prep_") as folder:
        for shard in plan_shards(expand_inputs(inputs, Path(folder)), options):
            for _, parsed in read_shard(shard, options):
                if isinstance(parsed, Document):
                    yield parsed
                elif skipped is not None:
                    skipped[parsed.reason] += 1
