"""A trainer checkpoint in Hugging Face's form: configuration, and weights computed one tensor at a time.

Two formats. "llama": the generator depends on the token id alone, so its V × D table is computed once and becomes
`embed_tokens`; what is left is a Llama that loads without any code of ours. "leviathan": the generator stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from data_prep.errors import UserError
from leviathan_ds.export.names import EMBED_TOKENS, GENERATOR_PREFIX, Correspondence, correspondences
from leviathan_ds.model.generator import SplineGenerator
from leviathan_ds.model.weights import CheckpointWeights
from leviathan_ds.trained_model import TrainedModel

Format = Literal["llama", "leviathan"]
FORMATS: tuple[Format, ...] = ("llama", "leviathan")

_TABLE_ROWS = 8192  # of the generator's table, computed at once


class ExportWeights:
    """A checkpoint's parameters by their Hugging Face names, padding cut off, computed when they are asked for.

    Whatever the checkpoint's tensor-parallel degree. The generator's table is computed in float32.

    Attributes:
        dtype: of the export: what was asked for, else the checkpoint's; of several dtypes float32, which holds
            them all.
        shapes: of every parameter, in the order of the Hugging Face model.

    Raises UserError when the checkpoint's tensors are not the recipe's model.
    """

    def __init__(self, trained: TrainedModel, form: Format, dtype: torch.dtype | None = None) -> None:
        self._model = model = trained.recipe.model
        self._checkpoint = CheckpointWeights(trained.checkpoint)
        dtypes = set(self._checkpoint.dtypes.values())
        self.stored_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.dtype = dtype or self.stored_dtype
        self._sources = self._check(trained)
        own = _meta_shapes(trained, self.dtype, "leviathan" if model.embedding == "leviathan" else "llama")
        wrong = sorted(name for name in self._found | own if self._found.get(name) != own.get(name))
        if wrong:
            raise UserError(
                f"{trained.checkpoint} is not a checkpoint of its run's recipe: {wrong[0]} is "
                f"{self._found.get(wrong[0])}, the recipe says {own.get(wrong[0])}"
            )
        self.shapes = own if form == "leviathan" else _meta_shapes(trained, self.dtype, form)

    def _check(self, trained: TrainedModel) -> dict[str, tuple[Correspondence, int]]:
        """Where each Hugging Face parameter comes from; notes the shapes that the checkpoint's tensors give."""
        table, sources = correspondences(self._model), {}
        self._found: dict[str, list[int]] = {}
        for name, shape in self._checkpoint.shapes.items():
            if name not in table:
                raise UserError(f"{trained.checkpoint} holds {name}, which the run's recipe does not have")
            entry = table[name]
            try:
                parts = entry.split(torch.empty(shape, device="meta"), self._model)
            except RuntimeError:
                raise UserError(
                    f"{trained.checkpoint} is not a checkpoint of its run's recipe: {name} is {shape}"
                ) from None
            for index, (target, part) in enumerate(zip(entry.hugging_face, parts, strict=True)):
                sources[target] = entry, index
                self._found[target] = list(part.shape)
        return sources

    @property
    def computes_table(self) -> bool:
        """Whether embed_tokens is the generator's table, which no checkpoint holds."""
        return EMBED_TOKENS in self.shapes and EMBED_TOKENS not in self._sources

    @property
    def rounds(self) -> bool:
        """Whether the export's numbers are roundings of the trainer's."""
        holds = torch.promote_types(self.stored_dtype, self.dtype) == self.dtype
        return not holds or (self.computes_table and self.dtype != torch.float32)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """A parameter in `dtype`, in parts along its first dimension."""
        if name == EMBED_TOKENS and self.computes_table:
            for ids in torch.arange(self._model.vocabulary).split(_TABLE_ROWS):
                yield self._generator.table(ids).to(self.dtype)
            return
        entry, index = self._sources[name]
        yield entry.split(self._checkpoint.tensor(entry.megatron), self._model)[index].to(self.dtype)

    @cached_property
    def _generator(self) -> SplineGenerator:
        generator = SplineGenerator(self._model.vocabulary, self._model.hidden_size, self._model.generator)
        names = [name for name in self._checkpoint.shapes if name.startswith(GENERATOR_PREFIX)]
        generator.load_state_dict(  # copies into float32 parameters
            {name.removeprefix(GENERATOR_PREFIX): self._checkpoint.tensor(name) for name in names}
        )
        return generator


def to_llama(trained: TrainedModel) -> Any:
    """The checkpoint's model as a `transformers.LlamaForCausalLM` on the CPU, in evaluation mode.

    Weights keep the checkpoint's dtype. Raises UserError as `ExportWeights` and `hugging_face_config` do.
    """
    from transformers import LlamaForCausalLM

    weights = ExportWeights(trained, "llama")
    llama = LlamaForCausalLM.from_pretrained(
        None,
        config=hugging_face_config(trained, "llama", weights.dtype),
        state_dict={name: torch.cat(list(weights.pieces(name))) for name in weights.shapes},
        dtype=weights.dtype,
    )
    llama.generation_config = generation_config(trained)
    return llama.eval()


def generation_config(trained: TrainedModel) -> Any:
    """The `transformers.GenerationConfig`: ids, and no row beyond the tokenizer's is ever drawn."""
    from transformers import GenerationConfig

    eod = trained.tokenizer.eod_id
    beyond_tokenizer = list(range(trained.tokenizer.vocab_size, trained.recipe.model.vocabulary))
    return GenerationConfig(
        bos_token_id=eod, eos_token_id=eod, pad_token_id=eod, suppress_tokens=beyond_tokenizer or None
    )


def hugging_face_config(trained: TrainedModel, form: Format, dtype: torch.dtype) -> Any:
    """The `transformers.LlamaConfig` or `LeviathanConfig` of a recipe.

    Both bos and eos are the end-of-document id: in training it stood before and after every document.
    Raises UserError for a head size that no Llama configuration expresses, and for a dense model as "leviathan".
    """
    from transformers import LlamaConfig

    from leviathan_ds.hf import LeviathanConfig

    model, tokenizer = trained.recipe.model, trained.tokenizer
    if model.hidden_size % model.num_attention_heads:
        raise UserError(
            f"model.hidden_size = {model.hidden_size} is no multiple of model.num_attention_heads = "
            f"{model.num_attention_heads}, which Hugging Face's Llama requires; it cannot be exported"
        )
    if form == "leviathan" and model.embedding != "leviathan":
        raise UserError(f"a {model.embedding} model has no generator to keep; export it with --format llama")
    options: dict[str, Any] = {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": trained.recipe.data.sequence_length,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.embedding == "dense_tied",
        "bos_token_id": tokenizer.eod_id,
        "eos_token_id": tokenizer.eod_id,
        "pad_token_id": tokenizer.pad_id,
        "dtype": dtype,
    }
    if form == "llama":
        return LlamaConfig(architectures=["LlamaForCausalLM"], **options)
    options["auto_map"] = {
        "AutoConfig": "configuration_leviathan.LeviathanConfig",
        "AutoModel": "modeling_leviathan.LeviathanModel",
        "AutoModelForCausalLM": "modeling_leviathan.LeviathanForCausalLM",
    }
    return LeviathanConfig(
        architectures=["LeviathanForCausalLM"],
        embedding_generator=asdict(model.generator),
        **options,
    )


def empty_model(config: Any) -> Any:
    """The Hugging Face model of a configuration without any weights (on torch's meta device)."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _meta_shapes(trained: TrainedModel, dtype: torch.dtype, form: Format) -> dict[str, list[int]]:
    model = empty_model(hugging_face_config(trained, form, dtype))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}
