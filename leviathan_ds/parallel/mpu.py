"""The model-parallel unit that DeepSpeed asks for its groups.

`megatron.core.parallel_state` itself will not do: DeepSpeed calls get_model_parallel_world_size and
get_model_parallel_rank, names that Megatron-core no longer has.
"""

from __future__ import annotations

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


class MegatronMpu:
    """Every method that DeepSpeed calls on an `mpu`, answered by megatron-core's parallel state."""

    def get_model_parallel_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()  # pyright: ignore[reportReturnType]

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def get_data_parallel_group(self) -> ProcessGroup:
        return parallel_state.get_data_parallel_group()  # pyright: ignore[reportReturnType]
