"""What an evaluation is asked for: the options of launchers/evaluate.py, without its imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SplitName = Literal["validation", "test", "train", "all"]


@dataclass(frozen=True)
class EvaluationOptions:
    """The command line's help says what each means."""

    checkpoint: Path
    compare: Path | None = None
    data: Sequence[str] = ()
    split: SplitName = "validation"
    samples: int = 512
    micro_batch_size: int = 8
    train_data: Sequence[str] = ()
    config: Path | None = None
    tasks: Sequence[str] = ()
    include_path: str | None = None
    limit: int | None = None
    tensor_model_parallel_size: int = 1
    trust_remote_code: bool = False
    json: Path | None = None
