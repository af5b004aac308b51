"""DeepSpeed's JSON: read, filled from the recipe, and refused where the two contradict each other.

The file stays DeepSpeed's own. Like Hugging Face's integration it may say "auto" where the recipe knows the
value; an explicit value must agree with the recipe. What DeepSpeed would ignore in silence is an error here.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from leviathan_ds.config import Recipe

# DeepSpeed ignores unknown top-level keys without a word; these are the ones that it reads.
TOP_LEVEL_KEYS = (
    "activation_checkpointing",
    "aio",
    "autotuning",
    "bf16",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "compression_training",
    "csv_monitor",
    "data_efficiency",
    "data_types",
    "dataloader_drop_last",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "elasticity",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "gradient_predivide_factor",
    "log_level",
    "memory_breakdown",
    "optimizer",
    "prescale_gradients",
    "scheduler",
    "steps_per_print",
    "tensorboard",
    "timers",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)

# Sections of DeepSpeed that would act behind the trainer's back, and where the same thing is set.
OWNED_ELSEWHERE = {
    "fp16": "training.precision knows fp32 and bf16; remove the section or set enabled to false",
    "torch_autocast": "set training.precision instead",
    "wandb": "the trainer keeps one run over all resumes: set run.wandb instead",
    "activation_checkpointing": "set training.recompute instead",
    "data_efficiency": "the sample order is the recipe's (data.seed)",
    "elasticity": "batch sizes are the recipe's",
    "autotuning": "run DeepSpeed's autotuner by itself",
    "compression_training": "the trainer pretrains at full precision",
}


def read(path: Path) -> dict[str, Any]:
    """The JSON object in a DeepSpeed configuration file.

    Raises UserError naming the file, and for bad JSON the line and column.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise UserError(f"ds_config {path}: the key {twice!r} stands twice")
        return dict(pairs)

    try:
        values = json.loads(path.read_text(), object_pairs_hook=unique)
    except OSError as error:
        raise UserError(f"ds_config {path}: {error.strerror}; ds_configs/ holds the ones that ship") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"ds_config {path}: not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"ds_config {path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"ds_config {path}: expected an object with keys such as zero_optimization")
    return values


def fill(values: dict[str, Any], recipe: Recipe, world_size: int, path: Path) -> dict[str, Any]:
    """A configuration for `deepspeed.initialize`: "auto" replaced, contradictions refused.

    Args:
        values: what `read` returned; not changed.
        world_size: number of ranks of the job.
        path: the file, for messages.

    Raises UserError naming the file, the key, its value and the recipe's.
    """
    filled = copy.deepcopy(values)
    _check_top_level(filled, path)
    training = recipe.training
    _settle(
        filled,
        path,
        {
            "train_batch_size": ("training.global_batch_size", training.global_batch_size),
            "train_micro_batch_size_per_gpu": ("training.micro_batch_size", training.micro_batch_size),
            "gradient_accumulation_steps": (
                "global batch / (micro batch × data-parallel size)",
                recipe.gradient_accumulation_steps(world_size),
            ),
            # DeepSpeed's own default is 1.0 in this release and was 0 before: always explicit.
            "gradient_clipping": ("training.clip_grad", training.clip_grad),
            "bf16.enabled": (f"precision ({training.precision}), i.e. bf16", training.precision == "bf16"),
            "optimizer.params.lr": ("training.lr", training.lr),
            "optimizer.params.betas": (
                "training.adam_beta1, adam_beta2",
                [training.adam_beta1, training.adam_beta2],
            ),
            "optimizer.params.eps": ("training.adam_eps", training.adam_eps),
            "optimizer.params.weight_decay": ("training.weight_decay", training.weight_decay),
        },
    )
    _settle_scheduler(filled, recipe, path)
    if filled["optimizer"].get("type", "auto") == "auto":
        filled["optimizer"]["type"] = "AdamW"
    if filled["optimizer"]["type"] != "AdamW":
        raise UserError(
            f"ds_config {path}: optimizer.type is {filled['optimizer']['type']!r}; the trainer uses AdamW"
        )
    if training.precision == "bf16" and zero_stage(filled) == 0:
        raise UserError(
            f"ds_config {path}: bf16 with ZeRO stage 0 computes a wrong gradient norm under tensor parallelism; "
            "use stage 1 or higher, or training.precision fp32"
        )
    for section, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if filled.get(section, {}).get(key) is False:
            raise UserError(
                f"ds_config {path}: {section}.{key} is false, and DeepSpeed would apply a gradient that is not "
                "finite; remove the key"
            )
    _refuse_leftover_auto(filled, path)
    filled.setdefault("steps_per_print", 1 << 30)  # the loop prints
    return filled


def zero_stage(values: dict[str, Any]) -> int:
    return int(values.get("zero_optimization", {}).get("stage", 0))


def offloads_optimizer(values: dict[str, Any]) -> bool:
    section = values.get("zero_optimization", {}).get("offload_optimizer") or {}  # null is DeepSpeed's default
    return section.get("device", "none") != "none"


def zero3_sub_group_size(values: dict[str, Any]) -> int | None:
    """Elements that ZeRO-3's optimizer steps at once, None for DeepSpeed's default: it cuts its files."""
    return values.get("zero_optimization", {}).get("sub_group_size") if zero_stage(values) == 3 else None


def scattered_by(values: dict[str, Any]) -> str | None:
    """The key of zero_optimization under which DeepSpeed's records do not tell where a parameter's state lies."""
    section = values.get("zero_optimization", {})
    if (section.get("offload_optimizer") or {}).get("device") == "nvme":
        return "offload_optimizer.device"
    return next((key for key in ("round_robin_gradients", "parameter_alignment") if section.get(key)), None)


def _check_top_level(values: dict[str, Any], path: Path) -> None:
    for key, value in values.items():
        if key in OWNED_ELSEWHERE and (not isinstance(value, dict) or value.get("enabled", True) is not False):
            raise UserError(f"ds_config {path}: {key}: {OWNED_ELSEWHERE[key]}")
        if key not in TOP_LEVEL_KEYS:
            near = difflib.get_close_matches(key, TOP_LEVEL_KEYS, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else "DeepSpeed has no such key"
            raise UserError(f"ds_config {path}: unknown key {key}; {hint}")
    for section in ("optimizer", "zero_optimization", "bf16", "scheduler", "optimizer.params", "scheduler.params"):
        value: Any = values
        for name in section.split("."):
            value = value.get(name, {})
        if not isinstance(value, dict):
            raise UserError(f"ds_config {path}: {section} must be an object, got {json.dumps(value)}")
    stage = values.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UserError(f"ds_config {path}: zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")


def _settle(values: dict[str, Any], path: Path, wanted: dict[str, tuple[str, Any]]) -> None:
    """Put the recipe's value where the file says "auto" or nothing; refuse another explicit one."""
    for key, (recipe_key, value) in wanted.items():
        *sections, leaf = key.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        explicit = section.get(leaf, "auto")
        if explicit != "auto" and not _equal(explicit, value):
            raise UserError(
                f"ds_config {path}: {key} = {json.dumps(explicit)} contradicts the recipe's {recipe_key} = "
                f'{json.dumps(value)}; change one of them, or write "auto"'
            )
        section[leaf] = value


def _settle_scheduler(values: dict[str, Any], recipe: Recipe, path: Path) -> None:
    """The learning rate is the trainer's pure function of the step; a scheduler section may only agree."""
    scheduler = values.pop("scheduler", None)
    if scheduler is None:
        return
    if scheduler.get("type") != "WarmupCosineLR":
        raise UserError(
            f"ds_config {path}: scheduler.type is {scheduler.get('type')!r}; the trainer's schedule is a linear "
            'warm-up and a cosine (training.warmup_steps, lr, min_lr): remove the section or use "WarmupCosineLR"'
        )
    training = recipe.training
    _settle(
        {"scheduler": scheduler},
        path,
        {
            "scheduler.params.total_num_steps": ("training.train_steps", training.train_steps),
            "scheduler.params.warmup_num_steps": ("training.warmup_steps", training.warmup_steps),
            "scheduler.params.cos_min_ratio": ("training.min_lr / lr", training.min_lr / training.lr),
            "scheduler.params.warmup_min_ratio": ("the start of the warm-up", 0.0),
            "scheduler.params.warmup_type": ("the warm-up's shape", "linear"),
        },
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool) or isinstance(one, str):
        return one is other or (isinstance(one, str) and one == other)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


def _refuse_leftover_auto(values: dict[str, Any], path: Path, prefix: str = "") -> None:
    for key, value in values.items():
        if value == "auto":
            raise UserError(f'ds_config {path}: {prefix}{key} is "auto", but the recipe has no value for it')
        if isinstance(value, dict):
            _refuse_leftover_auto(value, path, f"{prefix}{key}.")
