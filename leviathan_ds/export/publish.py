"""Write an export aside, load it back as its users will, compare it with the trainer, and only then publish."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.errors import UserError
from leviathan_ds import run_directory
from leviathan_ds.export.llama import llama_config, to_llama
from leviathan_ds.export.tokenizer import PROBES, check_convertible, check_encoding, write_tokenizer
from leviathan_ds.export.verify import LOGIT_TOLERANCE, limited, max_logit_difference, real_text
from leviathan_ds.trained_model import TrainedModel

CONFIG = "config.json"


class ExportRefused(UserError):
    """The export does not reproduce the trainer; nothing was published."""


@dataclass(frozen=True)
class ExportReport:
    """What was published and how far it is from the trainer."""

    output: Path
    dtype: str
    num_parameters: int
    num_bytes: int
    tokens_compared: int
    positions_compared: int
    max_logit_difference: float


def check_export(trained: TrainedModel, output: Path, overwrite: bool, text: Path | None) -> None:
    """Raise UserError for what can be seen before any work.

    That is an output in the way, an unreadable `text`, a tokenizer or shapes without an exact counterpart.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder for the export")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UserError(f"{output} is not empty; choose another --output or pass --overwrite")
        if not (output / CONFIG).is_file():
            raise UserError(f"{output} is not empty and holds no export; --overwrite replaces only an export")
    check_convertible(trained.tokenizer)
    llama_config(trained, torch.float32)
    real_text(trained, text)


def export_llama(
    trained: TrainedModel, output: Path, *, overwrite: bool = False, text: Path | None = None
) -> ExportReport:
    """Publish a checkpoint as a plain Hugging Face Llama in the folder `output`.

    text: a file to check with, instead of the run's dataset. Notes `hf_max_logit_diff` in the run's summary.
    Needs `topology.initialize(1)`: not done here, since every set of process groups keeps its threads.
    Raises UserError as `check_export` does, and ExportRefused when the written files, loaded back by
    `AutoModelForCausalLM` and `AutoTokenizer`, lack or add a parameter, differ from the trainer's logits by
    more than LOGIT_TOLERANCE at any position, or encode text otherwise. `output` is untouched then.
    """
    check_export(trained, output, overwrite, text)
    texts = limited(real_text(trained, text))
    with _published(output) as folder:
        try:
            llama = to_llama(trained)
        except ValueError as error:  # a recipe that was edited since
            raise ExportRefused(str(error)) from error
        dtype, num_parameters = llama.dtype, llama.num_parameters()
        llama.save_pretrained(folder)
        del llama
        write_tokenizer(trained.tokenizer, folder, trained.recipe.data.sequence_length)
        try:
            tokens_compared = check_encoding(folder, trained.tokenizer, [*PROBES, *texts])
        except ValueError as error:
            raise ExportRefused(str(error)) from error
        difference, positions = max_logit_difference(trained, load_exported(folder), dtype, texts)
        if difference > LOGIT_TOLERANCE:
            raise ExportRefused(
                f"the exported model's logits differ from the trainer's by up to {difference:.3g} "
                f"(allowed: {LOGIT_TOLERANCE:g}); nothing was written to {output}"
            )
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    run_directory.update_summary(trained.run, hf_max_logit_diff=difference)
    return ExportReport(
        output=output,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        num_bytes=num_bytes,
        tokens_compared=tokens_compared,
        positions_compared=positions,
        max_logit_difference=difference,
    )


def load_exported(folder: Path) -> Any:
    """The model in float32 as a user without our code gets it.

    Raises ExportRefused when the files hold more or fewer parameters than the model, or of other shapes.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    llama, loading = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
    if wrong:
        raise ExportRefused(f"from_pretrained does not find the exported parameters in order: {wrong}")
    return llama


@contextmanager
def _published(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name, and the place of an old export, if the block succeeds."""
    output = output.resolve()
    aside = output.with_name(f".{output.name}.partial")
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.iterdir():
            path.chmod(0o644)  # safetensors writes 0600
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
            output.replace(old)
        aside.replace(output)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
