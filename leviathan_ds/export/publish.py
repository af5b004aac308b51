"""Write an export aside, compare what was written with the trainer, and only then publish it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from data_prep.errors import UserError
from leviathan_ds import hf, run_directory
from leviathan_ds.export.llama import ExportWeights, Format, generation_config, hugging_face_config
from leviathan_ds.export.model_card import MODEL_CARD, model_card
from leviathan_ds.export.tokenizer import PROBES, check_convertible, check_encoding, write_tokenizer
from leviathan_ds.export.verify import (
    KL_TOLERANCE,
    LOGIT_TOLERANCE,
    ROUNDING_KL_TOLERANCE,
    Parity,
    check_parameters,
    limited,
    parity,
    real_text,
)
from leviathan_ds.model.tensor_files import write_tensors
from leviathan_ds.trained_model import TrainedModel

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


class ExportRefused(ValueError):
    """The export does not reproduce the trainer; nothing was published."""


@dataclass(frozen=True)
class ExportReport:
    """What was published and how far it is from the trainer."""

    output: Path
    form: Format
    dtype: str
    num_parameters: int
    num_bytes: int
    tokens_compared: int
    parity: Parity
    rounding: Parity | None
    """Against the unrounded trainer, where the export's numbers are roundings of the trainer's."""


def check_export(
    trained: TrainedModel, output: Path, overwrite: bool, text: Path | None, form: Format, max_shard_size: str
) -> None:
    """Raise UserError for what can be seen before any work.

    That is an output in the way, an unreadable `text`, a tokenizer or shapes without an exact counterpart, a
    checkpoint of another recipe, a shard size that is none.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder for the export")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UserError(f"{output} is not empty; choose another --output or pass --overwrite")
        if not (output / CONFIG).is_file():
            raise UserError(f"{output} is not empty and holds no export; --overwrite replaces only an export")
    check_convertible(trained.tokenizer)
    hugging_face_config(trained, form, torch.float32)
    real_text(trained, text)
    _plan({}, torch.float32, max_shard_size)


def export(
    trained: TrainedModel,
    output: Path,
    *,
    form: Format = "llama",
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    text: Path | None = None,
) -> ExportReport:
    """Publish a checkpoint in the folder `output`, as a plain Hugging Face Llama or with its generator.

    Args:
        dtype: None: the checkpoint's.
        max_shard_size: of one safetensors file, unless a single tensor is larger.
        text: a file to check with, instead of the run's dataset.

    Notes `hf_max_logit_diff` and `hf_kl_divergence` in the run's summary. Needs `topology.initialize(1)`: not done
    here, since every set of process groups keeps its threads. Raises UserError as `check_export` does, and
    ExportRefused when the written files lack or add a parameter, encode text otherwise than the trainer, or give
    logits that differ from the trainer's beyond the limits of export/verify.py. `output` is untouched then.
    """
    check_export(trained, output, overwrite, text, form, max_shard_size)
    texts = limited(real_text(trained, text))
    with published(output) as folder:
        try:
            weights = ExportWeights(trained, form, dtype)
            write_weights(folder, weights, max_shard_size)
            config = hugging_face_config(trained, form, weights.dtype)
            config.save_pretrained(folder)
            generation_config(trained).save_pretrained(folder)
            if form == "leviathan":
                _copy_code(folder)
            check_parameters(folder, config)
            write_tokenizer(trained.tokenizer, folder, trained.recipe.data.sequence_length)
            tokens_compared = check_encoding(folder, trained.tokenizer, [*PROBES, *texts])
        except UserError as error:  # a recipe that was edited since
            raise ExportRefused(str(error)) from error
        same, rounding = parity(trained, weights, folder, texts)
        _require_parity(same, rounding, output)
        dtype_name = str(weights.dtype).removeprefix("torch.")
        card = model_card(trained, form, output.resolve().name, dtype_name, same, rounding)
        (folder / MODEL_CARD).write_text(card)
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    found = {"hf_max_logit_diff": same.max_logit_difference, "hf_kl_divergence": same.kl_divergence}
    if rounding is not None:
        found |= {"hf_rounding_kl_divergence": rounding.kl_divergence}
    run_directory.update_summary(trained.run, **found)
    return ExportReport(
        output=output,
        form=form,
        dtype=dtype_name,
        num_parameters=sum(map(math.prod, weights.shapes.values())),
        num_bytes=num_bytes,
        tokens_compared=tokens_compared,
        parity=same,
        rounding=rounding,
    )


def write_weights(folder: Path, weights: ExportWeights, max_shard_size: str) -> None:
    """Write model.safetensors, or its shards with their index, one piece of one tensor in memory at a time."""
    plan = _plan(weights.shapes, weights.dtype, max_shard_size)
    for name, tensors in plan.filename_to_tensors.items():
        shapes = {tensor: weights.shapes[tensor] for tensor in tensors}
        write_tensors(folder / name, shapes, dict.fromkeys(shapes, weights.dtype), weights.pieces)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _plan(shapes: dict[str, list[int]], dtype: torch.dtype, max_shard_size: str) -> Any:
    """Which tensors come into which file. Raises UserError for a size that is none."""
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    try:
        plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
        if max_shard_size.lstrip().startswith(("-", "0")):
            raise ValueError("not above zero")
        return plan
    except ValueError as error:
        raise UserError(f"--max_shard_size {max_shard_size!r}: {error}; give one such as 5GB or 500MB") from None


def _copy_code(folder: Path) -> None:
    for path in Path(hf.__file__).parent.glob("*_leviathan.py"):
        shutil.copyfile(path, folder / path.name)


def _require_parity(same: Parity, rounding: Parity | None, output: Path) -> None:
    if not same.holds(LOGIT_TOLERANCE, KL_TOLERANCE):
        raise ExportRefused(
            f"the exported model's logits differ from the trainer's by up to {same.max_logit_difference:.3g} "
            f"(allowed: {LOGIT_TOLERANCE:g}), KL divergence {same.kl_divergence:.3g} (allowed: {KL_TOLERANCE:g}); "
            f"nothing was written to {output}"
        )
    if rounding is not None and not rounding.holds(math.inf, ROUNDING_KL_TOLERANCE):
        raise ExportRefused(
            f"rounding costs a KL divergence of {rounding.kl_divergence:.3g} nats (allowed: "
            f"{ROUNDING_KL_TOLERANCE:g}); export with a wider --dtype; nothing was written to {output}"
        )


@contextmanager
def published(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name, and the place of an old export, if the block succeeds."""
    output = output.resolve()
    aside = output.with_name(f".{output.name}.partial")
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.rglob("*"):
            if path.is_file():
                path.chmod(0o644)
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
            output.replace(old)
        aside.replace(output)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
