"""A Hugging Face model of Llama's architecture, or a Leviathan export, as the beginning of a run.

The run directory holds the weights as a checkpoint of step 0, without optimizer states, that `pretrain` starts
from. Weights pass through memory one parameter at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from data_prep.errors import UserError, one_line
from data_prep.files import check_named
from data_prep.manifest import load_manifest
from data_prep.tokenizers import Tokenizer, load_tokenizer
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import DataConfig, GeneratorConfig, ModelConfig, ParallelConfig, Recipe, TrainingConfig
from leviathan_ds.export.fit import DEFAULT_FIT, Fit, FitOptions, fit_generator
from leviathan_ds.export.llama import empty_model
from leviathan_ds.export.names import EMBED_TOKENS, GENERATOR_PREFIX, LM_HEAD, Correspondence, correspondences
from leviathan_ds.export.publish import published
from leviathan_ds.export.tokenizer import TOKENIZER_JSON, TRAINING_TOKENIZERS, encodes_alike
from leviathan_ds.export.verify import exported_files
from leviathan_ds.hf import LeviathanConfig
from leviathan_ds.model.tensor_files import TensorFiles, write_tensors
from leviathan_ds.model.weights import shard_file
from leviathan_ds.parallel import registry

Embedding = Literal["dense", "leviathan"]

_TOKENIZER_FILES = (*TRAINING_TOKENIZERS.values(), TOKENIZER_JSON)  # the first that is there
_COMPUTED = "rotary_emb.inv_freq"  # stored by old versions of transformers, computed by all


@dataclass(frozen=True)
class Imported:
    """A run directory that was written, and how well a fitted generator reproduces the source's table."""

    checkpoint: Path
    recipe: Recipe
    fit: Fit | None


@dataclass(frozen=True)
class Source:
    """A folder with a model in Hugging Face's form, checked: the trainer can express it."""

    folder: Path
    config: Any  # transformers' LlamaConfig or our LeviathanConfig
    files: TensorFiles
    tokenizer: Tokenizer

    @property
    def model(self) -> ModelConfig:
        """The same model for the trainer."""
        config, rope = self.config, self.config.rope_parameters
        if isinstance(config, LeviathanConfig):
            kind, generator = "leviathan", GeneratorConfig(**(config.embedding_generator or {}))
        else:
            kind, generator = "dense_tied" if config.tie_word_embeddings else "dense_untied", GeneratorConfig()
        return ModelConfig(
            vocab_size=config.vocab_size,
            embedding=kind,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            ffn_hidden_size=config.intermediate_size,
            kv_channels=config.head_dim,
            rotary_base=float(rope["rope_theta"]),
            norm_epsilon=config.rms_norm_eps,
            init_method_std=config.initializer_range,
            generator=generator,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the trainer's weights: the source's, but float32 for float16 or a mixture, which it holds."""
        dtypes = set(self.files.dtypes.values())
        return torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32


def open_source(folder: Path, data: Path | None) -> Source:
    """Read what a folder holds, except its weights.

    data: prefix of a dataset whose tokenizer is the model's; None: the tokenizer lies in the folder.

    Raises UserError naming what the trainer does not have: another architecture, biases, a scaled rope, another
    activation; weights that are not safetensors, or not those of the configuration; no tokenizer.
    """
    config = _config(folder)
    files = exported_files(folder)
    expected = {name: list(p.shape) for name, p in empty_model(config).named_parameters()}
    for name, shape in expected.items():
        if files.shapes.get(name) != shape:
            raise UserError(f"{folder}: {name} is {files.shapes.get(name)}, config.json says {shape}")
    for name in files.shapes.keys() - expected.keys():
        if not name.endswith(_COMPUTED) and not (name == LM_HEAD and config.tie_word_embeddings):
            raise UserError(f"{folder} holds {name}, which a Llama of its config.json does not have")
    return Source(folder, config, files, _tokenizer(folder, data))


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; name the folder of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder}/config.json: {one_line(error)}") from None
    if config.model_type not in ("llama", "leviathan"):
        raise UserError(f"{folder} is a {config.model_type}; only llama and leviathan can be imported")
    rope = config.rope_parameters
    for problem, what in (
        (config.attention_bias, "attention_bias: the trainer's attention has no biases"),
        (config.mlp_bias, "mlp_bias: the trainer's MLP has no biases"),
        (config.hidden_act != "silu", f"hidden_act {config.hidden_act}: the trainer's MLP has silu"),
        (config.attention_dropout, f"attention_dropout {config.attention_dropout}: the trainer has none"),
        (
            rope.get("rope_type", "default") != "default",
            f"rope_type {rope.get('rope_type')}: the trainer does not scale its rotary embedding",
        ),
        (
            rope.get("partial_rotary_factor", 1.0) != 1.0,
            "partial_rotary_factor: the trainer rotates whole heads",
        ),
        (getattr(config, "quantization_config", None), "quantization_config: the trainer wants plain weights"),
    ):
        if problem:
            raise UserError(f"{folder}/config.json: {what}; this model cannot be imported")
    return config


def _tokenizer(folder: Path, data: Path | None) -> Tokenizer:
    own = next((folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()), None)
    if data is None:
        if own is None:
            raise UserError(
                f"{folder} holds none of {', '.join(_TOKENIZER_FILES)}; pass --data with a dataset's prefix"
            )
        return load_tokenizer(own)
    tokenizer = load_tokenizer(data.with_name(load_manifest(data).tokenizer.file))
    try:
        models = tokenizer if own is None else load_tokenizer(own)
    except UserError:  # of a kind that cannot be read: --data is the way out
        return tokenizer
    if not encodes_alike(data, tokenizer, models):
        raise UserError(
            f"--data {data} was encoded with another tokenizer than {own}; prepare it again with the model's"
        )
    return tokenizer


def plan_recipe(
    source: Source,
    base: Recipe | None,
    data: Path | None,
    embedding: Embedding | None = None,
    tensor_parallel_size: int = 1,
) -> Recipe:
    """The run's recipe: the source's model, everything else from `base` or the defaults.

    embedding: None: as the source has it. Raises UserError for a degree that does not divide the model, for a
    tokenizer larger than the vocabulary, and for a Leviathan model to be imported as a dense one.
    """
    model = source.model
    if base is None:
        base = Recipe(
            data=DataConfig(sequence_length=source.config.max_position_embeddings),
            training=TrainingConfig(precision="bf16" if source.dtype == torch.bfloat16 else "fp32"),
        )
    if model.embedding == "leviathan":
        if embedding == "dense":
            raise UserError(
                f"{source.folder} is a Leviathan model; to train its table write it by export_hf --format llama "
                "and import that"
            )
    elif embedding == "leviathan":
        model = dataclasses.replace(model, embedding="leviathan", generator=base.model.generator)
    return dataclasses.replace(
        base,
        model=model,
        parallel=ParallelConfig(tensor_model_parallel_size=tensor_parallel_size),
        data=dataclasses.replace(
            base.data,
            prefixes=base.data.prefixes if data is None else (str(data),),
            tokenizer_fingerprint=source.tokenizer.fingerprint,
        ),
    ).with_vocabulary(source.tokenizer.vocab_size)


def write_run(source: Source, recipe: Recipe, output: Path, fit_options: FitOptions = DEFAULT_FIT) -> Imported:
    """Write a run directory that begins with the source's weights.

    A Leviathan recipe of a source with a table has its generator fitted to it, which needs
    `topology.initialize(1)`. Written aside and renamed. Raises UserError when the output is there already.
    """
    check_output(output)
    fitted = None
    model = recipe.model
    if model.embedding == "leviathan" and EMBED_TOKENS in source.files.shapes:
        fitted = fit_generator(source.files.tensor(EMBED_TOKENS).float(), model, fit_options)
    with published(output) as run:
        name = run_directory.checkpoint_name(0)
        checkpoint = run / run_directory.CHECKPOINTS / name
        checkpoint.mkdir(parents=True)
        _write_weights(source, recipe, checkpoint, fitted)
        state = run_directory.TrainerState(
            step=0,
            consumed_samples=0,
            layout={"precision": recipe.training.precision},
            data_fingerprints=[],
            wandb_id=None,
            imported_from=source.folder.resolve().name,
        )
        run_directory.write_text(checkpoint / run_directory.TRAINER_STATE, state.to_json())
        for folder in (run, checkpoint):
            run_directory.write_text(folder / run_directory.RECIPE, recipes.to_yaml(recipe))
        (run / run_directory.TOKENIZERS[source.tokenizer.kind]).write_bytes(source.tokenizer.content)
        files = {path.name: (path.stat().st_size, run_directory.checksum(path)) for path in checkpoint.iterdir()}
        run_directory.write_manifest(checkpoint, files)
    return Imported(output / run_directory.CHECKPOINTS / name, recipe, fitted)


def check_output(output: Path) -> None:
    """Raise UserError for a run directory that cannot be written anew."""
    check_named(output, "--output")
    if output.exists():
        raise UserError(f"--output {output} exists; choose another run directory")


def _write_weights(source: Source, recipe: Recipe, checkpoint: Path, fitted: Fit | None) -> None:
    model, size = recipe.model, recipe.parallel.tensor_model_parallel_size
    table = correspondences(model)
    full = _fitted_or_read(source, model, fitted)
    for rank in range(size):

        def shard(name: str, rank: int = rank) -> list[Tensor]:
            return [_shard(full(table[name]), name, model, rank, size)]

        shapes = {
            name: _shard(_meta(entry, source, model, fitted), name, model, rank, size).shape
            for name, entry in table.items()
        }
        write_tensors(checkpoint / shard_file(rank), shapes, dict.fromkeys(shapes, source.dtype), shard)


def _fitted_or_read(source: Source, model: ModelConfig, fitted: Fit | None) -> Callable[[Correspondence], Tensor]:
    def full(entry: Correspondence) -> Tensor:
        if fitted is not None and entry.megatron.startswith(GENERATOR_PREFIX):
            return fitted.generator[entry.megatron.removeprefix(GENERATOR_PREFIX)]
        return entry.join([source.files.tensor(_stored(name, source)) for name in entry.hugging_face], model)

    return full


def _meta(entry: Correspondence, source: Source, model: ModelConfig, fitted: Fit | None) -> Tensor:
    """An empty tensor of a full parameter's shape."""
    if fitted is not None and entry.megatron.startswith(GENERATOR_PREFIX):
        return fitted.generator[entry.megatron.removeprefix(GENERATOR_PREFIX)].to("meta")
    shapes = [source.files.shapes[_stored(name, source)] for name in entry.hugging_face]
    return entry.join([torch.empty(shape, device="meta") for shape in shapes], model)


def _stored(name: str, source: Source) -> str:
    """Where a tied source, which a Leviathan run unties, has its head."""
    return EMBED_TOKENS if name == LM_HEAD and source.config.tie_word_embeddings else name


def _shard(full: Tensor, name: str, model: ModelConfig, rank: int, size: int) -> Tensor:
    rule = registry.rule_for(name)
    if rule.is_vocabulary:
        full = rule.padded(full, [model.padded_vocab_size(size), full.shape[1]])
    return rule.shard(full, rank, size)
