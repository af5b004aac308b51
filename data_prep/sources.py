"""Files to documents, in a fixed order.

A source is a .jsonl, .jsonl.gz or .jsonl.zst file with one JSON object per line, as in the Pile:
{"text": ..., "meta": {"pile_set_name": ...}}. Reading and parsing are apart, so that the parent
process only moves lines while the workers parse them:

    LineReader(path)            (line number, raw bytes), with the file's size and hash at the end
    parse_line(raw, ...)        a Document, or a Skip with its reason; BadLine for what cannot be read
    iter_documents(paths, ...)  both together, for a single process
"""

import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import zstandard

from data_prep.errors import UserError

DEFAULT_TEXT_KEY = "text"
DEFAULT_DOMAIN_KEY = "meta.pile_set_name"
UNKNOWN_DOMAIN = "unknown"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")

OnError = Literal["fail", "skip"]

_READ_BYTES = 1 << 18
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its text, never blank, and the name of the domain it belongs to."""

    text: str
    domain: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A readable line without a document; `reason` is the key it is counted under."""

    reason: str


class BadLine(UserError):
    """A line or file that cannot be read; `reason` is the key it is counted under when skipped."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:  # travels from a worker to the parent
        return type(self), (str(self), self.reason)


def check_sources(paths: Iterable[Path]) -> None:
    """Refuse missing files and unknown suffixes before any work starts.

    Raises UserError naming the file."""
    for path in paths:
        if not path.is_file():
            raise UserError(
                f"{path}: {'is a directory, name the files in it' if path.is_dir() else 'no such file'}"
            )
        if not path.name.endswith(SUFFIXES):
            raise UserError(f"{path}: unknown suffix, expected one of {', '.join(SUFFIXES)}")


class LineReader:
    """Iterates over (line number from 1, raw line without its end) of one source file.

    The file is hashed as it is read, once: after the last line `num_bytes` and `sha256` describe the
    whole file as it lies on the disk. Raises BadLine when the compressed data is damaged or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = hashlib.sha256()
        self.num_bytes = 0  # read so far; the progress bar's measure

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        with self.path.open("rb", buffering=0) as file:
            try:
                for number, line in enumerate(self._lines(_HashedFile(file, self)), start=1):
                    yield number, line.removeprefix(_UTF8_BOM) if number == 1 else line
            finally:
                if not file.closed:
                    self._drain(file)

    def _drain(self, file: io.FileIO) -> None:
        """Hash what damaged compressed data left unread."""
        while block := file.read(_READ_BYTES):
            self.count(block)

    def count(self, block: bytes | memoryview) -> None:
        self._hash.update(block)
        self.num_bytes += len(block)

    def _lines(self, raw: "_HashedFile") -> Iterator[bytes]:
        buffered = io.BufferedReader(raw, _READ_BYTES)
        number = 0
        try:
            stream: Iterable[bytes] = buffered
            if self.path.name.endswith(".gz"):
                stream = gzip.GzipFile(fileobj=buffered)
            elif self.path.name.endswith(".zst"):
                stream = io.BufferedReader(_ZstdFile(buffered), _READ_BYTES)
            for line in stream:
                number += 1
                yield line.rstrip(b"\r\n")
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            message = f"{self.path}: damaged or truncated after line {number} ({error})"
            raise BadLine(message, "truncated_file") from error


class _HashedFile(io.RawIOBase):
    """A raw file that reports every block it reads to its LineReader."""

    def __init__(self, file: io.FileIO, reader: LineReader) -> None:
        self._file = file
        self._reader = reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._reader.count(memoryview(buffer)[:count])
        return count


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


def parse_line(raw: bytes, path: str, number: int, text_key: str, domain_key: str) -> Document | Skip:
    """The document on line `number` of `path`, or why there is none.

    Keys may reach into nested objects with dots; a nested object may also be a JSON string, as in some
    copies of the Pile. Raises BadLine for broken JSON, invalid UTF-8, a line that is no object and a
    text that is no string.
    """
    if not raw.strip():
        return Skip("blank_line")
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _bad_json(raw, path, number, error) from error
    if not isinstance(record, dict):
        raise BadLine(f"{path}: line {number} is no JSON object", "not_an_object")
    found, text = _look_up(record, text_key)
    if not found:
        return Skip("missing_text")
    if text is None:
        return Skip("null_text")
    if not isinstance(text, str):
        raise BadLine(f"{path}: line {number}: {text_key!r} is no string", "text_not_a_string")
    if not text:
        return Skip("empty_text")
    if text.isspace():
        return Skip("whitespace_text")
    found, domain = _look_up(record, domain_key)
    return Document(text, str(domain) if found and domain is not None else UNKNOWN_DOMAIN)


def _bad_json(raw: bytes, path: str, number: int, error: orjson.JSONDecodeError) -> BadLine:
    try:
        raw.decode()
    except UnicodeDecodeError as utf8:
        message = f"{path}: line {number}: invalid UTF-8 at byte {utf8.start}"
        return BadLine(f"{message}; mend it or pass --on_error skip", "invalid_utf8")
    message = f"{path}: line {number}: broken JSON ({error})"
    return BadLine(f"{message}; mend it or pass --on_error skip", "broken_json")


def _look_up(record: dict[str, Any], key: str) -> tuple[bool, Any]:
    """(whether it is there, the value) of a dotted key; the undotted spelling wins."""
    if key in record:
        return True, record[key]
    value: Any = record
    for part in key.split("."):
        if isinstance(value, str):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError:
                return False, None
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def iter_documents(
    paths: Iterable[Path],
    text_key: str = DEFAULT_TEXT_KEY,
    domain_key: str = DEFAULT_DOMAIN_KEY,
    on_error: OnError = "fail",
    skipped: Counter[str] | None = None,
) -> Iterator[Document]:
    """The documents of `paths` in the order of the files and their lines.

    `skipped`, when given, counts by reason what gave no document. `on_error` "skip" counts unreadable
    lines and goes on (after damaged compressed data: with the next file); "fail" raises BadLine.
    """
    skipped = Counter() if skipped is None else skipped
    for path in paths:
        try:
            for number, raw in LineReader(path):
                try:
                    parsed = parse_line(raw, str(path), number, text_key, domain_key)
                except BadLine as error:
                    if on_error == "fail":
                        raise
                    parsed = Skip(error.reason)
                if isinstance(parsed, Skip):
                    skipped[parsed.reason] += 1
                else:
                    yield parsed
        except BadLine as error:
            if on_error == "fail":
                raise
            skipped[error.reason] += 1
