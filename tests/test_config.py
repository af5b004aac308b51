"""Exact sizes, and every value that cannot work refused by the name of its key."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest

from data_prep.errors import UserError
from leviathan_ds import config
from leviathan_ds.config import (
    DataConfig,
    EvaluationConfig,
    FaultsConfig,
    GeneratorConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    TrainingConfig,
    integer_root,
)


@pytest.mark.parametrize(
    ("value", "degree", "root"),
    [
        (243, 5, 3),
        (244, 5, 4),
        (200_376, 3, 59),
        (59**3, 3, 59),
        (59**3 + 1, 3, 60),
        (1, 3, 1),
        (2, 1, 2),
        (7, 9, 2),
    ],
)
def test_integer_root_of_known_values(value: int, degree: int, root: int) -> None:
    assert integer_root(value, degree) == root


def test_integer_root_is_the_smallest_that_reaches_the_value() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        degree = draw.randint(1, 7)
        base = draw.randint(1, 10 ** draw.randint(1, 12))
        for value in (base**degree - 1, base**degree, base**degree + 1):
            if value < 1:
                continue
            root = integer_root(value, degree)
            assert root**degree >= value
            assert root == 1 or (root - 1) ** degree < value


def test_generator_parameters_are_the_papers() -> None:
    sizes = GeneratorConfig()  # k 3, d 128, h 8, κ 16, r 64: shared/lev.md
    assert sizes.num_parameters(200_376, 2048) == 2_252_928
    assert sizes.num_parameters(200_376, 512) == 1_466_496


@pytest.mark.parametrize("residual", [False, True])
def test_generator_parameters_follow_the_closed_formula(residual: bool) -> None:
    k, d, h, knots, r, hidden, base = 2, 5, 3, 7, 11, 13, 32
    sizes = GeneratorConfig(k, d, h, knots, r, residual=residual)
    expected = k * base * d + h * d**2 + 2 * h * d + h * d * knots * r + h * r * hidden + residual * d * hidden
    assert sizes.num_parameters(1000, hidden) == expected  # 32² = 1024 is the first square from 1000 on


BAD_VALUES: list[tuple[type, dict[str, Any], str]] = [
    *[
        (GeneratorConfig, {name: 0}, f"model.generator.{name}")
        for name in ("num_coordinates", "seed_size", "num_heads", "rank", "sigmoid_divisor")
    ],
    (GeneratorConfig, {"num_knots": 2}, "model.generator.num_knots"),
    *[
        (GeneratorConfig, {name: -1.0}, f"model.generator.{name}")
        for name in ("codebook_std", "seed_proj_std", "spline_delta_std", "out_proj_std")
    ],
    *[
        (ModelConfig, {name: 0}, f"model.{name}")
        for name in (
            "hidden_size",
            "num_layers",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "kv_channels",
            "make_vocab_size_divisible_by",
            "rotary_base",
            "norm_epsilon",
        )
    ],
    (ModelConfig, {"init_method_std": -0.1}, "model.init_method_std"),
    (ModelConfig, {"num_query_groups": -2}, "model.num_query_groups"),
    (ModelConfig, {"vocab_size": 1}, "model.vocab_size"),
    (ModelConfig, {"hidden_size": 500}, "model.hidden_size"),
    (ModelConfig, {"kv_channels": 7}, "model.kv_channels"),
    (ModelConfig, {"num_query_groups": 3}, "model.num_query_groups"),
    (ParallelConfig, {"tensor_model_parallel_size": 0}, "parallel.tensor_model_parallel_size"),
    (ParallelConfig, {"sequence_parallel": True}, "parallel.sequence_parallel"),
    (DataConfig, {"sequence_length": 1}, "data.sequence_length"),
    (DataConfig, {"validation_fraction": 0.0}, "data.validation_fraction"),
    (DataConfig, {"validation_fraction": 1.0}, "data.validation_fraction"),
    (DataConfig, {"prefixes": ("a", "b"), "weights": (1.0,)}, "data.weights"),
    (DataConfig, {"prefixes": ("a", "b"), "weights": (1.0, 0.0)}, "data.weights"),
    (DataConfig, {"num_workers": -1}, "data.num_workers"),
    *[
        (DataConfig, {"blend": "pile.yaml", name: values}, f"data.{name}")
        for name, values in (("prefixes", ("a",)), ("validation_prefixes", ("b",)))
    ],
    (DataConfig, {"blend": ""}, "data.blend"),
    (DataConfig, {"index_cache": ""}, "data.index_cache"),
    *[(DataConfig, {"seed": seed}, "data.seed") for seed in (-1, 2**32)],
    *[
        (TrainingConfig, {name: 0}, f"training.{name}")
        for name in ("train_steps", "micro_batch_size", "global_batch_size", "loss_chunk_tokens", "lr", "adam_eps")
    ],
    *[
        (TrainingConfig, {name: -1}, f"training.{name}")
        for name in (
            "warmup_steps",
            "min_lr",
            "weight_decay",
            "clip_grad",
            "generator_lr_scale",
            "table_lr_scale",
            "head_lr_scale",
            "adam_beta1",
            "adam_beta2",
        )
    ],
    (TrainingConfig, {"lr": float("nan")}, "training.lr"),
    (TrainingConfig, {"adam_beta2": 1.0}, "training.adam_beta2"),
    (TrainingConfig, {"train_steps": 5, "warmup_steps": 6}, "training.warmup_steps"),
    (TrainingConfig, {"lr": 1e-4, "min_lr": 1e-3}, "training.min_lr"),
    *[
        (RunConfig, {name: 0}, f"run.{name}")
        for name in ("log_interval", "eval_interval", "eval_samples", "save_interval", "keep_checkpoints")
    ],
    (RunConfig, {"replica_check_interval": -1}, "run.replica_check_interval"),
    (RunConfig, {"profile_steps": (3, 0)}, "run.profile_steps"),
    (RunConfig, {"keep_every_steps": -1}, "run.keep_every_steps"),
    (RunConfig, {"distributed_timeout_minutes": 0}, "run.distributed_timeout_minutes"),
    (RunConfig, {"exit_duration_minutes": 0}, "run.exit_duration_minutes"),
    (FaultsConfig, {"loss_spike_zscore": 0}, "faults.loss_spike_zscore"),
    (FaultsConfig, {"loss_spike_window": 1}, "faults.loss_spike_window"),
    (FaultsConfig, {"max_consecutive_skips": 0}, "faults.max_consecutive_skips"),
    (FaultsConfig, {"max_rollbacks": -1}, "faults.max_rollbacks"),
    (EvaluationConfig, {"tasks_interval": 0}, "evaluation.tasks_interval"),
    (EvaluationConfig, {"tasks_limit": 0}, "evaluation.tasks_limit"),
    (EvaluationConfig, {"tasks": ("lambada_openai", "")}, "evaluation.tasks"),
]


@pytest.mark.parametrize(("section", "values", "key"), BAD_VALUES)
def test_message_names_the_key(section: type, values: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as raised:
        section(**values)
    assert re.search(rf"\b{re.escape(key)}\b", str(raised.value))
    assert "\n" not in str(raised.value)


def test_every_numeric_field_has_a_bad_value_above() -> None:
    # Any seed of the weights is a seed.
    tested = {(section, name) for section, values, _ in BAD_VALUES for name in values}
    for section in {section for section, _, _ in BAD_VALUES}:
        for field in dataclasses.fields(section):
            if re.search(r"int|float", str(field.type)) and field.name != "seed":
                assert (section, field.name) in tested, f"{section.__name__}.{field.name} takes any number"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ModelConfig(num_attention_heads=9, hidden_size=504, ffn_hidden_size=64), "model.num_attention_heads = 9"),
        (ModelConfig(num_attention_heads=8, num_query_groups=1), "model.num_query_groups = 1"),
        (ModelConfig(ffn_hidden_size=65), "model.ffn_hidden_size = 65"),
    ],
)
def test_tensor_parallel_size_must_divide_the_model(model: ModelConfig, name: str) -> None:
    Recipe(model=model)
    with pytest.raises(UserError, match=re.escape(f"tensor_model_parallel_size = 2 does not divide {name}")):
        Recipe(model=model, parallel=ParallelConfig(2))


def test_sequence_parallel_needs_a_divisible_sequence() -> None:
    with pytest.raises(UserError, match=r"data\.sequence_length = 511"):
        Recipe(parallel=ParallelConfig(2, True), data=DataConfig(sequence_length=511))


@pytest.mark.parametrize("batch", [1, 7, 10, 13, 63, 1001])
def test_batch_arithmetic_proposes_three_batches_that_do(batch: int) -> None:
    def recipe(global_batch_size: int) -> Recipe:
        training = TrainingConfig(micro_batch_size=3, global_batch_size=global_batch_size)
        return Recipe(parallel=ParallelConfig(2), training=training)

    with pytest.raises(UserError) as raised:
        recipe(batch).gradient_accumulation_steps(world_size=4)
    message = str(raised.value)
    assert "data-parallel size = 3 × 2 (4 ranks / TP 2)" in message
    assert f"training.global_batch_size = {batch} " in message
    if "micro-batch" in message:
        for size in message.split("micro-batch sizes that would do: ")[1].split(";", maxsplit=1)[0].split(", "):
            changed = dataclasses.replace(
                recipe(batch), training=dataclasses.replace(recipe(batch).training, micro_batch_size=int(size))
            )
            assert changed.gradient_accumulation_steps(4) * int(size) * 2 == batch
    else:
        assert batch % 2 == 1
    proposed = [int(word) for word in message.split("for a new run: ")[1].split(", ")]
    assert len(set(proposed)) == 3
    for other in proposed:
        assert recipe(other).gradient_accumulation_steps(4) * 3 * 2 == other
    assert min(abs(other - batch) for other in proposed) <= max(3, 6 - batch)  # the nearest multiple of 6


def test_accumulation_covers_the_global_batch() -> None:
    recipe = Recipe(training=TrainingConfig(micro_batch_size=4, global_batch_size=48))
    assert [recipe.gradient_accumulation_steps(ranks) for ranks in (1, 2, 3, 4)] == [12, 6, 4, 3]
    with pytest.raises(UserError, match="does not divide the number of ranks, 3"):
        dataclasses.replace(recipe, parallel=ParallelConfig(2)).gradient_accumulation_steps(3)


def test_vocabulary_comes_from_the_tokenizer_unless_named() -> None:
    assert Recipe().with_vocabulary(600).model.vocabulary == 600
    larger = Recipe(model=ModelConfig(vocab_size=1000))
    assert larger.with_vocabulary(600).model.vocabulary == 1000
    paper = Recipe(model=ModelConfig(vocab_size=200_376))
    assert paper.with_vocabulary(200_019).model.vocabulary == 200_376
    with pytest.raises(UserError, match=r"model\.vocab_size = 1000 is smaller than the tokenizer's 1001"):
        larger.with_vocabulary(1001)


def test_padding_is_the_next_multiple_for_the_degree() -> None:
    model = ModelConfig(vocab_size=50_277)
    assert [model.padded_vocab_size(tp) for tp in (1, 2, 4, 8)] == [50_304, 50_304, 50_432, 50_688]
    assert dataclasses.replace(model, vocab_size=50_304).padded_vocab_size(2) == 50_304


def test_derived_sizes() -> None:
    model = ModelConfig(hidden_size=512, num_attention_heads=8)
    assert (model.ffn_size, model.head_size, model.query_groups) == (1408, 64, 8)  # 8/3 · 512 = 1365.3
    assert ModelConfig(kv_channels=32).head_size == 32


def test_configuration_is_frozen() -> None:
    for section in (Recipe, *(getattr(config, str(field.type)) for field in dataclasses.fields(Recipe))):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section(), dataclasses.fields(section)[0].name, None)
