"""The only place that starts DeepSpeed."""

from __future__ import annotations

import copy
import difflib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError
from torch import Tensor, nn

from data_prep.errors import UserError
from data_prep.files import locked
from leviathan_ds.config import ParallelConfig, TrainingConfig
from leviathan_ds.parallel import ds_config, registry, topology
from leviathan_ds.parallel.mpu import MegatronMpu

# On CPU DeepSpeed would compile a shared-memory collective at first use, a minute or more; a process killed
# meanwhile leaves a lock on which every later run of the machine waits for ever. gloo serves without it.
__compatible_ops__["deepspeed_shm_comm"] = False

_logger = logging.getLogger(__name__)


def check_values(filled: dict[str, Any], path: Path) -> None:
    """Refuse what DeepSpeed itself would refuse, before any process waits for another.

    Raises UserError naming the file and the key, for an unknown one with the nearest known one.
    """
    known = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    for key in filled.get("zero_optimization", {}):
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else "DeepSpeed has no such key"
            raise UserError(f"ds_config {path}: unknown key zero_optimization.{key}; {hint}")
    # Outside a process group DeepSpeed takes the data-parallel size for 1.
    passes = filled["gradient_accumulation_steps"] * filled["train_micro_batch_size_per_gpu"]
    try:
        DeepSpeedConfig({**copy.deepcopy(filled), "train_batch_size": passes})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"ds_config {path}: {error.title}: {key}: {first['msg']}") from None
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError, DeepSpeedConfigError) as error:
        raise UserError(f"ds_config {path}: DeepSpeed refuses it: {' '.join(str(error).split())}") from None


def initialize(
    model: nn.Module, training: TrainingConfig, parallel: ParallelConfig, config: dict[str, Any]
) -> DeepSpeedEngine:
    """Hand an initialised model to DeepSpeed, with everything that the registry knows about its parameters.

    Args:
        model: on its device, weights equal on all tensor-parallel ranks where replicated.
        config: DeepSpeed's configuration, filled (`ds_config.fill`).
    """
    registry.mark_tensor_parallel(model)
    registry.complete_partial_gradients(model, parallel)
    if ds_config.offloads_optimizer(config):
        _build_cpu_adam()
    groups = registry.optimizer_groups(model, training)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,  # pyright: ignore[reportArgumentType]
        config=config,
        mpu=MegatronMpu(),
        dist_init_required=False,
    )
    return engine


@contextmanager
def gathered(parameter: Tensor, engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """The whole of this tensor-parallel rank's parameter, also where ZeRO-3 has partitioned it. Collective."""
    if engine.zero_optimization_stage() < 3:
        yield parameter
    else:
        with GatheredParameters([parameter]):
            yield parameter


def named_local_parameters(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of this tensor-parallel rank, whole, one at a time. Collective under ZeRO-3."""
    module = cast(nn.Module, engine.module)
    for name, parameter in module.named_parameters():
        with gathered(parameter, engine) as whole:
            yield name, whole.detach()


def differing_replicas(engine: DeepSpeedEngine) -> dict[str, list[int]]:
    """Parameters whose replicas differ, and the ranks that deviate. Collective; the same on every rank.

    Under ZeRO-3 partitions are compared where they lie: nothing is gathered.
    """
    partitioned = engine.zero_optimization_stage() == 3

    def held(parameter: Any) -> Tensor:
        if not partitioned:
            return parameter
        partition = parameter.ds_tensor
        start = topology.data_parallel_rank() * partition.numel()
        return partition[: max(0, parameter.ds_numel - start)]  # the rest is padding, never written

    named = ((name, held(parameter)) for name, parameter in cast(nn.Module, engine.module).named_parameters())
    return registry.differing_replicas(named, data_parallel_replicas=not partitioned)


def step(engine: DeepSpeedEngine) -> None:
    """DeepSpeed's step, in which a gradient that is not finite changes neither weights nor moments.

    From stage 1 on DeepSpeed looks at the gradient itself, which is its one wait for the device in a step; here
    stage 0 does too. `engine.was_step_applied()` and `engine.skipped_steps` tell, alike on all ranks.
    """
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() > 0:
        engine.step()
        if not engine.was_step_applied() and engine.zero_optimization_stage() < 3:
            # In bf16 with an offloaded optimizer DeepSpeed keeps these and would add the next gradients to them.
            for group in getattr(optimizer, "averaged_gradients", {}):
                optimizer.averaged_gradients[group] = None
        return
    gradients = [p.grad for p in cast(nn.Module, engine.module).parameters() if p.grad is not None]
    broken = (~torch.isfinite(torch.nn.utils.get_total_norm(gradients))).float()
    dist.all_reduce(broken, op=dist.ReduceOp.MAX)
    optimizer.overflow = bool(broken)  # by this DeepSpeed's own optimizers report a skipped step
    if optimizer.overflow:
        optimizer.step = lambda: None
    engine.step()
    if optimizer.overflow:
        del optimizer.step


def _build_cpu_adam() -> None:
    """Compile DeepSpeed's CPU Adam, safely against a build that was killed.

    torch's build lock is a bare file that outlives its process. Ours is held by the operating system and
    freed at death; whoever holds it finds any bare lock stale.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "leviathan_ds" / "extensions"))
    os.environ["TORCH_EXTENSIONS_DIR"] = str(root)
    with locked(root / "build.lock"):
        for stale in root.glob("**/cpu_adam/lock"):
            _logger.warning("removing %s, left by a build that was killed", stale)
            stale.unlink()
        from deepspeed.ops.op_builder import CPUAdamBuilder  # pyright: ignore

        CPUAdamBuilder().load()


def parameter_groups(engine: DeepSpeedEngine) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, whose "lr" the loop sets; "lr_scale" is the registry's."""
    return engine.optimizer.param_groups  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]


def global_grad_norm(engine: DeepSpeedEngine) -> Tensor | float | None:
    """Norm of the whole gradient before clipping, as DeepSpeed keeps it (a device scalar is not read back);
    None where DeepSpeed does not compute one."""
    norm = engine.get_global_grad_norm()
    return norm if isinstance(norm, (int, float, Tensor)) else None


def synchronize() -> None:
    """Wait for the device, so that a wall-clock time means something. For logging steps only."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
