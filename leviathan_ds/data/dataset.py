"""The datasets of a recipe: looked at before anything is built, then opened as samples."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from data_prep.blend import load_blend
from data_prep.errors import UserError
from data_prep.files import TokenizerKind, bin_path, dataset_tokenizer_path, idx_path, manifest_path
from data_prep.indexed import check_dataset
from data_prep.manifest import Manifest, load_manifest
from leviathan_ds.config import DataConfig, Recipe
from leviathan_ds.data.index import Part, Report, open_blend, open_part

# At least, in megatron-core's GPTDataset: where a sample begins (two int32) and its place in the shuffle (uint32).
_INDEX_BYTES_PER_SAMPLE = 12


@dataclass(frozen=True)
class CheckedData:
    """Datasets that were found whole, of one tokenizer: what is trained on, and what is validated on."""

    train: tuple[Part, ...]
    validation: tuple[Part, ...]
    fingerprints: list[str]
    """Of all that decides which tokens a run sees: a resume is held to them."""

    @property
    def prefixes(self) -> tuple[Path, ...]:
        """Of what is trained on, as `manifests`."""
        return tuple(part.prefix for part in self.train)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(part.manifest for part in self.train)

    @property
    def vocab_size(self) -> int:
        return self.manifests[0].tokenizer.vocab_size

    @property
    def tokenizer_kind(self) -> TokenizerKind:
        return self.manifests[0].tokenizer.kind

    @property
    def tokenizer_path(self) -> Path:
        return dataset_tokenizer_path(self.prefixes[0], self.tokenizer_kind)


def check_data(config: DataConfig) -> CheckedData:
    """Look at every dataset of the recipe before anything is built.

    Raises UserError naming the file and what is wrong: missing or truncated files, another tokenizer than
    the recipe's or than its neighbours', a dataset that stands twice, training data to validate on.
    """
    train, validation = _parts(config)
    _check_tokenizers(config, [*train, *validation])
    whole = [part for part in validation if part.documents == "all"]
    trained_on = {part.manifest.fingerprint: part.prefix for part in train}
    for part in whole:
        if part.manifest.fingerprint in trained_on:
            raise UserError(
                f"{part.prefix} is validated on and has the content of {trained_on[part.manifest.fingerprint]}, "
                "which is trained on; take other documents for one of them"
            )
    fingerprints = [part.manifest.fingerprint for part in (*train, *whole)]
    if config.blend is not None:  # the recipe does not hold its weights
        weights = json.dumps([part.weight for part in (*train, *validation)])
        fingerprints.append(hashlib.sha256(weights.encode()).hexdigest())
    return CheckedData(tuple(train), tuple(validation), fingerprints)


def training_prefixes(config: DataConfig) -> tuple[Path, ...]:
    """Of the recipe, or of its blend file. Raises UserError when that cannot be read."""
    if config.blend is not None:
        return tuple(entry.train for entry in load_blend(config.blend).entries)
    return tuple(map(Path, config.prefixes))


def num_train_samples(recipe: Recipe) -> int:
    """Of all steps. Raises UserError when this machine could not build their index."""
    samples = recipe.training.train_steps * recipe.training.global_batch_size
    if samples * _INDEX_BYTES_PER_SAMPLE > psutil.virtual_memory().total:
        raise UserError(
            f"training.train_steps × training.global_batch_size = {samples:,} samples: their index alone does not "
            "fit into this machine's memory; lower one of them"
        )
    return samples


def build_datasets(
    config: DataConfig, data: CheckedData, num_train_samples: int, report: Report = lambda index: None
) -> tuple[Any, dict[str, GPTDataset]]:
    """The training samples (num_train_samples of them, over as many epochs as it takes), and one epoch of
    validation samples of each domain; all give dicts with tokens, labels [sequence_length] and loss_mask.

    The indices are built once and cached beside the dataset, or in data.index_cache, under a name made from its
    content and from everything that shapes them. Safe to call on every rank and node at once.

    Args:
        report: called with every index that was built or found.

    Raises UserError when a split has no document or too few tokens for one sample, and when the cache cannot be
    written or read.
    """
    train = open_blend(config, data.train, num_train_samples, Split.train, report)
    return train, {part.name: open_part(config, part, None, Split.valid, report) for part in data.validation}


def _parts(config: DataConfig) -> tuple[list[Part], list[Part]]:
    """What is trained on, and what is validated on."""
    if config.blend is not None:
        train, validation = [], []
        blend, source = load_blend(config.blend), f"data.blend {config.blend}"
        split = not blend.has_validation
        for entry in blend.entries:
            manifest = _checked(entry.train, source)
            train.append(Part(entry.name, entry.train, manifest, entry.weight, "training" if split else "all"))
            if split:
                validation.append(Part(entry.name, entry.train, manifest, entry.weight, "held_out"))
            elif entry.validation is not None:
                manifest = _checked(entry.validation, source)
                validation.append(Part(entry.name, entry.validation, manifest, entry.weight, "all"))
        return train, validation
    if not config.prefixes:
        raise UserError(
            "data.prefixes is empty; prepare a dataset (python -m data_prep.preprocess) and name its prefix, or a "
            "blend file in data.blend"
        )
    split = not config.validation_prefixes
    manifests = [_checked(Path(prefix), "data.prefixes") for prefix in config.prefixes]
    weights = config.weights or [manifest.tokens for manifest in manifests]
    names = _names(config.prefixes, "data.prefixes")
    train = [
        Part(name, Path(prefix), manifest, weight, "training" if split else "all")
        for name, prefix, manifest, weight in zip(names, config.prefixes, manifests, weights, strict=True)
    ]
    if split:
        return train, [Part(part.name, part.prefix, part.manifest, part.weight, "held_out") for part in train]
    names = _names(config.validation_prefixes, "data.validation_prefixes")
    validation = []
    for name, prefix in zip(names, config.validation_prefixes, strict=True):
        manifest = _checked(Path(prefix), "data.validation_prefixes")
        validation.append(Part(name, Path(prefix), manifest, manifest.tokens, "all"))
    return train, validation


def _names(prefixes: Sequence[str], key: str) -> list[str]:
    """What a reader calls the datasets: the last parts of their paths, or the paths where those are not enough."""
    twice = [prefix for prefix, count in Counter(prefixes).items() if count > 1]
    if twice:
        raise UserError(f"{key} has {twice[0]} twice; name it once, and give it the sum of its data.weights")
    names = [Path(prefix).name for prefix in prefixes]
    return names if len(set(names)) == len(names) else list(prefixes)


def _checked(prefix: Path, source: str) -> Manifest:
    """The manifest of a dataset whose files are whole. Raises UserError that names source, the recipe's key."""
    try:
        check_dataset(prefix)
        manifest = load_manifest(prefix)
        _check_sizes(prefix, manifest)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return manifest


def _check_sizes(prefix: Path, manifest: Manifest) -> None:
    """Refuse files that replaced those of the manifest: its fingerprint names the content in every cache."""
    for path, described in ((bin_path(prefix), manifest.bin), (idx_path(prefix), manifest.idx)):
        found = path.stat().st_size
        if found != described.bytes:
            raise UserError(
                f"{path}: has {found} bytes, {manifest_path(prefix)} describes {described.bytes}: "
                "not of this manifest; prepare the dataset again"
            )


def _check_tokenizers(config: DataConfig, parts: Sequence[Part]) -> None:
    first = parts[0]
    expected = config.tokenizer_fingerprint or first.manifest.tokenizer.fingerprint
    for part in parts:
        found = part.manifest.tokenizer.fingerprint
        if found != expected:
            source = "data.tokenizer_fingerprint" if config.tokenizer_fingerprint else f"the one of {first.prefix}"
            raise UserError(
                f"{part.prefix} was encoded with the tokenizer {found[:12]}, but {source} is {expected[:12]}; "
                "encode it again with that tokenizer or change the recipe"
            )
