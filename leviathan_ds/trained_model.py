"""A trained model on the disk: a checkpoint with what its run says of it, and the model built from it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from data_prep.tokenizers import Tokenizer, load_tokenizer
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import ParallelConfig, Recipe
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.model.weights import SHARD_FILES, load_full_weights
from leviathan_ds.parallel import topology


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint with what its run says of it; `recipe.model.vocab_size` is filled in."""

    checkpoint: Path
    recipe: Recipe
    tokenizer: Tokenizer

    @property
    def run(self) -> Path:
        return run_directory.run_of(self.checkpoint)

    def build(self) -> LanguageModel:
        """The trainer's own model on this process's device, float32, in evaluation mode.

        Of any checkpoint's parallel layout, in the tensor-parallel size of `topology.initialize`.
        """
        parallel = ParallelConfig(topology.tensor_parallel_size())
        model = LanguageModel(
            self.recipe.model, parallel, loss_chunk_tokens=self.recipe.training.loss_chunk_tokens
        )
        load_full_weights(model, self.checkpoint)
        return model.to(topology.device()).eval()


def find_trained_model(path: Path) -> TrainedModel:
    """What a user means by a run directory or by one of its checkpoints.

    Raises UserError when there is no good checkpoint, no readable recipe or no tokenizer.
    """
    checkpoint = run_directory.find_checkpoint(path, _damage)
    run = run_directory.run_of(checkpoint)
    recipe = recipes.load(run / run_directory.RECIPE)
    tokenizer = load_tokenizer(run_directory.tokenizer_of(run) or run / run_directory.TOKENIZERS["sentencepiece"])
    return TrainedModel(checkpoint, recipe.with_vocabulary(tokenizer.vocab_size), tokenizer)


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with the weights in a complete checkpoint; the recipe says how closely to look."""
    recipe = recipes.load(run_directory.run_of(checkpoint) / run_directory.RECIPE)
    if recipe.run.verify_checkpoints == "sizes":
        return None
    return run_directory.damage(checkpoint, lambda names: fnmatch.filter(names, SHARD_FILES))
