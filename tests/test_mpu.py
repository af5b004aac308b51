"""Every method that DeepSpeed's source calls on an mpu exists on ours, or has a reason not to."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import deepspeed
import pytest
import torch.distributed as dist

from leviathan_ds.parallel.mpu import MegatronMpu

# Files whose mpu is not ours.
FOREIGN_FILES = {
    "runtime/pipe/": "the pipeline engine builds its own grid",
    "runtime/domino/": "Domino's transformer takes an mpu of its own",
    "runtime/hybrid_engine.py": "RLHF",
    "runtime/sequence_parallel/": "Ulysses, which is not used",
    "runtime/model_checkpointing/": "the fast and the decoupled checkpoint writers, which are not used",
    "inference/": "inference",
    "model_implementations/": "inference",
    "module_inject/": "inference and AutoTP",
}
# Methods that are called only behind a question or a feature that is not in use.
NOT_NEEDED = {
    "get_slice_parallel_group": "asked with hasattr, after get_tensor_model_parallel_group",
    "get_slice_parallel_rank": "asked with hasattr, after get_tensor_model_parallel_rank",
    "get_slice_parallel_world_size": "asked with hasattr, after get_tensor_model_parallel_world_size",
    "get_pipeline_model_parallel_group": "asked with hasattr; none means one stage",
    "get_pipeline_model_parallel_world_size": "asked with hasattr; none means one stage",
    "get_pipe_parallel_group": "asked with hasattr; none means one stage",
    "get_pipe_parallel_world_size": "asked with hasattr; none means one stage",
    "get_sequence_parallel_group": "Ulysses, asked with hasattr",
    "get_sequence_parallel_rank": "Ulysses, asked with hasattr",
    "get_sequence_parallel_world_size": "Ulysses, asked with hasattr",
    "get_sequence_data_parallel_group": "Ulysses, asked with hasattr",
    "get_sequence_data_parallel_rank": "Ulysses, asked with hasattr",
    "get_sequence_data_parallel_world_size": "Ulysses, asked with hasattr",
    "get_data_parallel_group_ranks": "groups._get_data_parallel_group_ranks, which serves experts only",
    "get_tensor_model_parallel_src_rank": "AutoTP, which replaces the mpu by deepspeed.utils.groups",
    "_init_tp_mesh_device": "AutoTP, which replaces the mpu by deepspeed.utils.groups",
}


def calls() -> dict[str, set[str]]:
    """Names of the methods called on something named mpu, and the files that do."""
    root = Path(str(deepspeed.__file__)).parent
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name.startswith(tuple(FOREIGN_FILES)):
            continue
        for method in re.findall(r"\bmpu\.(\w+)\(", path.read_text()):
            found.setdefault(method, set()).add(name)
    return found


def test_every_call_is_answered_or_explained() -> None:
    found = calls()
    assert {"get_model_parallel_rank", "get_data_parallel_group"} <= found.keys()
    ours = {name for name, _ in inspect.getmembers(MegatronMpu, inspect.isfunction)}
    unanswered = {name: files for name, files in found.items() if name not in ours | NOT_NEEDED.keys()}
    assert unanswered == {}
    assert NOT_NEEDED.keys() <= found.keys()  # no reason outlives its call


def test_what_is_said_to_be_asked_with_hasattr_is() -> None:
    root = Path(str(deepspeed.__file__)).parent
    asked = {
        name
        for path in root.rglob("*.py")
        for name in re.findall(r"hasattr\((?:self\.)?mpu, ['\"](\w+)['\"]\)", path.read_text())
    }
    # config.py and engine.py ask for the group's size and then call the rest of Ulysses' methods.
    assert {name for name, reason in NOT_NEEDED.items() if "hasattr" in reason} <= asked | {
        "get_pipe_parallel_group",
        "get_pipeline_model_parallel_group",
    }


@pytest.mark.usefixtures("one_rank")
def test_answers_of_a_lone_rank() -> None:
    mpu = MegatronMpu()
    for name, method in inspect.getmembers(mpu, inspect.ismethod):
        answer = method()
        if name.endswith("_rank"):
            assert answer == 0
        elif name.endswith("_world_size"):
            assert answer == 1
        else:
            assert name.endswith("_group")
            assert dist.get_process_group_ranks(answer) == [0]
