"""What reading data costs: random access into an index of 10^9 tokens, and the loader's share of the demo's steps.

    python benchmarks/loader.py [--tokens 1000000000] [--samples 2000] [--steps 60]
    python benchmarks/loader.py --blend_samples 100000000    building the index of a blend of 22 datasets

The .bin of the large dataset is sparse: its index and its pages are looked up as those of any other, but no
disk turns. Targets: a sample in under 1 ms at the median; under 1% of a step with recipes/demo.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from measure import report
from megatron.core.datasets.utils import Split

from data_prep.files import bin_path, dataset_tokenizer_path, idx_path
from data_prep.indexed import write_index
from data_prep.manifest import DataFile, DomainCounts, Manifest, TokenizerInfo
from data_prep.sample import DEMO_PREFIX, prepare_demo
from leviathan_ds import run_directory
from leviathan_ds.config import DataConfig
from leviathan_ds.data.index import Index, Part, open_blend, open_part

ROOT = Path(__file__).parent.parent
MEAN_TOKENS = 1200  # of a document, about the Pile's
VOCAB_SIZE = 50_000


def synthetic(prefix: Path, tokens: int) -> Part:
    """A dataset of documents of exponentially distributed lengths, all ids 0; takes room for its index only."""
    generator = np.random.default_rng(0)
    lengths = (1 + generator.exponential(MEAN_TOKENS, tokens // MEAN_TOKENS)).astype(np.int32)
    dtype = np.dtype("<u2")
    with idx_path(prefix).open("wb") as file:
        write_index(file, lengths, dtype)
    total = int(lengths.sum(dtype=np.int64))
    with bin_path(prefix).open("wb") as file:
        file.truncate(total * dtype.itemsize)
    files = [DataFile(path.name, path.stat().st_size, "") for path in (bin_path(prefix), idx_path(prefix))]
    tokenizer = TokenizerInfo(
        "sentencepiece", "", VOCAB_SIZE, 2, None, dataset_tokenizer_path(prefix, "sentencepiece").name
    )
    counts = DomainCounts(len(lengths), total, 0)
    manifest = Manifest(1, prefix.name, (), tokenizer, dtype.name, len(lengths), total, 0, {}, {}, *files)
    return Part(prefix.name, prefix, manifest, counts.tokens, "all")


def random_access(folder: Path, tokens: int, samples: int) -> None:
    """Seconds of single samples at random, after the index was opened anew."""
    part, config, indices = (
        synthetic(folder / "synthetic", tokens),
        DataConfig(sequence_length=2048),
        list[Index](),
    )
    for _ in range(2):
        dataset = open_part(config, part, None, Split.train, indices.append)
    times = []
    for index in np.random.default_rng(1).integers(0, len(dataset), samples):
        start = time.perf_counter()
        dataset[int(index)]
        times.append(time.perf_counter() - start)
    report(
        "random_access",
        tokens=part.manifest.tokens,
        documents=part.manifest.documents,
        samples=len(dataset),
        build_s=indices[0].seconds,
        open_s=indices[1].seconds,
        index_mb=indices[0].bytes / 1e6,
        median_ms=1e3 * statistics.median(times),
        p99_ms=1e3 * statistics.quantiles(times, n=100)[98],
    )


def blend_index(folder: Path, samples: int) -> None:
    """Seconds to build and to open the index of a blend of 22 datasets, as the Pile's, of few tokens each."""
    parts = [synthetic(folder / f"domain{number}", 40_000_000 + 1_000_000 * number) for number in range(22)]
    config, indices = DataConfig(sequence_length=16, index_cache=str(folder / "cache")), list[Index]()
    for _ in range(2):
        open_blend(
            config,
            [replace(part, weight=i + 1) for i, part in enumerate(parts)],
            samples,
            Split.train,
            indices.append,
        )
    built, found = (index for index in indices if index.title.startswith("blend"))
    report(
        "blend_index",
        samples=samples,
        datasets=22,
        build_s=built.seconds,
        open_s=found.seconds,
        mb=built.bytes / 1e6,
    )
    report(
        "all_indices", build_s=sum(i.seconds for i in indices[:23]), open_s=sum(i.seconds for i in indices[23:])
    )


def data_wait(folder: Path, steps: int) -> None:
    """The share of the demo's steps that it waited for data, as its log has it."""
    here = Path.cwd()
    os.chdir(ROOT)
    prepare_demo()
    os.chdir(here)
    command = f"launchers/pretrain.py --ds_config ds_configs/zero2.json --run_dir {folder}/run"
    command += f" --config recipes/demo.yaml --data.prefixes [{DEMO_PREFIX}]"
    options = f"--training.train_steps {steps} --run.eval_samples 8"
    subprocess.run(
        [sys.executable, *command.split(), *options.split()], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    summary = json.loads((folder / "run" / run_directory.SUMMARY).read_text())
    report(
        "data_wait", steps=steps, tokens_per_s=summary["tokens_per_s"], data_wait_share=summary["data_wait_share"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blend_samples", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.blend_samples:
            blend_index(Path(folder), options.blend_samples)
            return
        random_access(Path(folder), options.tokens, options.samples)
        data_wait(Path(folder), options.steps)


if __name__ == "__main__":
    main()
