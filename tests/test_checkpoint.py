"""A resume is bitwise the undisturbed run at every ZeRO stage (fp32, gloo), by the calls that the loop makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed_cases import Case, resumed_run


@pytest.mark.parametrize("zero", ["zero0", "zero1", "zero2", "zero3", "zero3_offload"])
@pytest.mark.parametrize("tp", [1, 2])
def test_resumes_bitwise(two_ranks, tmp_path: Path, zero: str, tp: int) -> None:
    case = Case(tp=tp, zero=zero, accumulation=2, sequence_parallel=tp > 1, steps=4)
    for rank in two_ranks.run(resumed_run, case, tmp_path / "run"):
        undisturbed, resumed = rank["undisturbed"], rank["resumed"]
        assert resumed["losses"] == undisturbed["losses"][2:]
        for name, weight in undisturbed["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), name
        assert rank["saved"] == ["step_00000002"], "keep=1"
    folders = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert [path.name for path in folders] == ["step_00000002"], "nothing aside, nothing discarded is left"
