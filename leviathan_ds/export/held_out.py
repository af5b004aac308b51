"""Held-out samples for launchers/evaluate.py, and how often training saw each of their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from megatron.core.datasets.utils import Split

from data_prep.blend import load_blend
from data_prep.errors import UserError
from data_prep.files import dataset_tokenizer_path
from data_prep.tokenizers import Tokenizer, load_tokenizer
from leviathan_ds.config import DataConfig
from leviathan_ds.data.dataset import CheckedData, check_data
from leviathan_ds.data.index import Documents, Part, open_part, shares
from leviathan_ds.evaluation.frequency import deciles, training_frequencies
from leviathan_ds.export.evaluation_options import SplitName
from leviathan_ds.export.loaded import Export
from leviathan_ds.export.tokenizer import encodes_alike

_SIDES: dict[str, Documents] = {"validation": "held_out", "train": "training", "all": "all"}
_BLEND_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class HeldOut:
    """Samples to score, all encoded by one tokenizer.

    Attributes:
        shares: of each dataset in the overall figures: a blend's weights, or the sizes in tokens.
        frequencies: [vocab_size] each id's part of the training tokens.
    """

    samples: dict[str, Any]
    parts: list[Part]
    tokenizer: Tokenizer
    frequencies: np.ndarray

    @property
    def shares(self) -> list[float]:
        return shares(self.parts)

    @property
    def deciles(self) -> np.ndarray:
        return deciles(self.frequencies)


def held_out(data: Sequence[str], split: SplitName, config: DataConfig, train_data: CheckedData) -> HeldOut:
    """The samples of prefixes or of a blend file (.yaml); no process group may exist yet.

    A blend's dataset gives its validation or test prefix where it names one; any other prefix gives the documents
    that training holds out by their index (validation), the others (train), or every document (all).

    Args:
        config: how documents are held out and cut into samples; a tokenizer, if it must be that one.
        train_data: whose token counts make the deciles.

    Raises UserError naming the file.
    """
    parts = _parts(data, split, config)
    tokenizer = parts[0].manifest.tokenizer.fingerprint
    found = train_data.manifests[0].tokenizer.fingerprint
    if found != tokenizer:
        raise UserError(
            f"{train_data.prefixes[0]} was encoded with another tokenizer than {parts[0].prefix}; name the "
            "model's training data in --train_data: their token counts make the deciles"
        )
    samples = {part.name: open_part(config, part, None, Split.valid) for part in parts}
    frequencies = training_frequencies(train_data.train)
    return HeldOut(
        samples,
        parts,
        load_tokenizer(dataset_tokenizer_path(parts[0].prefix, parts[0].manifest.tokenizer.kind)),
        frequencies,
    )


def _parts(data: Sequence[str], split: SplitName, config: DataConfig) -> list[Part]:
    files = [each for each in data if each.endswith(_BLEND_SUFFIXES)]
    if files and len(data) > 1:
        raise UserError("--data takes one blend file, or prefixes: only a blend file says how to weigh them")
    if not files:
        if split == "test":
            raise UserError("--split test is of blend files; else name the test datasets, with --split all")
        checked = check_data(replace(config, prefixes=tuple(data)))
        return [replace(part, documents=_SIDES[split]) for part in checked.train]
    blend = load_blend(files[0])
    parts = []
    for entry in blend.entries:
        own = {"validation": entry.validation, "test": entry.test}.get(split)
        if own is None and (split == "test" or (split == "validation" and blend.has_validation)):
            continue  # as in training: what other domains name is held out, and nothing else
        (part,) = check_data(replace(config, prefixes=(str(own or entry.train),))).train
        side = "all" if blend.has_validation or own else _SIDES[split]
        parts.append(replace(part, name=entry.name, weight=entry.weight, documents=side))
    if not parts:
        raise UserError(f"{files[0]}: no dataset names test data; choose another --split")
    check_data(replace(config, prefixes=tuple(str(part.prefix) for part in parts)))  # of one tokenizer
    return parts


def data_of(names: Sequence[str]) -> DataConfig:
    """A blend file's data, or those of prefixes."""
    if len(names) == 1 and names[0].endswith(_BLEND_SUFFIXES):
        return DataConfig(blend=names[0])
    return DataConfig(tuple(names))


def check_tokenizer(export: Export, data: HeldOut) -> None:
    """Raise UserError where an export does not encode the data's text as the data are encoded."""
    for part in data.parts:
        if not encodes_alike(part.prefix, data.tokenizer, export.tokenizer):
            raise UserError(
                f"{part.prefix} was encoded with another tokenizer than that of {export.folder}; encode it "
                "again with the model's"
            )
