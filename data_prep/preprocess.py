"""Documents to indexed datasets: `python -m data_prep.preprocess --input FILE... --tokenizer ...`.

Workers make a part of each shard of the inputs, in PREFIX.parts; the parts are then joined in the order of
the plan. A run that was ended goes on with the parts that are whole. The datasets' files are written to
`*.partial` and renamed at the end, the manifest last: where there is a manifest, there is a complete dataset.
"""

import hashlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import orjson
from numpy.typing import NDArray

from data_prep import cli
from data_prep.blend import Weighting, add_weighting_options
from data_prep.dry_run import estimate
from data_prep.duplicates import DuplicateOptions, Method, find_duplicates
from data_prep.encode import EncodeOptions, Progress, is_file
from data_prep.errors import UserError
from data_prep.files import (
    TOKENIZER_SUFFIXES,
    bin_path,
    blend_path,
    check_named,
    dataset_tokenizer_path,
    file_digest,
    idx_path,
    manifest_path,
)
from data_prep.filters import load_filter
from data_prep.joining import NoDocuments, join_parts
from data_prep.manifest import Manifest, TokenizerInfo
from data_prep.parts import (
    Plan,
    PlannedSource,
    anything_finished,
    claim_parts,
    finished_parts,
    load_source,
    locked_parts,
    part_numbers,
    parts_folder,
    plan_path,
    remove_partial,
    remove_parts,
    signatures_path,
)
from data_prep.pool import EncodeShard, HashSource, SignShard, Task, WorkerDied, run_tasks
from data_prep.progress import Report, progress_display
from data_prep.sources import (
    DEFAULT_DOMAIN_KEY,
    DEFAULT_TEXT_KEY,
    INPUT_HELP,
    STANDARD_INPUT,
    OnError,
    ReadOptions,
    Shard,
    Source,
    expand_inputs,
    plan_shards,
    remove_spooled,
)
from data_prep.splits import SPLITS, Shares, parse_shares
from data_prep.summary import print_summary
from data_prep.tokenizers import BACKENDS, Backend, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Job:
    """A run before anything is written: what to make, of what, and how it is cut."""

    prefix: Path
    plan: Plan
    tokenizer: Tokenizer
    sources: list[Source]
    shards: list[Shard]
    options: EncodeOptions

    @property
    def folder(self) -> Path:
        return self.options.folder

    @property
    def num_bytes(self) -> int:
        """Of the sources on the disk."""
        return sum(shard.num_bytes for shard in self.shards)

    def work_bytes(self, numbers: range) -> int:
        """What the progress of making these parts ends at: duplicates are found in a reading of their own."""
        encoded = sum(self.shards[number].num_bytes for number in numbers)
        return encoded + (self.num_bytes if self.options.duplicates else 0)


@dataclass(frozen=True)
class Share:
    """Which of the shards this machine does: a contiguous range, since compressed files are read in order."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UserError(f"--shard_index {self.index}: must be 0 to {self.count - 1}, below --num_shards")

    def of(self, total: int) -> range:
        return range(total * self.index // self.count, total * (self.index + 1) // self.count)


def preprocess(
    inputs: Sequence[Path | str],
    tokenizer: Path | str,
    output_prefix: Path | str,
    *,
    workers: int = 1,
    text_key: str = DEFAULT_TEXT_KEY,
    domain_key: str = DEFAULT_DOMAIN_KEY,
    on_error: OnError = "fail",
    eod_token: str | None = None,
    tokenizer_backend: Backend = "reference",
    overwrite: bool = False,
    report: Report | None = None,
) -> Manifest:
    """Encode the documents of `inputs` into one dataset, `{output_prefix}.bin/.idx/...`; see `prepare`."""
    read = ReadOptions(text_key, domain_key, on_error)
    job = plan_job(
        inputs,
        tokenizer,
        output_prefix,
        read,
        eod_token=eod_token,
        backend=tokenizer_backend,
        overwrite=overwrite,
    )
    (manifest,) = prepare(job, workers=workers, overwrite=overwrite, report=report).values()
    return manifest


def plan_job(
    inputs: Sequence[Path | str],
    tokenizer: Path | str,
    output_prefix: Path | str,
    read: ReadOptions,
    *,
    split: Shares | None = None,
    by_domain: bool = False,
    duplicates: DuplicateOptions | None = None,
    eod_token: str | None = None,
    backend: Backend = "reference",
    overwrite: bool = False,
) -> Job:
    """Look at inputs and tokenizer and cut the work. Writes nothing, unless standard input is among the inputs.

    Raises UserError (a ValueError) for the user's mistakes, among them a dataset that exists, unless `overwrite`
    or an unfinished run is there to go on with."""
    prefix = Path(output_prefix)
    check_named(prefix, "--output_prefix")
    loaded = load_tokenizer(tokenizer, eod_token)  # the backend is loaded, and checked, by the workers
    folder = parts_folder(prefix)
    if not overwrite and not plan_path(folder).exists():
        check_not_existing(prefix, bool(split), by_domain)
    elif not overwrite and STANDARD_INPUT in inputs:
        raise UserError(
            f"{folder}: holds an unfinished run, with which standard input cannot go on; "
            "pass --overwrite to begin anew, or choose another --output_prefix"
        )
    try:
        sources = expand_inputs(inputs, spool_folder=folder)
        shards = plan_shards(sources, read)
        filter_sha256 = _code_digest(read.filter)
    except BaseException:
        remove_spooled(folder)
        raise
    cuts = [[(piece.source.path, piece.start, piece.end) for piece in shard.pieces] for shard in shards]
    plan = Plan(
        sources=tuple(PlannedSource(source.path, source.num_bytes, source.modified_ns) for source in sources),
        tokenizer=_tokenizer_info(loaded),
        options=asdict(read)
        | {
            "filter_sha256": filter_sha256,
            "split": list(split) if split else None,
            "by_domain": by_domain,
            "duplicates": asdict(duplicates) if duplicates else None,
        },
        num_shards=len(shards),
        shards=hashlib.sha256(orjson.dumps(cuts)).hexdigest(),
    )
    options = EncodeOptions(backend, read, folder, plan.digest, split, by_domain, duplicates)
    return Job(prefix, plan, loaded, sources, shards, options)


def _code_digest(filter_name: str | None) -> str | None:
    """sha256 of the file that the user's filter is in; UserError if it cannot be loaded."""
    if filter_name is None:
        return None
    file = inspect.getsourcefile(inspect.unwrap(load_filter(filter_name)))
    return file_digest(Path(file))[1] if file else None


def _tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    return TokenizerInfo(
        tokenizer.kind, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod_id, tokenizer.pad_id, file=""
    )


def check_not_existing(prefix: Path, split: bool, by_domain: bool) -> None:
    """Raise UserError if a file of a dataset has a name that the run will write."""
    if by_domain:
        candidates = [blend_path(prefix)]
    else:
        prefixes = [Path(f"{prefix}.{name}") for name in SPLITS] if split else [prefix]
        candidates = [make(each) for each in prefixes for make in (bin_path, idx_path, manifest_path)]
        candidates += [dataset_tokenizer_path(each, kind) for each in prefixes for kind in TOKENIZER_SUFFIXES]
    for path in candidates:
        if path.exists():
            raise UserError(f"{path}: exists already; pass --overwrite or another --output_prefix")


def prepare(
    job: Job,
    *,
    workers: int = 1,
    weighting: Weighting | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> dict[Path, Manifest]:
    """Make all datasets of `job`, with the parts that an ended run of it left; their manifests by prefix.

    The bytes of the result depend on the inputs, the tokenizer and the options, not on `workers`. Raises
    UserError (a ValueError) for the user's mistakes, an input without a token among them, and WorkerDied; the
    parts that were finished until then stay, no dataset does. Workers die with the calling thread."""
    with locked_parts(job.folder, 0, 1):
        make_parts(job, workers=workers, overwrite=overwrite, report=report)
        try:
            manifests = join_parts(job.prefix, job.plan, [job.folder], weighting)
        except NoDocuments:
            remove_parts(job.folder)
            raise
        except BaseException as error:
            error.add_note(f"all parts are finished and stay in {job.folder}; the same command joins them")
            raise
        remove_parts(job.folder)
    return manifests


def make_parts(
    job: Job,
    *,
    share: Share = Share(),
    workers: int = 1,
    overwrite: bool = False,
    report: Report | None = None,
) -> None:
    """Make the parts of a share of the job that are not there yet. Raises as `prepare` does."""
    numbers = share.of(len(job.shards))
    claim_parts(job.folder, job.plan, job.tokenizer.content, overwrite)
    tasks, done = _remaining(job, numbers)
    hashed = [task.number for task in tasks if isinstance(task, HashSource)]
    remove_partial(job.folder, job.plan.digest, numbers, hashed)

    def report_all(progress: Progress) -> None:
        if report:
            report(done + progress)

    report_all(Progress())
    try:
        if job.options.duplicates:
            drops = _find_duplicates(job, workers, report_all)
            done += Progress(source_bytes=job.num_bytes)
            tasks = [
                replace(task, drop=drops[task.number]) if isinstance(task, EncodeShard) else task for task in tasks
            ]
        run_tasks(tasks, job.options, workers, report_all)
    except BaseException as error:
        remove_partial(job.folder, job.plan.digest, numbers, hashed)
        if anything_finished(job.folder):
            error.add_note(
                f"{len(part_numbers(job.folder))} of {len(job.shards)} parts are finished and stay in "
                f"{job.folder}; the same command goes on from there"
            )
        raise


def _find_duplicates(job: Job, workers: int, report: Report) -> list[NDArray[np.int64]]:
    """For each shard the positions of its documents that occurred before; `report` gets what signing has done."""
    assert job.options.duplicates
    paths = [signatures_path(job.folder, job.plan.digest, number) for number in range(len(job.shards))]
    missing = [SignShard(number, job.shards[number]) for number, path in enumerate(paths) if not path.exists()]
    signed = Progress(source_bytes=job.num_bytes - sum(task.shard.num_bytes for task in missing))
    run_tasks(missing, job.options, workers, lambda progress: report(signed + progress))
    return find_duplicates(paths, job.options.duplicates)


def _remaining(job: Job, numbers: range) -> tuple[list[Task], Progress]:
    """What is left to do, and what was done by earlier runs."""
    done, finished = Progress(), set[int]()
    for part in finished_parts(job.folder, job.plan.digest):
        if part.number in numbers:
            finished.add(part.number)
            counts = [counts for output in part.outputs.values() for counts in output.domains.values()]
            done += Progress(
                job.shards[part.number].num_bytes,
                sum(each.documents for each in counts),
                sum(each.tokens for each in counts),
                sum(each.bytes for each in counts),
                sum(part.skipped.values()),
            )
    first_shard: dict[str, int] = {}
    for number, shard in enumerate(job.shards):
        for piece in shard.pieces:
            first_shard.setdefault(piece.source.path, number)
    tasks: list[Task] = [
        HashSource(number, source.path)
        for number, source in enumerate(job.sources)
        if is_file(source) and first_shard.get(source.path, 0) in numbers and not load_source(job.folder, number)
    ]
    tasks += [EncodeShard(number, job.shards[number]) for number in numbers if number not in finished]
    return tasks, done


def build_parser() -> cli.CommandParser:
    """The command line's options."""
    parser = cli.CommandParser("python -m data_prep.preprocess", "Encode documents into indexed datasets.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=INPUT_HELP)
    add(
        "--tokenizer", required=True, help="a .model, tokenizer.json or .tiktoken file, or o200k_base, cl100k_base"
    )
    add("--eod_token", help="of a tokenizer.json: the special token that ends documents")
    add("--tokenizer_backend", choices=BACKENDS, default="reference", help="gigatoken: faster, the same ids")
    add("--output_prefix", type=Path, required=True, help="the dataset's path without a suffix")
    add("--workers", type=cli.positive_int, default=2, help="encoding processes; the output is the same")
    add("--text_key", default=DEFAULT_TEXT_KEY, help="where a record has its text; dots reach into objects")
    add("--domain_key", default=DEFAULT_DOMAIN_KEY, help="where a record has its domain's name")
    add("--on_error", choices=get_args(OnError), default="fail", help="at a line that cannot be read")
    add("--document_marker", metavar="LINE", help="what stands between the documents of a .txt; '': blank lines")
    add("--filter", metavar="MODULE:FUNCTION", help="keep a document if function(text, domain, record) is true")
    add("--deduplicate", choices=get_args(Method), help="drop documents that occurred before: equal, or near")
    near = DuplicateOptions("exact")
    add("--near_threshold", type=float, default=near.threshold, help="least similarity of near duplicates")
    add(
        "--near_ngram_words",
        type=cli.positive_int,
        default=near.ngram_words,
        help="words compared at once",
    )
    add("--near_permutations", type=cli.positive_int, default=near.num_permutations, help="hashes for it")
    add("--split", metavar="TRAIN,VALIDATION,TEST", help="shares of three datasets, chosen by each text's hash")
    add("--split_by", metavar="KEY", help="a dataset for each value of this key, which replaces --domain_key")
    add_weighting_options(parser)
    add("--shard_index", type=int, help="make only the parts of this machine, from 0; data_prep.merge joins them")
    add("--num_shards", type=cli.positive_int, help="the number of machines")
    add("--dry_run", action="store_true", help="estimate documents, tokens, time and disk; write nothing")
    add("--overwrite", action="store_true", help="replace an existing dataset, or another run's parts")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = build_parser().parse_args(arguments)

    def command() -> None:
        if (options.shard_index is None) != (options.num_shards is None):
            raise UserError("--shard_index and --num_shards go together")
        share = Share(options.shard_index or 0, options.num_shards or 1)
        if options.split_by and options.domain_key not in (DEFAULT_DOMAIN_KEY, options.split_by):
            raise UserError("--split_by is the key of the domains, too; leave --domain_key out")
        duplicates = options.deduplicate and DuplicateOptions(
            options.deduplicate, options.near_threshold, options.near_ngram_words, options.near_permutations
        )
        if duplicates and options.num_shards is not None:
            raise UserError("--deduplicate compares all documents; it cannot be joined with --num_shards")
        split = parse_shares(options.split) if options.split else None
        weighting = Weighting(options.blend_weights, options.temperature)
        if weighting != Weighting() and not options.split_by:
            raise UserError("--blend_weights acts with --split_by only")
        domain_key = options.split_by or options.domain_key
        read = ReadOptions(options.text_key, domain_key, options.on_error, options.document_marker, options.filter)
        job = plan_job(
            options.input,
            options.tokenizer,
            options.output_prefix,
            read,
            split=split,
            by_domain=bool(options.split_by),
            duplicates=duplicates,
            eod_token=options.eod_token,
            backend=options.tokenizer_backend,
            overwrite=options.overwrite or options.dry_run,
        )
        if options.dry_run:
            try:
                print(estimate(job.sources, job.tokenizer, job.options, options.workers))
            finally:
                remove_spooled(job.folder)
            return
        with progress_display(job.work_bytes(share.of(len(job.shards)))) as report:
            if options.num_shards is not None:
                with locked_parts(job.folder, share.index, share.count):
                    make_parts(
                        job, share=share, workers=options.workers, overwrite=options.overwrite, report=report
                    )
                print(
                    f"{job.folder}: parts of share {share.index} of {share.count} are finished; when all are, "
                    f"join them with python -m data_prep.merge --output_prefix {job.prefix}"
                )
                return
            manifests = prepare(
                job, workers=options.workers, weighting=weighting, overwrite=options.overwrite, report=report
            )
        print_summary(manifests, job.prefix)

    try:
        return cli.run(command)
    except WorkerDied as error:
        cli.print_error(str(error), error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
