"""Lines of plain and compressed files, from any position on."""

import gzip
import io
import lzma
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import zstandard

from data_prep.sources.documents import BadLine, Place

COMPRESSIONS = (".gz", ".zst", ".xz")

_READ_BYTES = 1 << 18
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, lzma.LZMAError)


class LineStream:
    """Goes forward through the lines of a file, decompressed by its suffix.

    position: bytes before the next line, decompressed; line: its number, from 1, where that is known (not
    after a seek in a plain file).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.position = 0
        self.line = 1
        self.compressed = path.endswith(COMPRESSIONS)
        self._raw = Path(path).open("rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._file = _decompressed(self._raw, path)

    def close(self) -> None:
        self._raw.close()

    @property
    def place(self) -> Place:
        """Of the next line."""
        return Place(self.path, "line", self.line) if self.compressed else Place(self.path, "byte", self.position)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file that were read so far, read ahead included; in a plain file its position."""
        return self._raw.tell()

    def skip_to(self, start: int) -> None:
        """Go on to the first line that begins at byte `start` or later. Raises BadLine as readline does."""
        if self.position >= start:
            return
        if not self.compressed:
            self._file.seek(start - 1)
            self.position = start - 1
        while self.position < start - 1:
            block = self._read(min(_READ_BYTES, start - 1 - self.position))
            if not block:
                return
            self.line += block.count(b"\n")
        self.readline()

    def readline(self) -> bytes:
        """The next line with its end; b"" after the last.

        Raises BadLine when the compressed data is damaged or cut off; a line cut short by that is lost."""
        try:
            line = self._file.readline()
        except _DAMAGE as error:
            raise self._damaged(error) from error
        self.position += len(line)
        self.line += line.endswith(b"\n")
        return line

    def _read(self, size: int) -> bytes:
        try:
            block = self._file.read1(size)  # read() would lose what comes before the damage
        except _DAMAGE as error:
            raise self._damaged(error) from error
        self.position += len(block)
        return block

    def _damaged(self, error: Exception) -> BadLine:
        message = f"{self.path}: damaged or truncated after line {self.line - 1} ({error})"
        return BadLine(message, "truncated_file")


def expansion(path: str, sample_bytes: int) -> float:
    """Decompressed bytes for each byte on the disk, in the first `sample_bytes` of a compressed file.

    1.0 for what cannot be decompressed at all."""
    with Path(path).open("rb") as file:
        sample = file.read(sample_bytes)
    stream, plain_bytes = _decompressed(io.BytesIO(sample), path), 0
    with suppress(*_DAMAGE):  # the sample's end
        while block := stream.read1(_READ_BYTES):
            plain_bytes += len(block)
    return plain_bytes / len(sample) if plain_bytes else 1.0


def _decompressed(raw: Any, path: str) -> io.BufferedIOBase:
    buffered = io.BufferedReader(raw, _READ_BYTES)
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=buffered)
    if path.endswith(".xz"):
        return lzma.LZMAFile(buffered)
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstdFile(buffered), _READ_BYTES)
    return buffered


class _ZstdFile(io.RawIOBase):
    """Decompresses concatenated zstd frames; EOFError when the last one is cut off.

    zstandard's own stream_reader ends a truncated frame without a word.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        # The Pile's shards were packed with long windows: up to the format's 2 GiB.
        self._context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None  # None between frames
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            if not self._compressed:
                self._compressed = self._file.read1(_READ_BYTES)
                if not self._compressed:
                    if self._frame is not None:
                        raise EOFError("the compressed data ends in the middle of a frame")
                    return 0
            if self._frame is None:
                self._frame = self._context.decompressobj()
            self._plain = memoryview(self._frame.decompress(self._compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count
