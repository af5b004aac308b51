"""A document, what may stand in its place, and how a record becomes one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from data_prep.errors import UserError

DEFAULT_TEXT_KEY = "text"
DEFAULT_DOMAIN_KEY = "meta.pile_set_name"
UNKNOWN_DOMAIN = "unknown"

OnError = Literal["fail", "skip"]

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How documents are read; the same for all of a run.

    text_key, domain_key: where a record has its text and its domain's name. Keys may reach into nested
    objects with dots; a nested object may also be a JSON string, as in some copies of the Pile.
    on_error: "fail" raises BadLine, "skip" gives a Skip, for what cannot be read.
    document_marker: the line that stands between two documents of a .txt file ("" for blank lines);
    None: every .txt file is one document.
    filter: "module:function" or "path.py:function", see data_prep.filters; None keeps all documents.
    """

    text_key: str = DEFAULT_TEXT_KEY
    domain_key: str = DEFAULT_DOMAIN_KEY
    on_error: OnError = "fail"
    document_marker: str | None = None
    filter: str | None = None

    def __post_init__(self) -> None:
        """Raises UserError for a marker of several lines."""
        if self.document_marker is not None and "\n" in self.document_marker:
            raise UserError(f"--document_marker {self.document_marker!r} is more than one line")


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its text, never blank, and the name of the domain it belongs to."""

    text: str
    domain: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A readable record without a document; `reason` is the key it is counted under."""

    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is: a line (from 1), the line that begins at a byte, a row (from 0), or a whole file."""

    path: str
    unit: Literal["line", "byte", "row", "file"] = "file"
    number: int = 0

    def __str__(self) -> str:
        """FILE: line N. Lines before a byte are counted here, since only messages need their number."""
        if self.unit == "file":
            return self.path
        if self.unit == "byte":
            return f"{self.path}: line {_lines_before(Path(self.path), self.number) + 1}"
        return f"{self.path}: {self.unit} {self.number}"


def _lines_before(path: Path, position: int) -> int:
    lines = 0
    with path.open("rb") as file:
        while block := file.read(min(_READ_BYTES, position)):
            lines += block.count(b"\n")
            position -= len(block)
    return lines


class BadLine(UserError):
    """A record or file that cannot be read; `reason` is the key it is counted under when skipped."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:  # travels from a worker to the parent
        return type(self), (str(self), self.reason)


def load_record(raw: bytes, place: Place) -> dict[str, Any] | Skip:
    """The JSON object on a line. Raises BadLine for broken JSON, invalid UTF-8 and a line that is no object."""
    if not raw or raw.isspace():
        return Skip("blank_line")
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            raw.decode()
        except UnicodeDecodeError as utf8:
            raise invalid_utf8(place, utf8) from error
        raise BadLine(f"{place}: broken JSON ({error}); mend it or pass --on_error skip", "broken_json") from error
    if not isinstance(record, dict):
        raise BadLine(f"{place} is no JSON object", "not_an_object")
    return record


def invalid_utf8(place: Place, error: UnicodeDecodeError) -> BadLine:
    """The error for bytes that are no text."""
    message = f"{place}: invalid UTF-8 at byte {error.start}; mend it or pass --on_error skip"
    return BadLine(message, "invalid_utf8")


def to_document(record: dict[str, Any], place: Place, options: ReadOptions) -> Document | Skip:
    """The document of a record, or why there is none. Raises BadLine for a text that is no string."""
    found, text = _look_up(record, options.text_key)
    if not found:
        return Skip("missing_text")
    if text is None:
        return Skip("null_text")
    if not isinstance(text, str):
        raise BadLine(f"{place}: {options.text_key!r} is no string", "text_not_a_string")
    if not text:
        return Skip("empty_text")
    if text.isspace():
        return Skip("whitespace_text")
    found, domain = _look_up(record, options.domain_key)
    return Document(text, str(domain) if found and domain not in (None, "") else UNKNOWN_DOMAIN)


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
