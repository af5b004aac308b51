"""What DeepSpeed takes for its storage: it hands over what belongs into files, and gets back only plain values."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from data_prep.errors import UserError

# All that DeepSpeed's files hold beside tensors, containers and numbers. None of these runs code when it is built.
_PLAIN_CLASSES = [LossScaler, ZeroStageEnum, fragment_address]


class CollectingEngine(CheckpointEngine):
    """Keeps what DeepSpeed would write, by file, in `files`; reads without running what a pickle asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.files: dict[Path, Any] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        """The state is DeepSpeed's own, not a copy: valid until the next step."""
        self.files[Path(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_plain(Path(path), map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def load_plain(path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """What `torch.save` wrote, if it is tensors, containers, numbers and DeepSpeed's few classes.

    Raises UserError for a file that holds anything else, and runs nothing of it.

    mmap: read only what is used, when it is used.
    """
    try:
        with torch.serialization.safe_globals(_PLAIN_CLASSES):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except UnpicklingError as error:
        raise UserError(f"{path} holds objects that no file of this trainer holds: {_essence(error)}") from None


def _essence(error: UnpicklingError) -> str:
    """torch's reason without its advice to load the file all the same."""
    lines = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines() or ["not readable"]
    return lines[0].split(" was not an allowed global")[0]
