"""DeepSpeed's JSON: the shipped files, what the recipe fills, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from data_prep.errors import UserError
from leviathan_ds.config import ParallelConfig, Recipe, TrainingConfig
from leviathan_ds.parallel import ds_config, engine

FILES = sorted((Path(__file__).parents[1] / "ds_configs").glob("*.json"))
BF16 = Recipe(training=TrainingConfig(micro_batch_size=2, global_batch_size=8))
FP32 = replace(BF16, training=replace(BF16.training, precision="fp32"))
HERE = Path("mine.json")


def recipe_for(path: Path) -> Recipe:
    return FP32 if path.stem == "zero0" else BF16


def fill(values: dict[str, Any], recipe: Recipe = FP32, world_size: int = 1) -> dict[str, Any]:
    return ds_config.fill(values, recipe, world_size, HERE)


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as raised:
        function(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


class Recording(dict):
    """A configuration that remembers which keys its reader asks for."""

    asked: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:  # `KEY in values.keys()` is asking, too
        return self

    def __copy__(self) -> Recording:
        return self

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()


# What DeepSpeed reads and this trainer refuses, with the reason.
LEFT_OUT = {
    "amp": "apex, removed",
    "comet": "a second logger behind metrics.py",
    "compile": "acts only on engine.compile(), which is not called",
    "curriculum_learning": "the sample order is the recipe's",
    "datastates_ckpt": "a checkpoint engine; checkpoint.py commits its own",
    "eigenvalue": "removed",
    "expert_parallel": "no experts",
    "graph_harvesting": "removed",
    "hybrid_engine": "for RLHF",
    "managed_gradient_accumulation": "DeepSpeed owns accumulation (engine_traps 5)",
    "nebula": "removed",
    "pipeline": "no pipeline",
    "progressive_layer_drop": "removed",
    "quantize_training": "removed",
    "seq_parallel_communication_data_type": "Ulysses, which is not used",
    "sparse_attention": "removed",
    "sparse_gradients": "removed",
    "tensor_parallel": "Megatron's",
    "use_data_before_expert_parallelism": "no experts",
    "vocabulary_size": "only a warning about alignment; padding is the recipe's",
    "weight_quantization": "for inference",
}


def test_known_keys_are_what_deepspeed_reads() -> None:
    values = Recording(fill({}))
    values.asked = set()
    DeepSpeedConfig(values)
    asked = values.asked - {"sequence_parallel_size"}  # not reached outside a process group
    assert asked - set(ds_config.TOP_LEVEL_KEYS) == set(LEFT_OUT)
    assert set(ds_config.TOP_LEVEL_KEYS) - asked == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_file_is_valid_for_plain_deepspeed(path: Path) -> None:
    values = ds_config.read(path)
    original = copy.deepcopy(values)
    recipe = recipe_for(path)
    filled = ds_config.fill(values, recipe, 1, path)
    assert values == original
    engine.check_values(filled, path)
    parsed = DeepSpeedConfig(copy.deepcopy(filled))
    assert parsed.zero_optimization_stage == ds_config.zero_stage(filled) == int(path.stem[4])
    assert parsed.bfloat16_config.enabled == (recipe is BF16)
    assert (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu) == (8, 2)
    assert parsed.gradient_accumulation_steps == 4
    assert parsed.gradient_clipping == 1.0
    assert parsed.optimizer_params["betas"] == [0.9, 0.95]
    assert not parsed.zero_config.overlap_comm  # engine_traps 7
    assert ds_config.offloads_optimizer(filled) == ("offload" in path.stem)
    assert "auto" not in json.dumps(filled)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_file_trains_on_many_ranks(path: Path) -> None:
    recipe = replace(recipe_for(path), parallel=ParallelConfig(2))
    filled = ds_config.fill(ds_config.read(path), recipe, 4, path)
    assert filled["gradient_accumulation_steps"] == 2
    assert filled["train_batch_size"] == filled["train_micro_batch_size_per_gpu"] * 2 * 2  # DP 2


def test_all_six_files_ship() -> None:
    assert [path.stem for path in FILES] == [
        "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"
    ]  # fmt: skip


def test_empty_object_is_filled_like_auto() -> None:
    filled = fill({})
    assert filled["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    }
    assert filled["gradient_clipping"] == 1.0
    assert filled["steps_per_print"] > 10**6


# key of the JSON, a value that contradicts the recipe, the recipe's key in the message
CONTRADICTIONS = [
    ("train_batch_size", 16, "training.global_batch_size = 8"),
    ("train_micro_batch_size_per_gpu", 4, "training.micro_batch_size = 2"),
    ("gradient_accumulation_steps", 1, "data-parallel size) = 4"),
    ("gradient_clipping", 0.5, "training.clip_grad = 1.0"),
    ("bf16.enabled", True, "precision (fp32), i.e. bf16 = false"),
    ("optimizer.params.lr", 0.5, "training.lr = 0.001"),
    ("optimizer.params.betas", [0.9, 0.999], "training.adam_beta1, adam_beta2 = [0.9, 0.95]"),
    ("optimizer.params.eps", 1e-6, "training.adam_eps = 1e-08"),
    ("optimizer.params.weight_decay", 0.0, "training.weight_decay = 0.1"),
    ("scheduler.params.total_num_steps", 10, "training.train_steps = 1000"),
    ("scheduler.params.warmup_num_steps", 10, "training.warmup_steps = 100"),
    ("scheduler.params.cos_min_ratio", 0.5, "training.min_lr / lr = 0.1"),
    ("scheduler.params.warmup_type", "log", '= "linear"'),
]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    if "scheduler" in value:
        value["scheduler"]["type"] = "WarmupCosineLR"
    return value


@pytest.mark.parametrize(("key", "value", "told"), CONTRADICTIONS)
def test_contradiction_names_both_values(key: str, value: Any, told: str) -> None:
    message = refusal(fill, nested(key, value))
    assert message.startswith(f"ds_config mine.json: {key} = {json.dumps(value)} contradicts the recipe's ")
    assert told in message


@pytest.mark.parametrize("key", [key for key, _, _ in CONTRADICTIONS])
def test_auto_and_the_recipes_own_value_are_welcome(key: str) -> None:
    expected = fill({})
    filled = fill(nested(key, "auto"))
    assert filled == expected
    if not key.startswith("scheduler"):
        value: Any = filled
        for name in key.split("."):
            value = value[name]
        assert fill(nested(key, value)) == expected


def test_batch_of_another_number_of_ranks_is_a_contradiction() -> None:
    values = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert fill(values, world_size=2)["gradient_accumulation_steps"] == 2
    assert "gradient_accumulation_steps = 2" in refusal(fill, values, FP32, 4)


def test_equal_numbers_may_be_written_differently() -> None:
    values = {
        "gradient_clipping": 1,
        "optimizer": {"type": "auto", "params": {"lr": 0.0010, "betas": [0.90, 0.95]}},
    }
    assert fill(values) == fill({})
    assert "contradicts" in refusal(fill, {"gradient_clipping": True})
    assert "contradicts" in refusal(fill, {"gradient_clipping": "1.0"})
    assert "contradicts" in refusal(fill, {"train_batch_size": None})


def test_leftover_auto_is_named_with_its_section() -> None:
    message = refusal(fill, {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})
    assert 'zero_optimization.reduce_bucket_size is "auto"' in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{\n  "bf16": {},\n}', "line 3 column 1"),
        ('{"a": 1\n "b": 2}', "line 2 column 2"),
        ("", "line 1 column 1"),
        ("[1]", "expected an object"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "the key 'stage' stands twice"),
        (b"\xff\xfe{}", "not JSON"),
    ],
)
def test_broken_file_is_named_with_the_position(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(ds_config.read, path)
    assert str(path) in message
    # Python 3.13 points at the comma itself.
    assert words in message or (words == "line 3 column 1" and "line 2 column 13" in message)


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'no.json'}: No such file" in refusal(ds_config.read, tmp_path / "no.json")
    assert "Is a directory" in refusal(ds_config.read, tmp_path)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("gradient_cliping", "did you mean gradient_clipping?"),
        ("zero_optimisation", "did you mean zero_optimization?"),
        ("qqqq", "DeepSpeed has no such key"),
        ("amp", "unknown key amp"),
    ],
)
def test_unknown_key_comes_with_the_nearest(key: str, told: str) -> None:
    message = refusal(fill, {key: 1})
    assert f"unknown key {key};" in message
    assert told in message


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge; did you mean stage?"),
        (
            {"zero_optimization": {"stage3_gather_16bit_weights": True}},
            "stage3_gather_16bit_weights_on_model_save",
        ),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "offload_optimizer.devise"),
        ({"zero_optimization": {"overlap_comm": "maybe"}}, "overlap_comm: Input should be a valid boolean"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size: Input should be greater than 0"),
        ({"bf16": {"enabled": False, "bogus": 1}}, "bogus"),
        ({"communication_data_type": "fp9"}, "fp9"),
        ({"checkpoint": 3}, "DeepSpeed refuses it"),
    ],
)
def test_what_deepspeed_would_refuse_is_refused_before_the_start(section: dict[str, Any], told: str) -> None:
    message = refusal(engine.check_values, fill(section), HERE)
    assert message.startswith("ds_config mine.json: ")
    assert told in message


def test_checking_leaves_the_configuration_alone() -> None:
    filled = fill({"zero_optimization": {"stage": 2, "offload_optimizer": None}})
    before = copy.deepcopy(filled)
    engine.check_values(filled, HERE)
    assert filled == before
    assert not ds_config.offloads_optimizer(filled)


@pytest.mark.parametrize("key", ds_config.OWNED_ELSEWHERE)
def test_sections_that_would_act_behind_the_trainer_are_refused(key: str) -> None:
    for value in ({"enabled": True}, {}, True):
        assert ds_config.OWNED_ELSEWHERE[key] in refusal(fill, {key: value})
    assert key in ds_config.TOP_LEVEL_KEYS
    assert fill({key: {"enabled": False}})[key] == {"enabled": False}


@pytest.mark.parametrize("stage", [4, -1, "2", "auto", True, None, [2], 1.5])
def test_stage_is_0_to_3(stage: Any) -> None:
    assert "zero_optimization.stage must be 0, 1, 2 or 3" in refusal(fill, {"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("value", ["auto", None, [], 3])
@pytest.mark.parametrize(
    "section", ["optimizer", "zero_optimization", "bf16", "scheduler", "optimizer.params", "scheduler.params"]
)
def test_section_that_is_no_object_is_named(section: str, value: Any) -> None:
    assert f"{section} must be an object, got {json.dumps(value)}" in refusal(fill, nested_raw(section, value))


def nested_raw(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def test_scheduler_may_only_agree() -> None:
    agreeing = {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": "auto"}}
    assert "scheduler" not in fill({"scheduler": agreeing})  # the loop sets the rate itself
    for other in ({"type": "WarmupLR", "params": {}}, {"params": {}}, {}):
        assert "scheduler.type is" in refusal(fill, {"scheduler": other})


def test_only_adamw() -> None:
    assert "the trainer uses AdamW" in refusal(fill, {"optimizer": {"type": "Lamb"}})


def test_bf16_without_zero_is_refused() -> None:
    # engine_traps 4: the gradient norm is wrong under tensor parallelism.
    for values in ({}, {"zero_optimization": {"stage": 0}}, {"bf16": {"enabled": True}}):
        assert "bf16 with ZeRO stage 0" in refusal(fill, values, BF16)
    assert all(fill({"zero_optimization": {"stage": stage}}, BF16) for stage in (1, 2, 3))


@pytest.mark.parametrize("key", ["bf16.check_grad_overflow", "zero_optimization.compute_grad_norm"])
def test_what_would_let_a_gradient_that_is_not_finite_through_is_refused(key: str) -> None:
    assert f"{key} is false, and DeepSpeed would apply" in refusal(fill, nested_raw(key, False))
    assert fill(nested_raw(key, True))


def test_explicit_values_of_others_stay() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 2000}
    filled = fill({"zero_optimization": zero, "steps_per_print": 3, "wall_clock_breakdown": True})
    assert (filled["zero_optimization"], filled["steps_per_print"]) == (zero, 3)


def test_all_contradictions_cover_all_that_is_filled() -> None:
    def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in values.items():
            yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]

    ours = {key for key, _, _ in CONTRADICTIONS if not key.startswith("scheduler")}
    assert set(leaves(fill({}))) == ours | {"optimizer.type", "steps_per_print"}
