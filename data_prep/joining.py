"""Parts to datasets: ranges of the parts' files, one after the other in the order of the plan.

Memory does not grow with the documents: ids are copied inside the kernel, lengths pass in blocks.
"""

import hashlib
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from data_prep.blend import Blend, BlendEntry, Weighting, save_blend
from data_prep.encode import check_outputs
from data_prep.errors import UserError
from data_prep.files import (
    TOKENIZER_SUFFIXES,
    bin_path,
    blend_path,
    dataset_tokenizer_path,
    file_digest,
    idx_path,
    manifest_path,
    naming,
    partial_path,
    token_counts_path,
)
from data_prep.indexed import token_dtype, write_index
from data_prep.lengths import LengthStatistics, length_statistics
from data_prep.manifest import (
    FORMAT_VERSION,
    DataFile,
    DomainCounts,
    Manifest,
    SourceFile,
    Subset,
    content_fingerprint,
)
from data_prep.parts import (
    WHOLE,
    Output,
    Plan,
    Run,
    add_domains,
    copy_run,
    data_path,
    load_part,
    load_source,
    part_numbers,
    part_path,
    read_run,
    sort_key,
    tokenizer_copy_path,
)
from data_prep.splits import SPLITS, slugs

_BLOCK_BYTES = 1 << 22
_THREADS = 8  # hashing and copying let go of Python's lock


class _Runs:
    """Ranges of the parts' files, in order. 24 bytes each: the Pile by domain and split has millions."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders  # of each part
        self._table = array("q")  # number of the part, offset, bytes

    def extend(self, number: int, runs: Sequence[Run]) -> None:
        for run in runs:
            self._table.extend((number, *run))

    def __iter__(self) -> Iterator[tuple[Path, Run]]:
        for start in range(0, len(self._table), 3):
            number, offset, num_bytes = self._table[start : start + 3]
            yield data_path(self._folders[number], number), Run(offset, num_bytes)


class _Lengths:
    """The documents' lengths, block by block [documents of a block] int32; iterable again and again."""

    def __init__(self, runs: _Runs) -> None:
        self._runs = runs

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        for path, run in self._runs:
            yield read_run(path, run, "<i4")


@dataclass
class _Content:
    """What one output is made of."""

    ids: _Runs
    lengths: _Runs
    token_counts: _Runs
    documents: int = 0
    tokens: int = 0
    domains: dict[str, DomainCounts] = field(default_factory=dict)


def output_prefix(prefix: Path, output: Output, domain_slugs: dict[str, str]) -> Path:
    """The prefix of one of a run's datasets: PREFIX, PREFIX.train, PREFIX.pile-cc, PREFIX.pile-cc.train."""
    domain = None if output.domain is None else domain_slugs[output.domain]
    return Path(".".join(filter(None, [str(prefix), domain, output.split])))


def find_parts(plan: Plan, folders: Sequence[Path]) -> list[Path]:
    """The folder of each of the plan's parts. Raises UserError naming those that are missing or there twice."""
    found: dict[int, Path] = {}
    for folder in folders:
        for number in sorted(part_numbers(folder)):
            if number in found:
                raise UserError(f"part {number} is there twice, in {found[number]} and {folder}; name one of them")
            found[number] = folder
    missing = [number for number in range(plan.num_shards) if number not in found]
    if missing:
        raise UserError(
            f"{', '.join(map(str, folders))}: {len(missing)} of {plan.num_shards} parts are missing: "
            f"{_ranges(missing)}; finish the runs that make them, or name their folder with --parts"
        )
    return [found[number] for number in range(plan.num_shards)]


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] → "1-3, 7", the first ten of them."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:10]]
    return ", ".join(shown + (["..."] if len(ranges) > 10 else []))


class NoDocuments(UserError):
    """The parts are whole, and hold nothing."""


def join_parts(
    prefix: Path, plan: Plan, folders: Sequence[Path], weighting: Weighting | None = None
) -> dict[Path, Manifest]:
    """Make the datasets of `plan` from the parts in `folders`; returns their manifests by prefix.

    weighting: of the blend file that a run by domain writes. Everything is written aside and renamed at the end,
    manifests last; the parts stay. Raises UserError for parts that are missing, twice there or damaged, and for
    weights that cannot be given; NoDocuments if there is no token.
    """
    homes = find_parts(plan, folders)
    contents, skipped, streamed = _survey(plan, homes)
    sources = _sources(plan, folders, streamed)
    if not contents:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        names = ", ".join(source.name for source in plan.sources[:3]) + (", ..." if len(plan.sources) > 3 else "")
        raise NoDocuments(f"{names}: no document with text (skipped: {reasons or 'none'}); see --text_key")
    check_outputs(len(contents), plan.options["domain_key"], next(iter(contents)))
    domain_slugs = slugs(output.domain for output in contents if output.domain is not None)
    prefixes = {output: output_prefix(prefix, output, domain_slugs) for output in contents}
    blend = None
    if plan.options["by_domain"]:
        tokens = {output: content.tokens for output, content in contents.items()}
        blend = _blend(prefixes, tokens, weighting or Weighting())

    def join(output: Output) -> Manifest:
        files = _write_aside(prefixes[output], contents[output], plan, homes)
        return _describe(output, contents[output], plan, sources, skipped, files)

    prefix.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(_check_part, homes, range(plan.num_shards)))
            manifests = dict(zip(prefixes.values(), threads.map(join, contents), strict=True))
        for each in _possible_prefixes(prefix, plan, domain_slugs).difference(prefixes.values()):
            _remove_dataset(each)  # an overwritten run's, of documents that another dataset may hold now
        for each, manifest in manifests.items():
            manifest_path(each).unlink(missing_ok=True)  # an overwritten dataset loses its manifest first
            for kind in TOKENIZER_SUFFIXES:  # the overwritten one may have been of another kind
                dataset_tokenizer_path(each, kind).unlink(missing_ok=True)
            for path in _data_paths(each, plan):
                partial_path(path).replace(path)
            manifest.save(each)
        if blend:
            save_blend(blend, blend_path(prefix))
    finally:
        for each in prefixes.values():
            for path in _data_paths(each, plan):
                partial_path(path).unlink(missing_ok=True)
    return manifests


def _possible_prefixes(prefix: Path, plan: Plan, domain_slugs: dict[str, str]) -> set[Path]:
    """Of the datasets for which a run of `plan` over these domains may have documents."""
    domains = domain_slugs if plan.options["by_domain"] else [None]
    splits = SPLITS if plan.options["split"] else [None]
    return {output_prefix(prefix, Output(domain, split), domain_slugs) for domain in domains for split in splits}


def _remove_dataset(prefix: Path) -> None:
    paths = [manifest_path(prefix), bin_path(prefix), idx_path(prefix), token_counts_path(prefix)]
    for path in [*paths, *(dataset_tokenizer_path(prefix, kind) for kind in TOKENIZER_SUFFIXES)]:
        path.unlink(missing_ok=True)


def _data_paths(prefix: Path, plan: Plan) -> list[Path]:
    """The files of a dataset, except for the manifest."""
    tokenizer = dataset_tokenizer_path(prefix, plan.tokenizer.kind)
    return [bin_path(prefix), idx_path(prefix), token_counts_path(prefix), tokenizer]


def _sources(plan: Plan, folders: Sequence[Path], streamed: dict[str, list[str]]) -> tuple[SourceFile, ...]:
    """The inputs with their hashes; of a stream, sha256 of the hashes of its shards' contents, a line each."""
    sources: list[SourceFile] = []
    for number, planned in enumerate(plan.sources):
        if planned.name in streamed:
            digest = hashlib.sha256("\n".join(streamed[planned.name]).encode()).hexdigest()
            sources.append(SourceFile(planned.name, planned.num_bytes, digest))
            continue
        found = {source for folder in folders if (source := load_source(folder, number))}
        if not found:
            raise UserError(f"{', '.join(map(str, folders))}: the hash of {planned.name} is missing; run again")
        if len(found) > 1:
            raise UserError(f"{planned.name}: was not the same file on all machines; prepare the dataset again")
        sources += found
    return tuple(sources)


def _survey(plan: Plan, homes: list[Path]) -> tuple[dict[Output, _Content], Counter[str], dict[str, list[str]]]:
    """What each output is made of, sorted by output; what was skipped; hashes of what was streamed, by input."""
    contents: dict[Output, _Content] = {}
    skipped = Counter[str]()
    streamed: dict[str, list[str]] = {}
    for number, folder in enumerate(homes):
        part = load_part(folder, number)
        if part is None:
            raise _damaged(folder, number)
        if part.plan != plan.digest:
            raise UserError(f"{part_path(folder, number)}: is a part of another run; remove it and run again")
        skipped.update(part.skipped)
        for name in part.streamed:
            streamed.setdefault(name, []).append(part.content_sha256)
        for output, share in part.outputs.items():
            content = contents.setdefault(output, _Content(_Runs(homes), _Runs(homes), _Runs(homes)))
            content.ids.extend(number, share.ids)
            content.lengths.extend(number, share.lengths)
            content.token_counts.extend(number, share.token_counts)
            content.documents += share.documents
            content.tokens += share.tokens
            add_domains(content.domains, share.domains)
    return dict(sorted(contents.items(), key=lambda item: sort_key(item[0]))), skipped, streamed


def _check_part(folder: Path, number: int) -> None:
    """Compare a part with its checksum. Raises UserError naming it."""
    crc, part = 0, load_part(folder, number)
    with data_path(folder, number).open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    if part is None or crc != part.crc32:
        raise _damaged(folder, number)


def _damaged(folder: Path, number: int) -> UserError:
    return UserError(f"{data_path(folder, number)}: is damaged; remove {part_path(folder, number)} and run again")


def _write_aside(
    prefix: Path, content: _Content, plan: Plan, homes: list[Path]
) -> tuple[list[DataFile], LengthStatistics]:
    """Write a dataset under partial names; its .bin, .idx and counts described, and its lengths' statistics."""
    dtype = token_dtype(plan.tokenizer.vocab_size)
    lengths = _Lengths(content.lengths)
    bin_file, idx_file, counts_file, tokenizer_file = _data_paths(prefix, plan)
    with _synced(bin_file) as file:
        for path, run in content.ids:
            with path.open("rb") as part:
                copy_run(part.fileno(), file.fileno(), run)
    with _synced(idx_file) as file:
        write_index(file, lengths, dtype)
    with _synced(counts_file) as file:
        np.save(file, _token_counts(content.token_counts, plan.tokenizer.vocab_size))
    with _synced(tokenizer_file) as file:
        file.write(tokenizer_copy_path(homes[0]).read_bytes())
    if file_digest(partial_path(tokenizer_file))[1] != plan.tokenizer.fingerprint:
        raise UserError(f"{tokenizer_copy_path(homes[0])}: is not the tokenizer that made the parts")
    described = [
        DataFile(path.name, *file_digest(partial_path(path))) for path in (bin_file, idx_file, counts_file)
    ]
    if described[0].bytes != content.tokens * dtype.itemsize:
        raise RuntimeError(f"{bin_file}: has {described[0].bytes} bytes for {content.tokens} tokens")
    return described, length_statistics(lengths)


@contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """The partial file of `path`, on the disk at the end."""
    with naming(path), partial_path(path).open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _token_counts(runs: _Runs, vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, np.int64)
    for path, run in runs:
        ids, numbers = read_run(path, run, "<i4").reshape(2, -1)
        counts[ids] += numbers
    return counts


def _describe(
    output: Output,
    content: _Content,
    plan: Plan,
    sources: tuple[SourceFile, ...],
    skipped: Counter[str],
    files: tuple[list[DataFile], LengthStatistics],
) -> Manifest:
    (bin_file, idx_file, counts_file), lengths = files
    tokenizer_name = dataset_tokenizer_path(bin_file.name.removesuffix(".bin"), plan.tokenizer.kind).name
    shares = plan.options["split"]
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=content_fingerprint(bin_file.sha256, idx_file.sha256, plan.tokenizer.fingerprint),
        sources=sources,
        tokenizer=replace(plan.tokenizer, file=tokenizer_name),
        dtype=token_dtype(plan.tokenizer.vocab_size).name,
        documents=content.documents,
        tokens=content.tokens,
        text_bytes=sum(counts.bytes for counts in content.domains.values()),
        domains=dict(sorted(content.domains.items())),
        skipped=dict(sorted(skipped.items())),
        bin=bin_file,
        idx=idx_file,
        token_counts=counts_file,
        lengths=lengths,
        subset=None if output == WHOLE else Subset(output.split, tuple(shares) if shares else None, output.domain),
        options=plan.options,
    )


def _blend(prefixes: dict[Output, Path], tokens: dict[Output, int], weighting: Weighting) -> Blend:
    """All domains that have something to train on."""
    by_domain: dict[str, dict[str, Output]] = {}
    for output in prefixes:
        if output.domain is not None:
            by_domain.setdefault(output.domain, {})[output.split or "train"] = output
    trained = {domain: splits for domain, splits in by_domain.items() if "train" in splits}
    if not trained:
        raise UserError("--split: no document is left to train on; give train a larger share")
    weights = weighting.weights({domain: tokens[splits["train"]] for domain, splits in trained.items()})
    entries = []
    for domain, splits in trained.items():
        paths = {split: prefixes[output] for split, output in splits.items()}
        entries.append(
            BlendEntry(domain, paths["train"], paths.get("validation"), paths.get("test"), weights[domain])
        )
    return Blend(tuple(entries), weighting.by)
