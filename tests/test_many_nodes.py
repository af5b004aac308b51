"""The scripts for clusters: Slurm's, run with stand-ins for srun and scontrol, through torchrun to the last step.

Two hosts with ssh between them: tests/test_two_hosts.py.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from leviathan_ds import run_directory

ROOT = Path(__file__).parents[1]
SBATCH = ROOT / "launchers" / "slurm" / "pretrain.sbatch"
STEPS = 6
RECIPE = {
    "model": {
        "hidden_size": 32,
        "num_layers": 1,
        "num_attention_heads": 2,
        "generator": {"seed_size": 8, "num_heads": 2, "rank": 4},
    },
    "data": {"prefixes": ["local/tiny"], "sequence_length": 32, "validation_fraction": 0.2, "num_workers": 0},
    "training": {
        "train_steps": STEPS,
        "warmup_steps": 1,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "precision": "fp32",
    },
    "run": {"log_interval": 2, "eval_interval": 6, "eval_samples": 2, "save_interval": 6},
}

# Each node's working directory is its own disk.
SRUN = """#!/bin/bash
shift
for node in 0 1; do (cd "$CLUSTER/node$node" && SLURM_NODEID=$node exec "$@") & done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status
"""


def script(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / run_directory.METRICS).read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of the batch script: two nodes, played by this machine; python and torchrun are ours."""
    script(tmp_path / "bin" / "srun", SRUN)
    script(tmp_path / "bin" / "scontrol", "#!/bin/bash\nprintf '127.0.0.1\\nnode-1\\n'\n")
    script(
        tmp_path / ".venv" / "bin" / "activate",
        f"export PATH={tmp_path}/bin:{Path(sys.executable).parent}:$PATH\n",
    )
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return environment | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CLUSTER": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node-[0-1]",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "2",
    }


def stage(tmp_path: Path, corpus_copy: Callable[..., Path], recipe: dict[str, Any]) -> str:
    """Code and a dataset of its own on each node; returns the options of a run."""
    for node in (0, 1):
        prefix = corpus_copy(f"node{node}/local")
        assert prefix.name == "tiny"
        for shared in ("launchers", "ds_configs"):
            (tmp_path / f"node{node}" / shared).symlink_to(ROOT / shared)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return f"--ds_config ds_configs/zero1.json --config {tmp_path}/tiny.yaml"


def batch(slurm: dict[str, str], options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        shlex.split(f"bash {SBATCH} {options}"),
        env=slurm,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(process: subprocess.Popen[str], came: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not came():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_slurm_script_over_two_nodes_without_a_shared_dataset(
    tmp_path: Path, corpus_copy: Callable[..., Path], slurm: dict[str, str]
) -> None:
    """One rank on each node, DP 2; the reference is one process with neither launcher nor second rank."""
    options = stage(tmp_path, corpus_copy, RECIPE)
    process = batch(slurm, f"{options} --run_dir {tmp_path}/run")
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    assert "fit for this run" in output
    assert "2 ranks on 2 nodes" in output
    found = losses(tmp_path / "run")
    caches = [
        {path.name for path in (tmp_path / f"node{node}" / "local" / "tiny.index_cache").rglob("*.npy")}
        for node in (0, 1)
    ]
    assert caches[0] and caches[0] == caches[1]

    alone = f"{sys.executable} {ROOT}/launchers/pretrain.py {options} --run_dir {tmp_path}/alone"
    result = subprocess.run(
        shlex.split(alone), cwd=tmp_path / "node0", env=slurm, capture_output=True, timeout=400, check=False
    )
    assert result.returncode == 0, result.stderr.decode()
    expected = losses(tmp_path / "alone")
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_slurm_signal_makes_the_run_save_and_the_next_job_goes_on(
    tmp_path: Path, corpus_copy: Callable[..., Path], slurm: dict[str, str]
) -> None:
    steps = 4000
    options = stage(tmp_path, corpus_copy, RECIPE | {"training": RECIPE["training"] | {"train_steps": steps}})
    options += (
        f" --run_dir {tmp_path}/run --run.save_interval={steps} --run.log_interval=1 --run.eval_interval={steps}"
    )
    process = batch(slurm, options)
    metrics = tmp_path / "run" / run_directory.METRICS
    wait_until(process, lambda: metrics.is_file() and len(losses(tmp_path / "run")) > 3, 300)
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(timeout=200)[0]
    assert process.returncode != 0
    assert "1 of 2 ranks got SIGTERM, SIGUSR1 or RUN/stop; saved, the same command goes on" in output, output
    (saved,) = run_directory.complete_checkpoints(tmp_path / "run")
    step = run_directory.step_of(saved)
    assert step < steps
    process = batch(slurm, options)
    wait_until(process, lambda: len(losses(tmp_path / "run")) > step + 3, 300)
    process.send_signal(signal.SIGUSR1)
    assert f"resuming at step {step}" in process.communicate(timeout=200)[0]


# A torchrun that is asked in the midst of a start, whose rank 0 then removes the request; 1 is all it ends with.
STARTING = """#!/bin/bash
[[ $* == *launchers/doctor.py* ]] && exit 0
touch "$CLUSTER/run/starting$SLURM_NODEID"
if [[ $SLURM_NODEID == 0 ]]; then
    until [[ -e $CLUSTER/run/stop ]]; do sleep 0.1; done
    rm "$CLUSTER/run/stop"
fi
touch "$CLUSTER/run/trains$SLURM_NODEID"
until [[ -e $CLUSTER/run/stop && -e $CLUSTER/run/trains0 ]]; do sleep 0.1; done
touch "$CLUSTER/run/saved$SLURM_NODEID"
exit 1
"""


def test_slurm_script_asks_the_run_by_its_file_until_it_ends(tmp_path: Path, slurm: dict[str, str]) -> None:
    script(tmp_path / "bin" / "torchrun", STARTING)
    (tmp_path / "run").mkdir()
    process = batch(slurm, "--run_dir=run")  # elsewhere in two words
    wait_until(process, lambda: all((tmp_path / "run" / f"starting{node}").exists() for node in (0, 1)), 30)
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1, output
    assert all((tmp_path / "run" / f"saved{node}").exists() for node in (0, 1))


def test_slurm_script_ends_as_its_run_does(tmp_path: Path, slurm: dict[str, str]) -> None:
    script(tmp_path / "bin" / "torchrun", "#!/bin/bash\n[[ $* == *doctor* ]] && exit 0\nexit 3\n")
    (tmp_path / "run").mkdir()
    process = batch(slurm, "--run_dir run")
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert not (tmp_path / "run" / "stop").exists()
    process = batch(slurm, "--config x.yaml")
    assert process.communicate(timeout=60)[0].startswith("error: no --run_dir")
    assert process.returncode == 2


def test_kubernetes_hands_sigterm_to_torchrun(tmp_path: Path) -> None:
    """The container's command as it stands, with a torchrun that tells its number and dies of the signal."""
    _, job = yaml.safe_load_all((ROOT / "launchers" / "kubernetes" / "pretrain.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    script(
        tmp_path / "torchrun",
        "#!/bin/bash\n[[ $* == *launchers/doctor.py* ]] && exit 0\n"
        "[[ $* == *launchers/pretrain.py* ]] && echo $$ && exec sleep 60\n",
    )
    environment = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [*container["command"], *container["args"]],
        env=environment | {"JOB_COMPLETION_INDEX": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid, "a shell in between would keep the signal"
    process.terminate()
    assert process.wait(timeout=30) == -signal.SIGTERM
    assert pod["terminationGracePeriodSeconds"] > int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])


def test_deepspeed_without_ssh_on_each_node(tmp_path: Path, corpus: Path) -> None:
    """Two launchers on this machine play two hosts; node 1's caller has set what node 0's has not."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "prefixes": [str(corpus)]}})
    )
    port = 20000 + os.getpid() % 20000
    command = (
        f"{Path(sys.executable).with_name('deepspeed')} --hostfile {hosts} --no_ssh --master_addr 127.0.0.1 "
        f"--master_port {port} --node_rank %d {ROOT}/launchers/doctor.py --ds_config {ROOT}/ds_configs/zero1.json "
        f"--config {tmp_path}/tiny.yaml --run_dir {tmp_path}/run --timeout_s 200"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            shlex.split(command % node),
            env=environment | ({"NCCL_ALGO": "Ring"} if node == 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    output = "".join(node.communicate(timeout=400)[0] for node in nodes)
    assert [node.returncode != 0 for node in nodes] == [True, True], output
    assert f"{hosts}: 2 slots on 2 hosts; 2 ranks on 2 nodes" in " ".join(output.replace("│", " ").split())
    failed = [line for line in output.splitlines() if line.startswith("failed: ")]
    name = os.uname().nodename
    assert len(failed) == 2, output
    assert failed[0].startswith(f"failed: environment: NCCL_ALGO is absent on {name}, Ring on {name}. Write")
    assert failed[1] == "failed: not fit for this run"
