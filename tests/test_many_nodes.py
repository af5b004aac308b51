"""The scripts for clusters: Slurm's, run with stand-ins for srun and scontrol, through torchrun to the last step.

Two hosts with ssh between them: tests/test_two_hosts.py.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from leviathan_ds import run_directory

ROOT = Path(__file__).parents[1]
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


def test_slurm_script_over_two_nodes_without_a_shared_dataset(
    tmp_path: Path, corpus_copy: Callable[..., Path]
) -> None:
    """One rank on each node, DP 2; the reference is one process with neither launcher nor second rank."""
    for node in (0, 1):
        prefix = corpus_copy(f"node{node}/local")
        assert prefix.name == "tiny"
        for shared in ("launchers", "ds_configs"):
            (tmp_path / f"node{node}" / shared).symlink_to(ROOT / shared)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    script(tmp_path / "bin" / "srun", SRUN)
    script(tmp_path / "bin" / "scontrol", "#!/bin/bash\nprintf '127.0.0.1\\nnode-1\\n'\n")
    script(tmp_path / ".venv" / "bin" / "activate", f"export PATH={Path(sys.executable).parent}:$PATH\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CLUSTER": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node-[0-1]",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "2",
    }

    def run(command: str) -> str:
        options = f"--ds_config ds_configs/zero1.json --config {tmp_path}/tiny.yaml"
        result = subprocess.run(
            shlex.split(f"{command} {options}"),
            cwd=tmp_path / "node0",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            check=False,
        )
        assert result.returncode == 0, result.stdout
        return result.stdout

    output = run(f"bash {ROOT}/launchers/slurm/pretrain.sbatch --run_dir {tmp_path}/run")
    assert "fit for this run" in output
    assert "2 ranks on 2 nodes" in output
    found = losses(tmp_path / "run")
    caches = [
        {path.name for path in (tmp_path / f"node{node}" / "local" / "tiny.index_cache").rglob("*.npy")}
        for node in (0, 1)
    ]
    assert caches[0] and caches[0] == caches[1]

    run(f"{sys.executable} {ROOT}/launchers/pretrain.py --run_dir {tmp_path}/alone")
    expected = losses(tmp_path / "alone")
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)


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
    assert failed[0].startswith(f"failed: environment: NCCL_ALGO is set on {name} and missing on {name}. Write")
    assert failed[1] == "failed: not fit for this run"
