"""The doctor's checks over injected facts, its collectives on two ranks, and the environment file."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed_cases import examined, examined_with_trouble

from data_prep.errors import UserError
from launchers import doctor
from leviathan_ds import accounting, run_directory
from leviathan_ds import recipe as recipes
from leviathan_ds.config import DataConfig, ModelConfig, ParallelConfig, Recipe, RunConfig, TrainingConfig
from leviathan_ds.doctor import environment, examination, facts
from leviathan_ds.doctor.checks import Finding, Measured, check_versions, examine
from leviathan_ds.doctor.facts import NodeFacts, Plan
from leviathan_ds.training import job, loop

RECIPE = Recipe(
    model=ModelConfig(vocab_size=1000),
    parallel=ParallelConfig(tensor_model_parallel_size=2),
    data=DataConfig(prefixes=("data/a",)),
    training=TrainingConfig(micro_batch_size=2, global_batch_size=16),
    run=RunConfig(keep_checkpoints=3, wandb="online"),
)


def node(index: int, **changed: Any) -> NodeFacts:
    """A sound node of two ranks."""
    facts = NodeFacts(
        name=f"node-{index}",
        machine=f"machine {index}",
        num_ranks=2,
        first_rank=2 * index,
        device="cpu",
        versions={"python": "3.11.2", "torch": "2.13.0"},
        commit="0123456789ab",
        source="fedcba987654",
        variables={"NCCL_DEBUG": "WARN", "HF_HOME": "/hf"} | ({"WANDB_API_KEY": "secret 1"} if index == 0 else {}),
        launcher_variables={"NCCL_DEBUG": "WARN"} if index == 0 else None,
        hostfile="/hosts" if index == 0 else None,
        hostfile_slots={"a": 2, "b": 2} if index == 0 else {},
        hostfile_selects=False,
        started_slots={"a": 2, "b": 2},
        plan=Plan(RECIPE, Path("/runs/x"), {"zero_optimization": {"stage": 1}}, ("f" * 64,)),
        run_dir_shared=True,
        free_bytes=100 << 30,
        checkpoint_bytes=10 << 30,
        num_checkpoints=0,
    )
    return replace(facts, **changed)


def measured(**changed: Any) -> Measured:
    return replace(Measured([0.0, 0.0, 0.001, 0.1], [True] * 4, 2.5e9, 64 << 20), **changed)


def plan(**changed: Any) -> Plan:
    return replace(node(0).plan, **changed)


def recipe_with(**changed: Any) -> Recipe:
    return replace(RECIPE, training=replace(RECIPE.training, **changed))


def test_sound_nodes_pass_every_check() -> None:
    findings = examine([node(0), node(1)], measured())
    assert [finding.status for finding in findings] == ["ok"] * 12, findings
    told = {finding.check: finding.found for finding in findings}
    assert len(told) == 12
    assert told["hostfile"] == "/hosts: 4 slots on 2 hosts; 4 ranks on 2 nodes"
    assert told["batch"] == "micro 2 × DP 2 × accumulation 4 = 16 sequences; 4 ranks = TP 2 × DP 2"
    assert told["all-reduce"] == "sum right on 4 ranks; 2.50 GB/s per rank's link, 64 MiB"
    assert told["disk"] == "100.00 GiB free; 4 checkpoints of 10.00 GiB, 0 there"


# Each: what is otherwise on node 0, on node 1, in the measurement; the one check; its status; words of it.
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, str, list[str]]] = {
    "a missing hostfile": (
        {"plan": plan(problems={"hostfile": "--hostfile x does not exist"})},
        {"plan": plan(problems={"hostfile": "--hostfile x does not exist"})},
        {},
        "hostfile",
        "failed",
        ["--hostfile x does not exist"],
    ),
    "other slots than ranks": (
        {"hostfile_slots": {"a": 2, "b": 4}},
        {},
        {},
        "hostfile",
        "failed",
        ["slots a 2, b 4", "running node-0 2, node-1 2", "/hosts"],
    ),
    "a host of the file without ranks": (
        {"hostfile_slots": {"a": 2, "b": 2, "c": 2}},
        {},
        {},
        "hostfile",
        "failed",
        ["c 2"],
    ),
    "slots left out by an option": (
        {"hostfile_slots": {"a": 2, "b": 4}, "hostfile_selects": True},
        {},
        {},
        "hostfile",
        "note",
        ["take only 4 ranks on 2 nodes of /hosts"],
    ),
    "one machine twice": ({}, {"machine": "machine 0"}, {}, "nodes", "note", ["2 nodes", "one machine node-0"]),
    "two kinds of device": ({}, {"device": "NVIDIA A100"}, {}, "nodes", "note", ["NVIDIA A100", "cpu"]),
    "another torch": (
        {},
        {"versions": {"python": "3.11.2", "torch": "2.12.1"}},
        {},
        "versions",
        "failed",
        ["torch is 2.13.0 on node-0, 2.12.1 on node-1", "constraints.txt"],
    ),
    "a package too few": ({}, {"versions": {"python": "3.11.2"}}, {}, "versions", "failed", ["absent on node-1"]),
    "other code": (
        {},
        {"commit": "ba9876543210", "source": "000000000000"},
        {},
        "code",
        "failed",
        ["0123456789ab", "ba9876543210", "on node-1", "one commit"],
    ),
    "changed files at the same commit": ({}, {"source": "000000000000"}, {}, "code", "failed", ["000000000000"]),
    "another commit of the same code": ({}, {"commit": "ba9876543210"}, {}, "code", "note", ["ba9876543210"]),
    "a variable of communication missing elsewhere": (
        {"variables": node(0).variables | {"NCCL_ALGO": "Ring"}},
        {},
        {},
        "environment",
        "failed",
        ["NCCL_ALGO is Ring on node-0, absent on node-1", "--write_env_file"],
    ),
    "a variable of arithmetic on another node alone": (
        {},
        {"variables": node(1).variables | {"NVIDIA_TF32_OVERRIDE": "1", "TORCH_HOME": "/t"}},
        {},
        "environment",
        "failed",
        ["NVIDIA_TF32_OVERRIDE is absent on node-0, 1 on node-1", "TORCH_HOME is absent on node-0"],
    ),
    "another value of what must agree": (
        {"variables": node(0).variables | {"NCCL_IB_DISABLE": "0"}},
        {"variables": node(1).variables | {"NCCL_IB_DISABLE": "1"}},
        {},
        "environment",
        "failed",
        ["NCCL_IB_DISABLE is 0 on node-0, 1 on node-1"],
    ),
    "what must agree did not reach rank 0": (
        {"launcher_variables": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_DEBUG": "WARN"}},
        {},
        {},
        "environment",
        "failed",
        ["CUBLAS_WORKSPACE_CONFIG of the shell that typed deepspeed did not reach the ranks"],
    ),
    "harmless variables missing": (
        {},
        {"variables": {}},
        {},
        "environment",
        "note",
        ["HF_HOME is /hf on node-0, absent on node-1", "NCCL_DEBUG is WARN on node-0, absent on node-1"],
    ),
    "a harmless variable more elsewhere": (
        {},
        {"variables": node(1).variables | {"CUDA_CACHE_PATH": "/tmp/cache"}},
        {},
        "environment",
        "note",
        ["CUDA_CACHE_PATH is absent on node-0, /tmp/cache on node-1"],
    ),
    "another value": (
        {},
        {"variables": {"NCCL_DEBUG": "INFO", "HF_HOME": "/hf"}},
        {},
        "environment",
        "note",
        ["NCCL_DEBUG is WARN on node-0, INFO on node-1"],
    ),
    "a network card named on one node": (
        {"variables": node(0).variables | {"GLOO_SOCKET_IFNAME": "eth0"}},
        {},
        {},
        "environment",
        "note",
        ["GLOO_SOCKET_IFNAME is set on node-0, absent on node-1"],
    ),
    "wandb's key did not reach rank 0": (
        {"launcher_variables": {"WANDB_API_KEY": "secret 1"}, "variables": node(1).variables},
        {},
        {},
        "environment",
        "note",
        ["WANDB_API_KEY of the shell that typed deepspeed did not reach the ranks"],
    ),
    "another recipe": (
        {},
        {"plan": plan(recipe=recipe_with(lr=5e-4))},
        {},
        "recipe",
        "failed",
        ["training.lr is 0.001 on node-0 and 0.0005 on node-1"],
    ),
    "another DeepSpeed configuration": (
        {},
        {"plan": plan(ds_config={"zero_optimization": {"stage": 2}})},
        {},
        "recipe",
        "failed",
        ["--ds_config differs between node-0 and node-1"],
    ),
    "batch arithmetic": (
        {"plan": plan(problems={"batch": "training.global_batch_size = 7 is not"})},
        {"plan": plan(problems={"batch": "training.global_batch_size = 7 is not"})},
        {},
        "batch",
        "failed",
        ["training.global_batch_size = 7 is not"],
    ),
    "data missing on one node": (
        {},
        {"plan": plan(problems={"data": "data/a.bin: no such file"})},
        {},
        "data",
        "failed",
        ["on node-1: data/a.bin: no such file"],
    ),
    "other data on one node": (
        {},
        {"plan": plan(fingerprints=("e" * 64,))},
        {},
        "data",
        "failed",
        ["f" * 12 + " (data/a) on node-0", "e" * 12 + " (data/a) on node-1", "Copy node-0's"],
    ),
    "a run directory of one node's own": (
        {},
        {"run_dir_shared": False},
        {},
        "run_dir",
        "failed",
        ["wrote to /runs/x is not there on node-1", "a disk that all nodes share"],
    ),
    "a full disk": (
        {"free_bytes": 35 << 30},
        {},
        {},
        "disk",
        "failed",
        ["/runs/x has 35.00 GiB free", "keep_checkpoints = 3", "40.00 GiB more"],
    ),
    "a clock a little ahead": (
        {},
        {},
        {"clocks_s": [0.0, 0.0, 9.0, 9.0]},
        "clocks",
        "note",
        ["node-1 is 9 s ahead of node-0's"],
    ),
    "a clock far behind": (
        {},
        {},
        {"clocks_s": [0.0, 0.0, -3600.0, -3600.0]},
        "clocks",
        "failed",
        ["node-1 is 3600 s behind node-0's"],
    ),
    "a wrong sum": (
        {},
        {},
        {"sums_right": [True, True, True, False]},
        "all-reduce",
        "failed",
        ["wrong sum on rank 3 on node-1"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_by_its_check_alone(fault: str) -> None:
    here, there, between, check, status, words = FAULTS[fault]
    findings = examine([node(0, **here), node(1, **there)], measured(**between))
    bad = [finding for finding in findings if finding.status != "ok"]
    assert [(finding.check, finding.status) for finding in bad] == [(check, status)], bad
    for word in words:
        assert word in bad[0].sentence
    assert "\n" not in bad[0].sentence


@pytest.mark.parametrize(
    "there",
    [
        {"plan": plan(recipe=replace(RECIPE, data=DataConfig(prefixes=("/local/a",))))},  # staged elsewhere
        {"commit": None},  # an image without .git
        {"variables": node(1).variables | {"WANDB_MODE": "offline"}},  # wandb is rank 0's
    ],
)
def test_what_may_differ_is_left_alone(there: dict[str, Any]) -> None:
    assert {finding.status for finding in examine([node(0), node(1, **there)], measured())} == {"ok"}


def test_network_cards_may_have_other_names() -> None:
    both = [node(i, variables={"GLOO_SOCKET_IFNAME": f"eth{i}"}, launcher_variables=None) for i in range(2)]
    assert {finding.status for finding in examine(both, measured())} == {"ok"}


def test_checkpoints_that_are_there_need_no_more_room() -> None:
    nodes = [node(0, free_bytes=11 << 30, num_checkpoints=3), node(1)]
    assert {finding.status for finding in examine(nodes, measured())} == {"ok"}


def test_a_start_survives_a_tight_disk() -> None:
    """What the doctor alone calls a failure: the checkpoints of a run go on without one that did not fit."""
    nodes = [node(0, free_bytes=35 << 30), node(1)]
    for starting, status in ((False, "failed"), (True, "note")):
        bad = [finding for finding in examine(nodes, measured(), starting) if finding.status != "ok"]
        assert [(finding.check, finding.status) for finding in bad] == [("disk", status)]


def test_a_tensor_parallel_group_over_two_nodes_is_noted() -> None:
    nodes = [node(0, num_ranks=1), node(1, num_ranks=3, first_rank=1)]
    nodes[0] = replace(nodes[0], hostfile_slots={"a": 1, "b": 3})
    bad = [finding for finding in examine(nodes, measured()) if finding.status != "ok"]
    assert [(finding.check, finding.status) for finding in bad] == [("nodes", "note")]
    assert "start a multiple of 2 ranks on node-0, node-1" in bad[0].sentence


# ---- together ----


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_two_ranks_play_two_nodes(two_ranks, tmp_path: Path) -> None:
    shared = tmp_path / "run"
    results = two_ranks.run(examined, [shared, shared])
    assert results[0] == results[1]
    told = by_check(results[0])
    assert {finding.status for check, finding in told.items() if check != "nodes"} == {"ok"}, results[0]
    assert "are the one machine" in told["nodes"].sentence  # they are
    assert "GB/s" in told["all-reduce"].found
    assert not shared.exists(), "the probe left something"


def test_a_start_keeps_the_run_directory_if_all_is_well(two_ranks, tmp_path: Path) -> None:
    results = two_ranks.run(examined, [tmp_path / "run"] * 2, None, 0.0, True)
    assert "GB/s" not in by_check(results[0])["all-reduce"].found
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]
    results = two_ranks.run(examined, [tmp_path / "other"] * 2, 0, 0.0, True)
    assert by_check(results[0])["all-reduce"].status == "failed"
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_a_run_directory_that_is_not_shared_is_found(two_ranks, tmp_path: Path) -> None:
    results = two_ranks.run(examined, [tmp_path / "one", tmp_path / "two"])
    assert results[0] == results[1]
    told = by_check(results[0])
    assert told["run_dir"].status == "failed"
    assert (
        f"what rank 0 on {os.uname().nodename} wrote to {tmp_path / 'one'} is not there"
        in told["run_dir"].sentence
    )
    assert not list(tmp_path.iterdir())


def test_a_run_directory_that_cannot_be_written_is_found(two_ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = by_check(two_ranks.run(examined, [tmp_path / "file" / "run"] * 2)[0])
    assert told["run_dir"].status == "failed"
    assert "cannot write to --run_dir" in told["run_dir"].sentence


def test_a_wrong_sum_is_found(two_ranks, tmp_path: Path) -> None:
    """Rank 1 gets a sum with one element off."""
    results = two_ranks.run(examined, [tmp_path / "run"] * 2, 1)
    assert results[0] == results[1]
    assert "wrong sum on rank 1 on" in by_check(results[0])["all-reduce"].sentence


def test_another_nodes_clock_is_measured(two_ranks, tmp_path: Path) -> None:
    results = two_ranks.run(examined, [tmp_path / "run"] * 2, None, 7.0)
    assert "is 7 s ahead of" in by_check(results[0])["clocks"].sentence


def test_a_node_that_cannot_be_asked_stops_all_ranks_alike(two_ranks, tmp_path: Path) -> None:
    results = two_ranks.run(examined_with_trouble, [tmp_path / "run"] * 2)
    assert results[0] == results[1]
    assert results[0].endswith("PermissionError: no packages to be seen")
    assert not list(tmp_path.iterdir())


def test_a_package_without_metadata_is_absent_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, version = facts.versions(), importlib.metadata.version

    def stripped(package: str) -> str:
        if package == "safetensors":
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", stripped)
    assert facts.versions() == {package: each for package, each in sound.items() if package != "safetensors"}
    finding = check_versions([node(0, versions=sound), node(1, versions=facts.versions())])
    assert finding.status == "failed" and "absent on node-1" in finding.sentence


# ---- the environment file ----

VARIABLES = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "WANDB_API_KEY": "0123abcd",
    "HF_HOME": "/a folder/with $HOME, `date`, \"quotes\", \\ and 'ticks'",
    "PYTHONPATH": "/code:/more",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "WANDB_NOTES": "",
}


def remote_environment(path: Path) -> dict[str, str]:
    """What a remote shell has after DeepSpeed's runner has read the file and pdsh has sent its exports."""
    from deepspeed.launcher.multinode_runner import MultiNodeRunner

    exporter: Any = type("Exporter", (), {"exports": {}, "add_export": MultiNodeRunner.add_export})()
    for line in path.read_text().splitlines(keepends=True):  # as deepspeed.launcher.runner does
        key, value = line.split("=", maxsplit=1)
        exporter.add_export(key, value)
    exports = "".join(f"export {key}={value}; " for key, value in exporter.exports.items())
    output = subprocess.run(
        ["env", "-i", "/bin/sh", "-c", exports + "/usr/bin/env -0"], capture_output=True, check=True
    )
    return dict(item.split("=", 1) for item in output.stdout.decode().split("\0") if item)


def test_environment_file_survives_deepspeed_and_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "env"
    for name in list(environment.forwarded(os.environ)):
        monkeypatch.delenv(name)
    unforwarded = {
        "RANK": "0",
        "CUDA_VISIBLE_DEVICES": "3",
        "DS_ENV_FILE": "x",
        "HOME": "/root",
        "PATH": os.defpath,
    }
    for name, value in (VARIABLES | unforwarded).items():
        monkeypatch.setenv(name, value)
    assert doctor.main(["--write_env_file", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    found = remote_environment(path)
    assert {name: found.get(name) for name in VARIABLES} == VARIABLES
    assert not {"RANK", "CUDA_VISIBLE_DEVICES", "DS_ENV_FILE", "HOME"} & found.keys()
    assert not path.with_name("env.partial").exists()


def test_a_secret_is_said_to_be_printed_by_deepspeed(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123abcd")
    assert doctor.main(["--write_env_file", str(tmp_path / "env")]) == 0
    output = capsys.readouterr().out
    assert "prints the values of WANDB_API_KEY" in output
    assert "0123abcd" not in output
    assert "0123abcd" not in str(environment.shown(os.environ))


@pytest.mark.parametrize("value", ["two\nlines", " padded"])
def test_a_value_that_the_file_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError, match=r"HF_X has .*environment file cannot hold"):
        environment.write_env_file(tmp_path / "env", {"HF_X": value})
    assert not list(tmp_path.iterdir())


# ---- the command, alone ----


def run_doctor(corpus: Path, run_dir: Path, *options: str) -> int:
    root = Path(__file__).parents[1]
    arguments = f"--ds_config {root}/ds_configs/zero1.json --config {root}/recipes/demo.yaml --run_dir {run_dir}"
    return doctor.main([*shlex.split(arguments), f"--data.prefixes=[{corpus}]", *options])


def test_one_process_without_a_launcher(corpus_copy: Callable[..., Path], tmp_path, monkeypatch, capsys) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run_doctor(corpus_copy(), tmp_path / "run") == 0
    output = capsys.readouterr().out
    assert "fit for this run" in output
    assert "1 dataset, fingerprint" in output
    assert run_doctor(tmp_path / "nowhere", tmp_path / "run", "--training.global_batch_size=7") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("failed: data: ") and "nowhere" in line for line in lines)
    assert any(line.startswith("failed: batch: ") and "global_batch_size = 7" in line for line in lines)


@pytest.fixture
def checked_job(corpus_copy: Callable[..., Path], tmp_path, monkeypatch) -> job.Job:
    """Of one rank, that has not begun. No test builds its model."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(loop, "build_engine", lambda *_: pytest.fail("a model is built"))
    root = Path(__file__).parents[1]
    recipe = recipes.load(root / "recipes" / "demo.yaml")
    data = replace(recipe.data, prefixes=(str(corpus_copy()),), sequence_length=32, validation_fraction=0.2)
    return job.prepare(replace(recipe, data=data), root / "ds_configs" / "zero1.json", tmp_path / "run", 1)


def test_a_run_asks_before_it_builds_or_writes(checked_job: job.Job, monkeypatch) -> None:
    monkeypatch.setattr(examination, "_all_reduce", lambda *_, **__: (False, 0.0))
    with pytest.raises(UserError, match="wrong sum on rank 0"):
        loop.run(checked_job)
    left = [path.name for path in checked_job.run_dir.iterdir()]
    assert left == [run_directory.MET], "that the ranks have met is all that is written before they are asked"


def test_a_tight_disk_is_a_note_at_a_start_and_nothing_to_a_finished_run(
    checked_job: job.Job, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(accounting, "checkpoint_bytes", lambda *_: 1 << 60)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "build_engine", lambda *_: sys.exit("begins"))
        with pytest.raises(SystemExit, match="begins"):
            loop.run(checked_job)
    assert re.search("note: the disk of .* has .* free some", capsys.readouterr().out)
    steps = checked_job.recipe.training.train_steps
    monkeypatch.setattr(job.Job, "first_step", steps)
    assert loop.run(checked_job) == 0
    told = capsys.readouterr().out
    assert f"is done: all {steps} steps were trained" in told and "note: " not in told


def test_a_run_whose_last_checkpoint_is_damaged_is_asked_after_all(checked_job: job.Job, monkeypatch) -> None:
    monkeypatch.setattr(loop, "of_all_ranks", lambda _: [True])  # that it is finished, before they looked closely
    monkeypatch.setattr(examination, "_all_reduce", lambda *_, **__: (False, 0.0))
    with pytest.raises(UserError, match="wrong sum on rank 0"):
        loop.run(checked_job)
