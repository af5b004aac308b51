"""PREFIX.parts: what finished shards leave behind until a dataset is joined of them.

    plan.json            what is being made, of what; parts of anything else are refused
    tokenizer            a copy, so that a dataset can be joined on another machine
    000017.part          the token ids, lengths and counts of shard 17, for each output
    000017.json          what lies where in it; renamed into place last, so that its presence means a whole part
    source_00000.json    size and hash of an input

Ids and lengths are stored as in the dataset, so that joining copies ranges of files.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.files import locked, naming, partial_path, written_aside
from data_prep.indexed import check_documents, token_dtype
from data_prep.manifest import DomainCounts, SourceFile, TokenizerInfo
from data_prep.token_counts import count_tokens

PLAN_VERSION = 1
"""Of the plan and the parts; parts of another version are another run's."""

_FLUSH_BYTES = 24 << 20  # ids (int32) of a part that are held before they are written
_NOT_BETWEEN_THESE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)  # files: sendfile can


class Output(NamedTuple):
    """Which of a run's datasets: of a domain and a split, each None where the run does not tell them apart."""

    domain: str | None
    split: str | None


WHOLE = Output(None, None)
"""The one dataset of a run that tells nothing apart."""


class Run(NamedTuple):
    """A range of bytes in a part's data file."""

    offset: int
    num_bytes: int


@dataclass
class OutputPart:
    """One output's share of a part: its counts, and where its arrays lie, each in one or several runs.

    ids: in the dataset's dtype; lengths: int32 [documents]; token_counts: int32 [2, distinct ids], the ids and how
    often each occurs."""

    documents: int = 0
    tokens: int = 0
    domains: dict[str, DomainCounts] = field(default_factory=dict)
    ids: list[Run] = field(default_factory=list)
    lengths: list[Run] = field(default_factory=list)
    token_counts: list[Run] = field(default_factory=list)


@dataclass
class Part:
    """A finished shard. `plan` is the digest of the Plan it belongs to; `skipped` counts by reason.

    content_sha256: of what was read, decompressed. streamed: names of the inputs in it that are no files."""

    plan: str
    number: int
    num_bytes: int
    crc32: int
    skipped: dict[str, int]
    content_sha256: str
    streamed: list[str]
    outputs: dict[Output, OutputPart]

    def to_json(self) -> bytes:
        outputs = [{"output": output, **vars(part)} for output, part in self.outputs.items()]
        return orjson.dumps(vars(self) | {"outputs": outputs}, default=list)  # list: of named tuples


def _part_from_json(content: bytes) -> Part:
    fields: dict[str, Any] = orjson.loads(content)
    outputs = {}
    for each in fields.pop("outputs"):
        output = Output(*each.pop("output"))
        domains = {name: DomainCounts(**counts) for name, counts in each.pop("domains").items()}
        runs = {name: [Run(*run) for run in each.pop(name)] for name in ("ids", "lengths", "token_counts")}
        outputs[output] = OutputPart(**(each | runs), domains=domains)
    return Part(**fields, outputs=outputs)


@dataclass(frozen=True)
class PlannedSource:
    """An input as it was when the run was planned."""

    name: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True)
class Plan:
    """What a run makes and of what: two runs of one plan make the same parts.

    shards: a digest of how the sources are cut. options: everything else that changes the bytes of the dataset."""

    sources: tuple[PlannedSource, ...]
    tokenizer: TokenizerInfo
    options: dict[str, Any]
    num_shards: int
    shards: str
    version: int = PLAN_VERSION

    @property
    def digest(self) -> str:
        """Names the plan in its parts. Left out: times of files, which differ where inputs were copied to several
        machines, and on_error, since what "fail" let pass "skip" lets pass too."""
        fields = asdict(self)
        fields["sources"] = [(source.name, source.num_bytes) for source in self.sources]
        fields["options"] = {key: value for key, value in self.options.items() if key != "on_error"}
        return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def difference(self, other: "Plan") -> str | None:
        """Why the parts of this plan are not those of `other`: the first thing that differs, or None."""
        if self.version != other.version:
            return f"the format of the parts: version {self.version}, now {other.version}"
        if self.tokenizer.fingerprint != other.tokenizer.fingerprint:
            return f"the tokenizer: {self.tokenizer.fingerprint[:16]}, now {other.tokenizer.fingerprint[:16]}"
        if self.tokenizer != other.tokenizer:
            return f"the tokenizer: {self.tokenizer}, now {other.tokenizer}"
        for key in sorted(self.options.keys() | other.options.keys()):
            mine, theirs = self.options.get(key), other.options.get(key)
            if mine != theirs and (key, theirs) != ("on_error", "skip"):
                return f"{key}: {mine}, now {theirs}"
        if len(self.sources) != len(other.sources):
            return f"the inputs: {len(self.sources)} files, now {len(other.sources)}"
        for mine, theirs in zip(self.sources, other.sources, strict=True):
            if mine.name != theirs.name:
                return f"the inputs: {mine.name}, now {theirs.name}"
            if mine.num_bytes != theirs.num_bytes:
                return f"{mine.name}: {mine.num_bytes} bytes, now {theirs.num_bytes}"
        if (self.num_shards, self.shards) != (other.num_shards, other.shards):
            return "how the inputs are cut into shards"
        for mine, theirs in zip(self.sources, other.sources, strict=True):
            if mine.modified_ns != theirs.modified_ns:
                return f"{mine.name}: was modified since"
        return None

    def save(self, folder: Path) -> None:
        with written_aside(plan_path(folder)) as file:
            file.write(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def parts_folder(prefix: Path | str) -> Path:
    """Where a run keeps its finished shards."""
    return Path(f"{prefix}.parts")


def plan_path(folder: Path) -> Path:
    """The description of what the parts in `folder` are parts of."""
    return folder / "plan.json"


def tokenizer_copy_path(folder: Path) -> Path:
    """The tokenizer's copy beside the parts."""
    return folder / "tokenizer"


def data_path(folder: Path, number: int) -> Path:
    """The arrays of a part."""
    return folder / f"{number:06}.part"


def part_path(folder: Path, number: int) -> Path:
    """The description of a part."""
    return folder / f"{number:06}.json"


def source_path(folder: Path, number: int) -> Path:
    """Size and hash of input `number`."""
    return folder / f"source_{number:05}.json"


def signatures_path(folder: Path, plan_digest: str, number: int) -> Path:
    """The signatures of shard `number`'s documents (data_prep.duplicates)."""
    return folder / f"{number:06}.{plan_digest[:16]}.signatures"


def load_plan(folder: Path) -> Plan:
    """Read the plan of a folder of parts. Raises UserError naming the file when it is missing or broken."""
    path = plan_path(folder)
    if not path.is_file():
        raise UserError(f"{path}: no such file; make parts with python -m data_prep.preprocess")
    try:
        fields = orjson.loads(path.read_bytes())
        fields["sources"] = tuple(PlannedSource(**source) for source in fields["sources"])
        fields["tokenizer"] = TokenizerInfo(**fields["tokenizer"])
        return Plan(**fields)
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: is broken, or of another version ({error}); remove {folder} and prepare the dataset again"
        ) from error


def finished_parts(folder: Path, plan_digest: str) -> Iterator[Part]:
    """The parts in `folder` that are whole and of this plan."""
    for number in sorted(part_numbers(folder)):
        part = load_part(folder, number)
        if part and part.plan == plan_digest:
            yield part


def load_part(folder: Path, number: int) -> Part | None:
    """The description of a part; None if the part is not there or not whole."""
    try:
        part = _part_from_json(part_path(folder, number).read_bytes())
        size = data_path(folder, number).stat().st_size
    except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return part if (part.number, part.num_bytes) == (number, size) else None


def part_numbers(folder: Path) -> set[int]:
    """Numbers of all parts in `folder`, whatever their plan."""
    return {int(path.stem) for path in folder.glob("[0-9]*.json")}


def save_source(folder: Path, number: int, source: SourceFile) -> None:
    with written_aside(source_path(folder, number)) as file:
        file.write(orjson.dumps(asdict(source)))


def load_source(folder: Path, number: int) -> SourceFile | None:
    """Size and hash of input `number`; None if no worker has read it whole."""
    try:
        return SourceFile(**orjson.loads(source_path(folder, number).read_bytes()))
    except (FileNotFoundError, orjson.JSONDecodeError, TypeError):
        return None


def claim_parts(folder: Path, plan: Plan, tokenizer: bytes, overwrite: bool) -> None:
    """Make `folder` a place for the parts of `plan`; those that are there already stay. tokenizer: its content.

    Raises UserError naming what differs if it holds another plan's, unless `overwrite`: then they go."""
    with locked(folder / "claim.lock"):  # shares that begin at once
        _claim(folder, plan, tokenizer, overwrite)


def _claim(folder: Path, plan: Plan, tokenizer: bytes, overwrite: bool) -> None:
    if plan_path(folder).exists():
        try:
            difference = load_plan(folder).difference(plan)
        except UserError:
            difference = "its plan.json, which is broken or of another version"
        if difference and not overwrite:
            raise UserError(
                f"{folder}: holds parts of another run, which differs in {difference}; go on with that run's "
                "inputs and options, pass --overwrite to begin anew, or choose another --output_prefix"
            )
        if difference:
            plan_path(folder).unlink()
            for number in part_numbers(folder):
                part_path(folder, number).unlink(missing_ok=True)
            for path in [*folder.glob("source_*.json"), *folder.glob("*.signatures")]:
                path.unlink(missing_ok=True)
    if not tokenizer_copy_path(folder).exists() or overwrite:
        with written_aside(tokenizer_copy_path(folder)) as file:
            file.write(tokenizer)
    plan.save(folder)


@contextmanager
def locked_parts(folder: Path, shard_index: int, num_shards: int) -> Iterator[None]:
    """Refuse a second run of the same share of the work, and of all of it beside any share: both would write the
    same files. A run that fails with nothing finished leaves no folder.

    Raises UserError naming the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{shard_index}_of_{num_shards}.lock"
    with (folder / "run.lock").open("ab") as run, own.open("ab") as share:
        _lock(run, folder, fcntl.LOCK_EX if num_shards == 1 else fcntl.LOCK_SH)
        _lock(share, folder, fcntl.LOCK_EX)
        try:
            yield
        except BaseException:
            if not anything_finished(folder):
                with suppress(UserError):  # another share is at work in it
                    _lock(run, folder, fcntl.LOCK_EX)
                    remove_parts(folder)
            raise


def _lock(file: IO[bytes], folder: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another run is working on it; wait for it or end it") from None


def anything_finished(folder: Path) -> bool:
    """Whether `folder` holds what a rerun need not do again."""
    return bool(part_numbers(folder)) or any(folder.glob("*.signatures"))


def remove_partial(folder: Path, plan_digest: str, numbers: Iterable[int], sources: Iterable[int]) -> None:
    """Remove what ended workers left of these parts and of the hashes of these inputs."""
    paths = [source_path(folder, number) for number in sources]
    for number in numbers:
        paths += [
            data_path(folder, number),
            part_path(folder, number),
            signatures_path(folder, plan_digest, number),
        ]
    for path in paths:
        partial_path(path).unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove a folder of parts; renamed first, so that a half removed one is never taken for an unfinished run."""
    doomed = folder.with_name(folder.name + ".removed")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed)


class PartWriter:
    """Writes the part of one shard: `add` documents, then `finish`. A context manager.

    Holds up to about 24 MB of ids, and four bytes a document until the end.
    """

    def __init__(self, folder: Path, number: int, plan: str, vocab_size: int, eod_id: int) -> None:
        self._folder = folder
        self._number = number
        self._plan = plan
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._dtype = token_dtype(vocab_size)
        self._outputs: dict[Output, OutputPart] = {}
        self._ids: dict[Output, list[NDArray[np.int32]]] = {}
        self._lengths: dict[Output, list[NDArray[np.int32]]] = {}
        self._held_bytes = 0
        self._offset = self._crc = 0
        self._path = data_path(folder, number)
        self._partial = partial_path(self._path)
        with naming(self._partial):
            self._file = self._partial.open("wb")

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._close()
        finally:
            self._partial.unlink(missing_ok=True)  # there only after a failure

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def add(
        self,
        output: Output,
        ids: NDArray[np.int32],
        lengths: NDArray[np.int32],
        domains: dict[str, DomainCounts],
    ) -> None:
        """Append documents, given and checked as by `indexed.check_documents`; domains: their counts."""
        part = self._outputs.setdefault(output, OutputPart())
        check_documents(ids, lengths, self._vocab_size, self._eod_id, first=part.documents)
        part.documents += len(lengths)
        part.tokens += len(ids)
        add_domains(part.domains, domains)
        self._ids.setdefault(output, []).append(ids)
        self._lengths.setdefault(output, []).append(lengths)
        self._held_bytes += ids.nbytes
        if self._held_bytes >= _FLUSH_BYTES:
            self._flush()

    def finish(self, skipped: Counter[str], content_sha256: str, streamed: list[str]) -> Part:
        """Give the part its name; the arguments as in Part."""
        self._flush()
        for output, blocks in self._lengths.items():
            self._outputs[output].lengths.append(self._write(np.concatenate(blocks).astype("<i4")))
        outputs = dict(sorted(self._outputs.items(), key=lambda item: sort_key(item[0])))
        part = Part(
            self._plan, self._number, self._offset, self._crc, dict(skipped), content_sha256, streamed, outputs
        )
        self._close()
        self._partial.replace(self._path)
        # Not durable: after a power failure the checksum tells.
        with written_aside(part_path(self._folder, self._number), durable=False) as file:
            file.write(part.to_json())
        return part

    def _flush(self) -> None:
        for output, blocks in self._ids.items():
            part = self._outputs[output]
            ids = np.concatenate(blocks)
            blocks.clear()
            part.token_counts.append(self._write(_count(ids, self._vocab_size)))
            part.ids.append(self._write(ids.astype(self._dtype, copy=False)))
        self._ids.clear()
        self._held_bytes = 0

    def _close(self) -> None:
        with naming(self._partial):  # what is buffered is written now
            self._file.close()

    def _write(self, array: NDArray[Any]) -> Run:
        data = np.ascontiguousarray(array).view(np.uint8).data
        with naming(self._partial):
            self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._offset += len(data)
        return Run(self._offset - len(data), len(data))


def _count(ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """[2 * distinct ids] the ids, then how often each occurs."""
    counts = count_tokens(ids, vocab_size)
    present = np.flatnonzero(counts)
    return np.stack([present, counts[present]]).astype("<i4").reshape(-1)


def add_domains(totals: dict[str, DomainCounts], more: dict[str, DomainCounts]) -> None:
    """Add counts by domain to `totals`."""
    for name, counts in more.items():
        old = totals.get(name, DomainCounts(0, 0, 0))
        totals[name] = DomainCounts(
            old.documents + counts.documents, old.tokens + counts.tokens, old.bytes + counts.bytes
        )


def sort_key(output: Output) -> tuple[str, str]:
    """Orders outputs; None first."""
    return output.domain or "", output.split or ""


def read_run(path: Path, run: Run, dtype: Any) -> NDArray[Any]:
    """An array of a part's data file."""
    dtype = np.dtype(dtype)
    with path.open("rb") as file:
        return np.fromfile(file, dtype, run.num_bytes // dtype.itemsize, offset=run.offset)


def copy_run(source: int, target: int, run: Run) -> None:
    """Append a run to the file `target` inside the kernel; where the file system can, blocks are shared.

    source, target: file descriptors."""
    offset, end = run.offset, run.offset + run.num_bytes
    copy_range = True
    while offset < end:
        try:
            if copy_range:
                count = os.copy_file_range(source, target, end - offset, offset_src=offset)
            else:
                count = os.sendfile(target, source, offset, end - offset)
        except OSError as error:
            if not copy_range or error.errno not in _NOT_BETWEEN_THESE:
                raise
            count = 0
        if count == 0 and not copy_range:
            raise OSError(f"the part ends {end - offset} bytes early")
        copy_range = copy_range and count > 0
        offset += count
