"""Rows of .parquet files and of .arrow files: Arrow's file format, and its stream format as datasets writes it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.sources.documents import BadLine, Place, ReadOptions

if TYPE_CHECKING:
    import pyarrow

_BATCH_ROWS = 512
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

Parts = Iterator[tuple[int, "pyarrow.RecordBatch"]]
"""(index of the row group or record batch, rows of it), in order."""


def part_sizes(path: str) -> list[int]:
    """Bytes of each row group (.parquet) or record batch (.arrow), uncompressed.

    Raises BadLine when the file is damaged or cut off."""
    with damage_named(path):
        if path.endswith(".parquet"):
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as file:
                metadata = file.metadata
                return [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
        return [batch.nbytes for batch in _record_batches(path)]


def rows(path: str, start: int, end: int | None, options: ReadOptions) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of the parts [start, end), with the columns that `options` asks for.

    Raises BadLine when the file is damaged or cut off."""
    read = _parquet_batches if path.endswith(".parquet") else _arrow_batches
    number = 0
    with damage_named(path, lambda: number):
        for before, batch in read(path, start, end, options):
            number = before
            for number, record in enumerate(batch.to_pylist(), start=before):
                yield Place(path, "row", number), record


@contextmanager
def damage_named(path: str, row: Callable[[], int] | None = None) -> Iterator[None]:
    """Turn Arrow's errors into BadLine with the file's name."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        where = f" after row {row()}" if row else ""
        reason = " ".join(str(error).split())
        raise BadLine(f"{path}: damaged or truncated{where} ({reason})", "truncated_file") from error


def _columns(names: list[str], options: ReadOptions) -> list[str] | None:
    """The top-level columns that hold text and domain; all for a filter, which sees the whole record."""
    if options.filter is not None:
        return None
    wanted = {key if key in names else key.split(".")[0] for key in (options.text_key, options.domain_key)}
    return [name for name in names if name in wanted]


def _parquet_batches(
    path: str, start: int, end: int | None, options: ReadOptions
) -> Iterator[tuple[int, "pyarrow.RecordBatch"]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        metadata = file.metadata
        columns = _columns(file.schema_arrow.names, options)
        row = sum(metadata.row_group(index).num_rows for index in range(start))
        groups = range(start, metadata.num_row_groups if end is None else end)
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=columns, use_threads=False):
            yield row, batch
            row += batch.num_rows


def _arrow_batches(
    path: str, start: int, end: int | None, options: ReadOptions
) -> Iterator[tuple[int, "pyarrow.RecordBatch"]]:
    row = 0
    for index, batch in enumerate(_record_batches(path)):
        if end is not None and index >= end:
            return
        if index >= start:
            columns = _columns(batch.schema.names, options)
            chosen = batch if columns is None else batch.select(columns)
            for first in range(0, chosen.num_rows, _BATCH_ROWS):
                yield row + first, chosen.slice(first, _BATCH_ROWS)
        row += batch.num_rows


def _record_batches(path: str) -> Iterator["pyarrow.RecordBatch"]:
    """The batches, mapped and not copied."""
    import pyarrow

    with Path(path).open("rb") as file:
        is_file_format = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        file.seek(-min(len(_END_OF_STREAM), Path(path).stat().st_size), 2)
        if not is_file_format and file.read() != _END_OF_STREAM:  # cut between two batches, Arrow sees no fault
            raise pyarrow.ArrowInvalid("no end of stream")
    with pyarrow.memory_map(path) as mapped:
        if is_file_format:
            with pyarrow.ipc.open_file(mapped) as reader:
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
        else:
            with pyarrow.ipc.open_stream(mapped) as reader:
                yield from reader
