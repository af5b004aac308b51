"""Configuration of a Leviathan language model: a Llama whose input embeddings a generator computes."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

_GENERATOR = {
    "num_coordinates": 3,
    "seed_size": 128,
    "num_heads": 8,
    "num_knots": 16,
    "rank": 64,
    "normalize_basis": True,
    "sigmoid_divisor": 2.0,
    "residual": False,
    "center_product": True,
    "codebook_std": 1.0,
    "seed_proj_std": None,
    "spline_delta_std": 0.1,
    "out_proj_std": None,
}


@strict
class LeviathanConfig(LlamaConfig):
    """`LlamaConfig` and `embedding_generator`, the sizes, switches and initial scales of the embedding generator.

    Its keys that are left out take their defaults; an unknown one is a ValueError, as is a head tied to a table
    (there is none).
    """

    model_type = "leviathan"

    embedding_generator: Any = None  # a dict

    def __post_init__(self, **kwargs):
        given = self.embedding_generator or {}
        if unknown := given.keys() - _GENERATOR.keys():
            raise ValueError(f"unknown keys of embedding_generator: {', '.join(sorted(unknown))}")
        self.embedding_generator = _GENERATOR | given
        if self.tie_word_embeddings:
            raise ValueError("a Leviathan model has no table to tie its head to; leave tie_word_embeddings off")
        super().__post_init__(**kwargs)


__all__ = ["LeviathanConfig"]
