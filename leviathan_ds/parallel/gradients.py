"""Norms of the reduced gradient by component of the model, from the parts that DeepSpeed's optimizer holds.

Between the last backward and `engine.step()` every rank holds its own part of the accumulated gradient, already
averaged over the data-parallel ranks. A norm needs no more than these parts: nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast, get_args

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_local_grad
from torch import Tensor, nn

from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel import registry, topology


def component_norms(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Norm of the gradient, before clipping, of each component that the model has. Collective.

    To be called after the last backward of a step and before `engine.step()`. One pass over this rank's part of
    the gradient and one reduction of four numbers; nothing is read back to the host. Under ZeRO-3 (DeepSpeed's
    accessor) and with an offloaded optimizer the host waits until the gradients are reduced.
    Returns float64 device scalars, the same on every rank.
    """
    if engine.zero_use_cpu_optimizer():
        engines.synchronize()  # gradients are still on their way to the host
    parts: dict[str, list[Tensor]] = {}
    for rule, part in _own_gradients(engine):
        own = parts.setdefault(rule.component, [])
        if part is not None and (rule.shard_dim is not None or topology.tensor_parallel_rank() == 0):
            own.append(part)
    # In one order on all ranks, those included that hold no part of a component.
    present = [component for component in get_args(registry.Component) if component in parts]
    squares = torch.stack([_sum_of_squares(parts[component]) for component in present])
    dist.all_reduce(squares)
    return dict(zip(present, squares.sqrt(), strict=True))


def _sum_of_squares(parts: list[Tensor]) -> Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=topology.device())
    # In float64 as DeepSpeed's own: a float32 sum over millions of squares is off by 1e-4 on a CPU.
    norms = torch._foreach_norm(parts, 2, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square().sum().to(topology.device())


def _own_gradients(engine: DeepSpeedEngine) -> Iterator[tuple[registry.ParameterRule, Tensor | None]]:
    """For every parameter the part of its gradient that is this data-parallel rank's to count, None for none."""
    stage = engine.zero_optimization_stage()
    for _, parameter, rule in registry.named_rules(cast(nn.Module, engine.module)):
        if stage == 0:
            yield rule, parameter.grad if topology.data_parallel_rank() == 0 else None
        elif stage < 3:
            yield rule, _fragment(parameter)
        else:
            yield rule, safe_get_local_grad(parameter)


def _fragment(parameter: nn.Parameter) -> Tensor | None:
    """This rank's fragment under ZeRO-1 and 2, which cut the flattened parameters of a group into equal parts."""
    mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
    if mapping is None:
        return None
    gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # pyright: ignore
    address = mapping.lp_fragment_address
    # ZeRO-1 in bf16 accumulates whole parameters.
    whole = gradient.numel() != address.numel
    return gradient.flatten().narrow(0, address.start, address.numel) if whole else gradient
