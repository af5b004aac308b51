"""End-to-end rate of data_prep.preprocess against the tokenizer's bare loop, and its memory.

    python benchmarks/preprocess.py --tokenizer o200k_base --text TEXT.jsonl [--tokenizer_backend gigatoken]
    python benchmarks/preprocess.py --tokenizer o200k_base --memory [--documents 100_000 5_000_000]

Not named data_prep.py: beside the other benchmarks that would hide the package from them.

The first: whole commands, start-up included, take turns with a loop in this process that encodes the same texts
one by one and keeps nothing. Targets on 179 MB of text in 32,454 documents: one worker at least 0.90 of the bare
loop, two at least 1.75 times one. The second: peak resident memory of the parent and of the largest worker, by
number of tiny documents; at most 400 and 300 MB.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from measure import MB, alternate, ratio, report

from data_prep.cli import positive_int
from data_prep.sources import iter_documents
from data_prep.tokenizers import load_tokenizer

BARE = "bare loop"


def command(tokenizer: str, backend: str, source: Path, folder: Path, workers: int) -> list[str]:
    options = [
        "--input",
        source,
        "--tokenizer",
        tokenizer,
        "--output_prefix",
        folder / f"w{workers}",
        "--tokenizer_backend",
        backend,
        "--overwrite",
    ]
    return [sys.executable, "-m", "data_prep.preprocess", *map(str, options), "--workers", str(workers)]


def bare_loop(tokenizer_path: str, source: Path) -> tuple[Callable[[], None], int]:
    """(the loop, the bytes of its texts)."""
    tokenizer = load_tokenizer(tokenizer_path)
    texts = [document.text for document in iter_documents([source])]

    def loop() -> None:
        for text in texts:
            tokenizer.encode(text)

    return loop, sum(len(text.encode()) for text in texts)


def throughput(tokenizer: str, backend: str, source: Path, workers: list[int], repeats: int, folder: Path) -> None:
    loop, num_bytes = bare_loop(tokenizer, source)
    arms: dict[str, Callable[[], object]] = {BARE: loop}
    for count in workers:
        arguments = command(tokenizer, backend, source, folder, count)
        arms[f"{count} workers"] = lambda arguments=arguments: subprocess.run(
            arguments, check=True, stdout=subprocess.DEVNULL
        )
    times = alternate(arms, repeats, warmup=0)
    for arm, seconds in times.items():
        report(
            "data_prep",
            tokenizer=tokenizer,
            backend=backend,
            arm=arm,
            seconds=statistics.median(seconds),
            mb_per_s=num_bytes / MB / statistics.median(seconds),
            rate_of_bare_loop=1 / ratio(times, arm, BARE),
            rate_of_first_workers=1 / ratio(times, arm, f"{workers[0]} workers"),
        )


def memory(tokenizer: str, backend: str, documents: list[int], folder: Path) -> None:
    for count in documents:
        source = folder / "tiny.jsonl"
        with source.open("w") as file:
            file.writelines(f'{{"text": "tiny document {number}"}}\n' for number in range(count))
        start = time.perf_counter()
        parent, worker = peak_resident_bytes(command(tokenizer, backend, source, folder, workers=2))
        report(
            "data_prep_memory",
            documents=count,
            seconds=time.perf_counter() - start,
            parent_mb=parent / MB,
            worker_mb=worker / MB,
        )


def peak_resident_bytes(arguments: list[str]) -> tuple[int, int]:
    """(of the command's first process, the largest of its workers)."""
    peaks: dict[int, int] = {}
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as parent:
        while parent.poll() is None:
            try:
                for process in (psutil.Process(parent.pid), *psutil.Process(parent.pid).children()):
                    peaks[process.pid] = max(peaks.get(process.pid, 0), process.memory_info().rss)
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.02)
    if parent.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exited with {parent.returncode}")
    first = peaks.pop(parent.pid)
    return first, max(peaks.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a file, or o200k_base")
    parser.add_argument(
        "--tokenizer_backend", default="reference", help="of the commands; the loop is the reference's"
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument("--workers", type=positive_int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=positive_int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--documents", type=positive_int, nargs="+", default=[100_000, 5_000_000])
    options = parser.parse_args()
    if not options.memory and not options.text:
        parser.error("give --text, or --memory")
    with tempfile.TemporaryDirectory(prefix="data_prep_") as folder:
        if options.text:
            throughput(
                options.tokenizer,
                options.tokenizer_backend,
                options.text,
                options.workers,
                options.repeats,
                Path(folder),
            )
        if options.memory:
            memory(options.tokenizer, options.tokenizer_backend, options.documents, Path(folder))


if __name__ == "__main__":
    main()
