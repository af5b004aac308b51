"""The sample indices of megatron-core's GPTDataset and BlendedDataset, built once and kept under their content.

A sample is sequence_length + 1 consecutive tokens of the shuffled documents. Held-out documents are chosen by
their index and a fixed hash: documents appended later never move an earlier one between the splits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from data_prep.errors import UserError
from data_prep.files import bin_path, locked
from data_prep.indexed import IndexedReader
from data_prep.manifest import Manifest
from leviathan_ds.config import DataConfig

T = TypeVar("T")
Documents = Literal["all", "training", "held_out"]
"""Of a dataset: all, or a side of the split by data.validation_fraction."""

# GPTDataset is asked for a little more than a blend needs, because the blend rounds for each dataset.
_BLEND_SURPLUS = 1.005
_BLOCK_TOKENS = 1 << 24  # ids looked at at once


@dataclass(frozen=True)
class Part:
    """A dataset's part in the training or in the validation. Weights need not sum to 1."""

    name: str
    prefix: Path
    manifest: Manifest
    weight: float
    documents: Documents


def shares(parts: Sequence[Part]) -> list[float]:
    """Each part's share of the samples."""
    return [part.weight / sum(each.weight for each in parts) for part in parts]


@dataclass(frozen=True)
class Index:
    """A sample index on the disk: of what, where, with how many samples, and how long it took to build or open."""

    title: str
    folder: Path
    samples: int
    built: bool
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


Report = Callable[[Index], None]


def validation_documents(num_documents: int, fraction: float) -> np.ndarray:
    """Boolean mask [num_documents]: which documents are held out. A pure function of each index."""
    index = np.arange(num_documents, dtype=np.uint64)
    with np.errstate(over="ignore"):  # splitmix64
        z = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) < np.uint64(int(fraction * 2**64))


def cache_folder(config: DataConfig, prefix: Path) -> Path:
    """Where the indices of a dataset are kept. Their names come from content: datasets may share a folder."""
    return Path(config.index_cache) if config.index_cache else prefix.with_name(prefix.name + ".index_cache")


def open_part(
    config: DataConfig, part: Part, num_samples: int | None, split: Split, report: Report = lambda index: None
) -> GPTDataset:
    """Samples of one dataset: num_samples over as many epochs as it takes, or (None) those of one epoch.

    Raises UserError when the part has no document or too few tokens for one sample, when an id lies outside the
    vocabulary, and when the cache cannot be written or read.
    """
    indexed = IndexedDataset(str(part.prefix), multimodal=False, mmap=True)
    documents = _documents(config, part, indexed.sequence_lengths)
    identity = {
        "content": part.manifest.fingerprint,
        "split": split.name,
        "documents": part.documents,
        "validation_fraction": None if part.documents == "all" else config.validation_fraction,
        "sequence_length": config.sequence_length,
        "seed": config.seed,
        "num_samples": num_samples,
    }
    name = _name(identity)

    def dataset(folder: Path) -> GPTDataset:
        gpt_config = GPTDatasetConfig(
            random_seed=config.seed,
            sequence_length=config.sequence_length,
            # Positions that begin anew show collate where documents end; the model needs no more (layers.py).
            reset_position_ids=config.reset_attention_mask,
            reset_attention_mask=config.reset_attention_mask,
            eod_mask_loss=False,
            create_attention_mask=False,
            tokenizer=_ManifestTokenizer(part.manifest),  # pyright: ignore[reportArgumentType]
            path_to_cache=str(folder),
        )
        return GPTDataset(indexed, name, documents, num_samples, split, gpt_config)

    def build(folder: Path) -> None:
        _check_ids(part.prefix, part.manifest)
        # The rank outside torch.distributed builds, whoever it is: without that megatron-core would let
        # only global rank 0 write, and a node without a shared disk would find no file.
        dataset(folder)

    title = f"{part.prefix}, {part.documents.replace('_', ' ')} documents"
    return _cached(cache_folder(config, part.prefix) / name, build, dataset, title, report)


def open_blend(
    config: DataConfig, parts: Sequence[Part], num_samples: int, split: Split, report: Report = lambda index: None
) -> Any:
    """num_samples of all parts, mixed by their shares from the start. Raises UserError as `open_part` does."""
    if len(parts) == 1:
        return open_part(config, parts[0], num_samples, split, report)
    wanted = [int(np.ceil(num_samples * share * _BLEND_SURPLUS)) + 1 for share in shares(parts)]
    opened: list[Any] = [
        open_part(config, part, count, split, report) for part, count in zip(parts, wanted, strict=True)
    ]
    identity = [dataset.dataset_path for dataset in opened], shares(parts), num_samples

    def dataset(folder: Path | None) -> BlendedDataset:
        path = None if folder is None else str(folder)
        return BlendedDataset(opened, shares(parts), num_samples, replace(opened[0].config, path_to_cache=path))

    def build(folder: Path) -> None:
        built = dataset(None)  # megatron-core's own way of filling a cache needs process groups
        base = f"{built.unique_description_hash}-{type(built).__name__}-{split.name}"
        folder.mkdir(parents=True)
        np.save(folder / f"{base}-dataset_index.npy", built.dataset_index)
        np.save(folder / f"{base}-dataset_sample_index.npy", built.dataset_sample_index)
        (folder / f"{base}-description.txt").write_text(built.unique_description)

    folder = cache_folder(config, parts[0].prefix) / _name(identity)
    return _cached(folder, build, dataset, f"blend of {len(parts)} datasets", report)


def _name(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]


def _cached(
    folder: Path, build: Callable[[Path], None], load: Callable[[Path], T], title: str, report: Report
) -> T:
    """What `load` makes of the folder, filled by `build` if it is not there. Ranks and nodes may call at once."""
    start = time.perf_counter()
    built = False
    try:
        if not folder.is_dir():  # else nothing is written: the cache may be read-only
            with locked(folder.with_name("build.lock")):
                if not folder.is_dir():
                    _build_aside(folder, build)
                    built = True
        try:
            loaded = load(folder)
        except (EOFError, ValueError) as error:  # numpy's, of a file that was copied in part
            raise UserError(f"the index {folder} is damaged ({error}); remove it to have it built again") from None
    except OSError as error:
        raise UserError(
            f"the index cache {folder.parent} cannot be written or read: {error}; make room there, or name "
            "another folder in data.index_cache"
        ) from None
    report(Index(title, folder, len(loaded), built, time.perf_counter() - start))  # pyright: ignore[reportArgumentType]
    return loaded


def _build_aside(folder: Path, build: Callable[[Path], None]) -> None:
    """Built aside and renamed: a killed build leaves nothing that a later run would trust."""
    aside = folder.with_name(f"{folder.name}.{os.uname().nodename}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)  # a killed build's whose process id has come round again
    try:
        build(aside)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another node was first, with the same content
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # after a failure it may be what fills the disk


def _documents(config: DataConfig, part: Part, lengths: np.ndarray) -> np.ndarray:
    """[documents] int32 numbers of the part's documents."""
    if part.documents == "all":
        documents = np.arange(len(lengths), dtype=np.int32)
    else:
        held_out = validation_documents(len(lengths), config.validation_fraction)
        documents = np.flatnonzero(held_out if part.documents == "held_out" else ~held_out).astype(np.int32)
    tokens = int(lengths[documents].sum(dtype=np.int64)) if len(documents) else 0
    if tokens <= config.sequence_length:
        kind = {"all": "dataset", "training": "training split", "held_out": "validation split"}[part.documents]
        way_out = (
            "add documents or leave it out"
            if part.documents == "all"
            else "change data.validation_fraction or add documents"
        )
        raise UserError(
            f"{part.prefix}: the {kind} has {len(documents)} of {len(lengths)} documents and {tokens} tokens, too "
            f"few for one sample of {config.sequence_length}; {way_out}"
        )
    return documents


def _check_ids(prefix: Path, manifest: Manifest) -> None:
    """Refuse ids outside the vocabulary, which would fail in the middle of a step. Reads the .bin once.

    Raises UserError naming the dataset and the document.
    """
    vocab_size = manifest.tokenizer.vocab_size
    reader = IndexedReader(prefix)
    for start in range(0, len(reader.tokens), _BLOCK_TOKENS):
        block = reader.tokens[start : start + _BLOCK_TOKENS]
        if block.min() >= 0 and block.max() < vocab_size:
            continue
        place = int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
        ends = np.cumsum(reader.lengths, dtype=np.int64)
        document = int(np.searchsorted(ends, start + place, side="right"))
        raise UserError(
            f"{bin_path(prefix)}: document {document} holds the id {block[place]}, outside the tokenizer's "
            f"vocabulary of {vocab_size}; prepare the dataset again"
        )


class _ManifestTokenizer:
    """What GPTDataset wants to know of a tokenizer."""

    def __init__(self, manifest: Manifest) -> None:
        self.vocab_size = manifest.tokenizer.vocab_size
        self.eod = manifest.tokenizer.eod_id
        self.unique_identifiers = {"fingerprint": manifest.tokenizer.fingerprint}

    @property
    def pad(self) -> int:
        raise AttributeError("documents fill every sample: there is no padding")
