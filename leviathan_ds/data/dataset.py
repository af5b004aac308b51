"""megatron-core's GPTDataset and blends over data_prep's indexed files, behind one function.

A sample is sequence_length + 1 consecutive tokens of the shuffled documents. Validation documents are chosen
by their index and a fixed hash: documents appended later never move an earlier one between the splits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from data_prep.errors import UserError
from data_prep.files import bin_path, dataset_tokenizer_path, idx_path, manifest_path
from data_prep.indexed import IndexedReader, check_dataset
from data_prep.manifest import Manifest, load_manifest
from leviathan_ds.config import DataConfig

# GPTDataset is asked for a little more than a blend needs, because the blend rounds for each dataset.
_BLEND_SURPLUS = 1.005
_BLOCK_TOKENS = 1 << 24  # ids looked at at once


@dataclass(frozen=True)
class CheckedData:
    """Datasets that were found whole, of one tokenizer."""

    prefixes: tuple[Path, ...]
    manifests: tuple[Manifest, ...]

    @property
    def vocab_size(self) -> int:
        return self.manifests[0].tokenizer.vocab_size

    @property
    def tokenizer_path(self) -> Path:
        return dataset_tokenizer_path(self.prefixes[0])

    @property
    def fingerprints(self) -> list[str]:
        return [manifest.fingerprint for manifest in self.manifests]

    def shares(self, config: DataConfig) -> list[float]:
        """Each dataset's share of the samples."""
        weights = config.weights or [manifest.tokens for manifest in self.manifests]
        return [weight / sum(weights) for weight in weights]


def check_data(config: DataConfig) -> CheckedData:
    """Look at every dataset of the recipe before anything is built.

    Raises UserError naming the file and what is wrong: missing or truncated files, another tokenizer than
    the recipe's or than its neighbours'.
    """
    if not config.prefixes:
        raise UserError(
            "data.prefixes is empty; prepare a dataset (python -m data_prep.preprocess) and name its prefix"
        )
    prefixes = tuple(Path(prefix) for prefix in config.prefixes)
    manifests = []
    for prefix in prefixes:
        check_dataset(prefix)
        manifests.append(load_manifest(prefix))
        _check_sizes(prefix, manifests[-1])
    expected = config.tokenizer_fingerprint or manifests[0].tokenizer.fingerprint
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        found = manifest.tokenizer.fingerprint
        if found != expected:
            source = "data.tokenizer_fingerprint" if config.tokenizer_fingerprint else f"the one of {prefixes[0]}"
            raise UserError(
                f"{prefix} was encoded with the tokenizer {found[:12]}, but {source} is {expected[:12]}; "
                "encode it again with that tokenizer or change the recipe"
            )
    return CheckedData(prefixes, tuple(manifests))


def _check_sizes(prefix: Path, manifest: Manifest) -> None:
    """Refuse files that replaced those of the manifest: its fingerprint names the content in every cache."""
    for path, described in ((bin_path(prefix), manifest.bin), (idx_path(prefix), manifest.idx)):
        found = path.stat().st_size
        if found != described.bytes:
            raise UserError(
                f"{path}: has {found} bytes, {manifest_path(prefix)} describes {described.bytes}: "
                "not of this manifest; prepare the dataset again"
            )


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


def validation_documents(num_documents: int, fraction: float) -> np.ndarray:
    """Boolean mask [num_documents]: which documents are held out. A pure function of each index."""
    index = np.arange(num_documents, dtype=np.uint64)
    with np.errstate(over="ignore"):  # splitmix64
        z = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) < np.uint64(int(fraction * 2**64))


def build_datasets(config: DataConfig, data: CheckedData, num_train_samples: int) -> tuple[Any, Any]:
    """The training samples (num_train_samples of them, over as many epochs as it takes) and one epoch of
    validation samples; both give dicts with tokens, labels [sequence_length] and loss_mask.

    The indices are built once and cached beside the dataset under a name made from its content and from
    everything that shapes them. Safe to call on every rank and node at once.

    Raises UserError when a split has no document or too few tokens for one sample.
    """
    train = _blend(config, data, num_train_samples, Split.train)
    validation = _blend(config, data, None, Split.valid)
    return train, validation


def _blend(config: DataConfig, data: CheckedData, num_samples: int | None, split: Split) -> Any:
    if len(data.prefixes) == 1:
        return _open(config, data.prefixes[0], data.manifests[0], num_samples, split)
    shares = data.shares(config)
    parts = []
    for prefix, manifest, share in zip(data.prefixes, data.manifests, shares, strict=True):
        wanted = None if num_samples is None else int(np.ceil(num_samples * share * _BLEND_SURPLUS)) + 1
        parts.append(_open(config, prefix, manifest, wanted, split))
    if num_samples is None:
        # As many validation samples as the shares allow without repeating any dataset's.
        num_samples = int(min(len(part) / share for part, share in zip(parts, shares, strict=True)))
    # Without a cache: its indices take seconds to build, and megatron-core's cache here needs process groups.
    return BlendedDataset(parts, shares, num_samples, replace(parts[0].config, path_to_cache=None))


def _open(
    config: DataConfig, prefix: Path, manifest: Manifest, num_samples: int | None, split: Split
) -> GPTDataset:
    indexed = IndexedDataset(str(prefix), multimodal=False, mmap=True)
    held_out = validation_documents(len(indexed.sequence_lengths), config.validation_fraction)
    documents = np.flatnonzero(held_out if split is Split.valid else ~held_out).astype(np.int32)
    tokens = int(indexed.sequence_lengths[documents].sum(dtype=np.int64)) if len(documents) else 0
    if tokens <= config.sequence_length:
        raise UserError(
            f"{prefix}: the {'validation' if split is Split.valid else 'training'} split has {len(documents)} of "
            f"{len(held_out)} documents and {tokens} tokens, too few for one sample of {config.sequence_length}; "
            "change data.validation_fraction or add documents"
        )
    identity = {
        "content": manifest.fingerprint,
        "split": split.name,
        "validation_fraction": config.validation_fraction,
        "sequence_length": config.sequence_length,
        "seed": config.seed,
        "num_samples": num_samples,
    }
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    cache = prefix.with_name(prefix.name + ".index_cache") / name

    def dataset(folder: Path) -> GPTDataset:
        gpt_config = GPTDatasetConfig(
            random_seed=config.seed,
            sequence_length=config.sequence_length,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            tokenizer=_ManifestTokenizer(manifest),  # pyright: ignore[reportArgumentType]
            path_to_cache=str(folder),
        )
        return GPTDataset(indexed, name, documents, num_samples, split, gpt_config)

    if not cache.is_dir():
        _check_ids(prefix, manifest)
        # Built aside and renamed: a killed build leaves nothing that a later run would trust.
        aside = cache.with_name(f"{name}.{os.uname().nodename}.{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)  # a killed build's whose process id has come round again
        # The rank outside torch.distributed builds, whoever it is: without that megatron-core would let
        # only global rank 0 write, and a node without a shared disk would find no file.
        dataset(aside)
        try:
            aside.rename(cache)
        except OSError:  # another process was first, with the same content
            shutil.rmtree(aside)
    return dataset(cache)


class _ManifestTokenizer:
    """What GPTDataset wants to know of a tokenizer."""

    def __init__(self, manifest: Manifest) -> None:
        self.vocab_size = manifest.tokenizer.vocab_size
        self.eod = manifest.tokenizer.eod_id
        self.unique_identifiers = {"fingerprint": manifest.tokenizer.fingerprint}

    @property
    def pad(self) -> int:
        raise AttributeError("documents fill every sample: there is no padding")
