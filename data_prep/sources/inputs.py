"""What the user names as input, expanded to single sources."""

import glob
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from data_prep.errors import UserError
from data_prep.files import check_utf8, written_aside
from data_prep.sources import hub
from data_prep.sources.streams import COMPRESSIONS

Format = Literal["jsonl", "text", "parquet", "arrow", "hf-stream"]

_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".txt": "text", ".parquet": "parquet", ".arrow": "arrow"}
SUFFIXES = (".jsonl", *(f".jsonl{suffix}" for suffix in COMPRESSIONS), ".txt", ".parquet", ".arrow")
STANDARD_INPUT = "-"
INPUT_HELP = (
    f"files ({', '.join(SUFFIXES)}), directories, globs, - for JSON lines from standard input, "
    f"{hub.CACHED}NAME[:CONFIG][@SPLIT] or {hub.STREAMED}NAME[:CONFIG][@SPLIT] for Hugging Face datasets"
)

_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"\xfd7zXZ\x00": ".xz"}


@dataclass(frozen=True, slots=True)
class Source:
    """One file, as it was when it was named, or a streamed dataset.

    num_bytes: its size on the disk; modified_ns: the time of its last change, so that a run that goes on
    after an interruption can tell whether its finished shards still hold. Both 0 for a streamed dataset."""

    path: str
    format: Format
    num_bytes: int
    modified_ns: int


def expand_inputs(inputs: Sequence[str | Path], spool_folder: Path | None = None) -> list[Source]:
    """The sources behind `inputs`, in their order.

    A file stands for itself; a directory for all files of known suffixes in it and below (symbolic links are
    followed), sorted by path, hidden ones left out, which must be of one format; a glob (`**` for any depth) for
    its matches, sorted; hf: and hf-stream: for datasets (data_prep.sources.hub).
    "-" stands for JSON lines on standard input, plain or compressed. They are copied to `spool_folder`
    first, since shards are read out of order and more than once; the caller deletes it, and a later run
    cannot go on from there.

    Raises UserError for what is missing, of an unknown suffix, or the same file twice, by whatever names.
    """
    if list(map(str, inputs)).count(STANDARD_INPUT) > 1:
        raise UserError("--input - -: there is one standard input")
    sources: list[Source] = []
    for name in map(str, inputs):
        if name.startswith(hub.STREAMED):
            sources.append(Source(name, "hf-stream", 0, 0))
        elif name.startswith(hub.CACHED):
            sources.extend(_file_source(path) for path in hub.cached_files(name))
        elif name == STANDARD_INPUT:
            if spool_folder is None:
                raise UserError("--input -: standard input cannot be read here; name a file")
            sources.append(_file_source(_spool(sys.stdin.buffer, spool_folder)))
        else:
            sources.extend(_file_source(path) for path in _files(name))
    _refuse_twice(sources)
    return sources


def _refuse_twice(sources: Sequence[Source]) -> None:
    """Overlapping directories and globs would train on a file twice without a word."""
    seen: dict[str, str] = {}
    for source in sources:
        real = source.path if source.format == "hf-stream" else str(Path(source.path).resolve())
        if real in seen:
            same = "" if seen[real] == source.path else f", also as {seen[real]}"
            raise UserError(f"{source.path}: is among the inputs twice{same}; name it once")
        seen[real] = source.path


def _files(name: str) -> Iterator[Path]:
    path = Path(name)
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from _files_below(path)
    elif glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207
        if not matches:
            raise UserError(f"{name}: matches no file")
        files = [match for match in matches if not match.is_dir()]
        # With files among the matches, directories are what `**` passes through.
        for match in files or matches:
            yield from _files(str(match))
    else:
        raise UserError(f"{name}: no such file")


def _files_below(folder: Path) -> list[Path]:
    files = sorted(_walk(folder))
    if not files:
        raise UserError(f"{folder}: no file in this directory ends with one of {', '.join(SUFFIXES)}")
    first_of = {_format(path): path for path in reversed(files)}
    if len(first_of) > 1:  # a README.txt beside the data is no document
        names = " and ".join(str(path.relative_to(folder)) for path in first_of.values())
        raise UserError(f"{folder}: holds files of several formats, {names}; name a glob of those meant")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    seen: dict[Path, str] = {}
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = Path(parent).resolve()
        if real in seen:  # else a link to a folder above it goes on for ever
            raise UserError(f"{parent}: is the directory {seen[real]} once more; name a glob of the files meant")
        seen[real] = parent
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(SUFFIXES) and not name.startswith("."):
                yield Path(parent) / name


def _format(path: Path) -> Format:
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: unknown suffix, expected one of {', '.join(SUFFIXES)}")
    stem = path.name
    for compression in COMPRESSIONS:
        stem = stem.removesuffix(compression)
    return _FORMATS[Path(stem).suffix]


def _file_source(path: Path) -> Source:
    check_utf8(path)
    status = path.stat()
    return Source(str(path), _format(path), status.st_size, status.st_mtime_ns)


def _spool(stream: BinaryIO, folder: Path) -> Path:
    """Copy JSON lines to a file of the suffix that their first bytes ask for."""
    start = stream.read(max(map(len, _MAGIC)))
    suffix = next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")
    path = folder / f"standard_input.jsonl{suffix}"
    with written_aside(path) as file:
        file.write(start)
        shutil.copyfileobj(stream, file, 1 << 20)
    return path


def remove_spooled(folder: Path) -> None:
    """Remove what standard input was copied to, and the folder if nothing else is in it."""
    for path in folder.glob("standard_input.*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # it is not there, or not empty
        folder.rmdir()


def check_unchanged(source: Source) -> None:
    """Raise UserError if the file is no longer what it was when the run was planned."""
    if source.format == "hf-stream":
        return
    status = Path(source.path).stat()
    if (status.st_size, status.st_mtime_ns) != (source.num_bytes, source.modified_ns):
        raise UserError(f"{source.path}: changed since the run was planned; run again")
