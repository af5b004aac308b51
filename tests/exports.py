"""Runs with one checkpoint of random weights, to export: every test of the Hugging Face side begins with one."""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import DataConfig, GeneratorConfig, ModelConfig, ParallelConfig, Recipe, TrainingConfig
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.model.weights import load_full_weights, shard_file
from leviathan_ds.parallel import registry
from leviathan_ds.trained_model import find_trained_model

VOCAB_SIZE = 509


GENERATOR = GeneratorConfig(num_coordinates=2, seed_size=8, num_heads=2, num_knots=6, rank=4, out_proj_std=1.0)


# Nothing at its default or at a value that hides a mistake: large weights, an odd eps, another rotary base.
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=96,
    rotary_base=3000.0,
    norm_epsilon=1e-3,
    init_method_std=0.2,
    generator=GENERATOR,
)


TRAINER_STATE = run_directory.TrainerState(
    step=100, consumed_samples=6400, layout={}, data_fingerprints=["0" * 64], wandb_id=None
)


def make_run(
    run: Path,
    sample_tokenizer: Path,
    model: ModelConfig = MODEL,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype = torch.float32,
    data: DataConfig | None = None,
) -> Path:
    """A run directory with one checkpoint of random weights, the same for every tensor-parallel size."""
    recipe = Recipe(model=model, data=data or DataConfig(sequence_length=64), training=TrainingConfig())
    language_model = LanguageModel(model, ParallelConfig())
    initialize_weights(language_model, model, seed=7)
    generator = torch.Generator().manual_seed(7)
    checkpoint = run / run_directory.CHECKPOINTS / run_directory.checkpoint_name(100)
    checkpoint.mkdir(parents=True)
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(tensor_parallel_size)]
    for name, parameter, rule in registry.named_rules(language_model):
        full = parameter.detach().to(dtype)
        if name.endswith("layernorm.weight"):  # constant ones would hide a norm in another's place
            full = (0.5 + torch.rand(full.shape, generator=generator)).to(dtype)
        if rule.is_vocabulary:
            rows = model.padded_vocab_size(tensor_parallel_size)
            true = model.vocabulary
            full = torch.cat([full[:true], full.new_full((rows - true, full.shape[1]), 9.0)])
        for rank, shard in enumerate(shards):
            shard[name] = rule.shard(full, rank, tensor_parallel_size).contiguous()
    for rank, shard in enumerate(shards):
        save_file(shard, checkpoint / shard_file(rank))
    (checkpoint / run_directory.TRAINER_STATE).write_text(TRAINER_STATE.to_json())
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    (checkpoint / run_directory.MANIFEST).write_text(json.dumps({"bytes": sizes}))
    (run / run_directory.RECIPE).write_text(recipes.to_yaml(recipe))
    (run / run_directory.TOKENIZERS["sentencepiece"]).write_bytes(sample_tokenizer.read_bytes())
    return run


def trainer_model(run: Path) -> LanguageModel:
    trained = find_trained_model(run)
    model = LanguageModel(trained.recipe.model, ParallelConfig())
    load_full_weights(model, trained.checkpoint)
    return model.eval().requires_grad_(False)


def trainer_logits(run: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return trainer_model(run)(tokens)


SHAPES = {
    "leviathan": MODEL,
    "residual, product not centred": dataclasses.replace(
        MODEL, generator=dataclasses.replace(GENERATOR, residual=True, center_product=False)
    ),
    "dense tied": dataclasses.replace(MODEL, embedding="dense_tied"),
    "dense untied": dataclasses.replace(MODEL, embedding="dense_untied"),
    "a query group for each head": dataclasses.replace(MODEL, num_query_groups=None),
    "one query group": dataclasses.replace(MODEL, num_query_groups=1),
    "heads wider than the model": dataclasses.replace(MODEL, kv_channels=24),
}
