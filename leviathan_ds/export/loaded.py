"""A model that a user names by a path: a run or checkpoint of the trainer, or an export in Hugging Face's form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_prep.errors import UserError, one_line
from data_prep.tokenizers import Tokenizer
from leviathan_ds.evaluation.scores import TokenLosses
from leviathan_ds.export.llama import to_llama
from leviathan_ds.parallel import topology
from leviathan_ds.trained_model import TrainedModel, find_trained_model

_CONFIG = "config.json"


class ExportTokenizer:
    """An export's tokenizer, as far as text goes in and out; the names of `data_prep.tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eod_id: int = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)  # no warning of long texts

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


@dataclass(frozen=True)
class Export:
    """A folder that `transformers` loads."""

    folder: Path
    config: Any  # transformers' PreTrainedConfig
    trust_remote_code: bool

    @property
    def sequence_length(self) -> int:
        """The training length."""
        return self.config.max_position_embeddings

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size

    @cached_property
    def tokenizer(self) -> ExportTokenizer:
        """Raises UserError when the folder holds none."""
        from transformers import AutoTokenizer

        return ExportTokenizer(_loaded(self.folder, AutoTokenizer, trust_remote_code=self.trust_remote_code))

    def build(self, dtype: torch.dtype | str = "auto") -> Any:
        """The model on the CPU, in evaluation mode. Raises UserError when its files are not whole."""
        from transformers import AutoModelForCausalLM

        options = {"dtype": dtype, "trust_remote_code": self.trust_remote_code}
        return _loaded(self.folder, AutoModelForCausalLM, **options).eval()


def find_model(path: Path, trust_remote_code: bool = False) -> TrainedModel | Export:
    """What is in a folder: an export by its config.json, else a run or one of its checkpoints.

    trust_remote_code: let an export bring its own modeling file. Raises UserError for anything else.
    """
    if not (path / _CONFIG).is_file():
        return find_trained_model(path)
    from transformers import AutoConfig

    import leviathan_ds.hf  # noqa: F401  so that the leviathan format needs no code from the folder

    return Export(path, _loaded(path, AutoConfig, trust_remote_code=trust_remote_code), trust_remote_code)


def load_for_text(path: Path, trust_remote_code: bool = False) -> tuple[Any, Tokenizer | ExportTokenizer]:
    """A model that `transformers` generates with, on this process's device in the stored dtype, and its tokenizer.

    Of a checkpoint of any tensor-parallel size. Raises UserError as `find_model`, `to_llama` and `Export`.
    """
    model = find_model(path, trust_remote_code)
    llama = model.build() if isinstance(model, Export) else to_llama(model)
    return llama.to(topology.device()), model.tokenizer


def _loaded(folder: Path, auto_class: Any, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # safetensors', tokenizers' and remote code's own kinds among them
        hint = "; pass --trust_remote_code to run the code in it" if "trust_remote_code" in str(error) else ""
        raise UserError(f"{folder} cannot be loaded: {one_line(error)[:300]}{hint}") from error


def export_losses(model: Any) -> TokenLosses:
    """Of a model of `Export.build`. Logits exist for one sequence at a time: with 200k ids they are large."""
    head = model.get_output_embeddings()

    def losses(batch: Any) -> torch.Tensor:
        # Positions that begin anew keep attention within documents, as in training with data.reset_attention_mask.
        positions = None if batch.cu_seqlens is None else _positions(batch.cu_seqlens).view_as(batch.tokens)
        hidden = model.base_model(
            input_ids=batch.tokens, position_ids=positions, use_cache=False
        ).last_hidden_state
        rows = zip(hidden, batch.labels, strict=True)
        return torch.stack(
            [nn.functional.cross_entropy(head(row).float(), labels, reduction="none") for row, labels in rows]
        )

    return losses


def _positions(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[n] of each token in its document."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) - starts.repeat_interleave(lengths)
