"""A trainer checkpoint as a plain `LlamaForCausalLM` in memory.

The generator depends on the token id alone, so its V × D table is computed once and becomes `embed_tokens`:
what is left is a Llama that loads without any code of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from data_prep.errors import UserError
from leviathan_ds.config import ModelConfig
from leviathan_ds.export.names import EMBED_TOKENS, GENERATOR_PREFIX, correspondences
from leviathan_ds.model.generator import SplineGenerator
from leviathan_ds.model.weights import full_weights
from leviathan_ds.trained_model import TrainedModel


def to_llama(trained: TrainedModel) -> Any:
    """The checkpoint's model as a `transformers.LlamaForCausalLM` on the CPU, in evaluation mode.

    Weights keep the checkpoint's dtype, whatever its tensor-parallel degree; the generator's table is computed
    in float32 and then rounded to it. Raises UserError when the checkpoint's tensors are not the recipe's
    model, and for shapes that Llama does not have.
    """
    from transformers import GenerationConfig, LlamaForCausalLM

    model = trained.recipe.model
    weights = llama_weights(trained.checkpoint, model)
    dtype = next(iter(weights.values())).dtype
    with torch.device("meta"):
        llama = LlamaForCausalLM(llama_config(trained, dtype))
    expected = {name: tuple(parameter.shape) for name, parameter in llama.named_parameters()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise UserError(
            f"{trained.checkpoint} is not a checkpoint of its run's recipe: {wrong[0]} is {found.get(wrong[0])}, "
            f"the recipe says {expected.get(wrong[0])}"
        )
    llama = LlamaForCausalLM.from_pretrained(None, config=llama.config, state_dict=weights, dtype=dtype)
    eod = trained.tokenizer.eod_id
    beyond_tokenizer = list(range(trained.tokenizer.vocab_size, model.vocabulary))
    llama.generation_config = GenerationConfig(
        bos_token_id=eod, eos_token_id=eod, pad_token_id=eod, suppress_tokens=beyond_tokenizer or None
    )
    return llama.eval()


def llama_config(trained: TrainedModel, dtype: torch.dtype) -> Any:
    """The `transformers.LlamaConfig` of a recipe.

    Both bos and eos are the end-of-document id: in training it stood before and after every document.
    Raises UserError for a head size that no Llama configuration expresses.
    """
    from transformers import LlamaConfig

    model, tokenizer = trained.recipe.model, trained.tokenizer
    if model.hidden_size % model.num_attention_heads:
        raise UserError(
            f"model.hidden_size = {model.hidden_size} is no multiple of model.num_attention_heads = "
            f"{model.num_attention_heads}, which Hugging Face's Llama requires; it cannot be exported"
        )
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=model.vocabulary,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.query_groups,
        head_dim=model.head_size,
        hidden_act="silu",
        max_position_embeddings=trained.recipe.data.sequence_length,
        initializer_range=model.init_method_std,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=model.embedding == "dense_tied",
        bos_token_id=tokenizer.eod_id,
        eos_token_id=tokenizer.eod_id,
        pad_token_id=tokenizer.pad_id,
        dtype=dtype,
    )


def llama_weights(checkpoint: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Every parameter under its Hugging Face name, padding cut off, all in the checkpoint's dtype.

    A checkpoint of several dtypes comes out in float32, which holds them all.

    Raises UserError for a parameter that the recipe's model does not have.
    """
    table, generator, weights, dtypes = correspondences(model), {}, {}, set()
    for name, full in full_weights(checkpoint):
        dtypes.add(full.dtype)
        if model.embedding == "leviathan" and name.startswith(GENERATOR_PREFIX):
            generator[name.removeprefix(GENERATOR_PREFIX)] = full
        elif name in table:
            entry = table[name]
            weights |= zip(entry.hugging_face, entry.split(full, model), strict=True)
        else:
            raise UserError(f"{checkpoint} holds {name}, which the run's recipe does not have")
    if generator:
        weights[EMBED_TOKENS] = embedding_table(generator, model)
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return {name: weight.to(dtype).contiguous() for name, weight in weights.items()}


def embedding_table(generator_weights: dict[str, Tensor], model: ModelConfig) -> Float[Tensor, "V D"]:
    """The generator's table in float32, from its parameters by their names inside the generator."""
    generator = SplineGenerator(model.vocabulary, model.hidden_size, model.generator)
    try:
        generator.load_state_dict(generator_weights)  # copies into float32 parameters
    except RuntimeError as error:
        raise UserError(f"the generator's weights are not the recipe's: {' '.join(str(error).split())}") from None
    return generator.table()
