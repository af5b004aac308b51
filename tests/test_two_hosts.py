"""Two hosts for real: ssh, pdsh and a network between them, a host killed in mid-run, the job started again.

sudo apt-get install openssh-server pdsh iproute2; then, as root: pytest -m slow -s tests/test_two_hosts.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from hosts import Cluster, Host, why_impossible
from safetensors.torch import load_file

from leviathan_ds import accounting, run_directory
from leviathan_ds import recipe as recipes
from leviathan_ds.parallel.launch import EXIT_STOPPED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DEEPSPEED = Path(sys.executable).with_name("deepspeed")
STEPS, SAVE, KILL_AFTER = 80, 10, 25
LIMIT_S = 400
RECIPE = {
    "model": {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4},
    "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "data": {"sequence_length": 64, "validation_fraction": 0.2, "num_workers": 0},
    "training": {"train_steps": STEPS, "micro_batch_size": 2, "global_batch_size": 8, "precision": "fp32"},
    "run": {"log_interval": 1, "eval_interval": 40, "eval_samples": 4, "save_interval": SAVE},
}
RECIPE["model"]["generator"] = {"seed_size": 8, "num_heads": 2, "num_knots": 6, "rank": 8}
RECIPE["training"]["warmup_steps"] = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, corpus: Path) -> Iterator[Cluster]:
    reason = why_impossible()
    if reason is not None:
        pytest.skip(f"no two hosts here: {reason}")
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        prefix = made.disk / corpus.name
        (made.folder / "tiny.yaml").write_text(
            yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "prefixes": [str(prefix)]}})
        )
        (made.folder / "hosts").write_text("node-a slots=2\nnode-b slots=2\n")
        made.a.run(
            f"cd {ROOT}; PYTHONPATH={ROOT} GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 "
            f"DS_ACCELERATOR=cpu {sys.executable} launchers/doctor.py --write_env_file {made.folder}/env"
        )
        for host in made.hosts:
            copy_data(host, corpus)
        yield made


def copy_data(host: Host, corpus: Path) -> None:
    """The dataset onto the host's own disk, as a user would stage it: without an index cache."""
    files = " ".join(str(path) for path in corpus.parent.iterdir() if path.is_file())
    host.run(f"cp {files} {host.cluster.disk}")


def start(
    cluster: Cluster, launcher: str, run_dir: Path, *options: str, variables: str = "", under: str = ""
) -> subprocess.Popen[str]:
    """`deepspeed` typed on node-a, over both hosts, perhaps under another command."""
    folder = cluster.folder
    line = (
        f"cd {ROOT}; {variables} PYTHONPATH={ROOT} DS_ENV_FILE={folder}/env "
        f"PDSH_SSH_ARGS_APPEND='-F {folder}/ssh_config' {under} "
        f"{DEEPSPEED} --hostfile {folder}/hosts --launcher pdsh --no_ssh_check --master_addr {cluster.a.address} "
        f"launchers/{launcher} --ds_config ds_configs/zero1.json --config {folder}/tiny.yaml --run_dir {run_dir} "
        + " ".join(options)
    )
    command = cluster.a.command(line)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    return output


def steps(run_dir: Path) -> dict[int, dict[str, float]]:
    """What does not depend on the clock, by step."""
    path = run_dir / run_directory.METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    kept = ("loss", "lr", "grad_norm", "val_loss")
    return {line["step"]: {key: line[key] for key in kept if key in line} for line in lines if "loss" in line}


def test_doctor_finds_two_sound_hosts_fit(cluster: Cluster) -> None:
    process = start(cluster, "doctor.py", cluster.folder / "sound")
    output = finish(process)
    print("\n".join(line for line in output.splitlines() if "[INFO]" not in line))
    assert process.returncode == 0, output
    assert "fit for this run" in output
    assert "node-a (2 × cpu), node-b (2 × cpu)" in output
    assert "4 slots on 2 hosts; 4 ranks on 2 nodes" in output
    assert "GB/s" in output
    assert not (cluster.folder / "sound").exists()


def test_doctor_names_everything_that_is_wrong(cluster: Cluster, corpus: Path) -> None:
    cluster.b.run(f"rm {cluster.disk}/{corpus.name}.bin")
    try:
        process = start(cluster, "doctor.py", cluster.disk / "run", variables="NVIDIA_TF32_OVERRIDE=1")
        output = finish(process)
    finally:
        copy_data(cluster.b, corpus)
    print("\n".join(line for line in output.splitlines() if "[INFO]" not in line))
    assert process.returncode != 0
    sentences = [line.split("failed: ", 1)[1] for line in output.splitlines() if "failed: " in line]
    told = {sentence.split(": ")[0]: sentence for sentence in sentences}
    assert "NVIDIA_TF32_OVERRIDE of the shell that typed deepspeed did not reach" in told["environment"]
    assert f"on node-b: {cluster.disk}/{corpus.name}.bin: no such file" in told["data"]
    assert "is not there on node-b" in told["run_dir"]
    assert told.keys() == {"environment", "data", "run_dir", "not fit for this run"}


def test_a_run_directory_on_each_hosts_own_disk_is_refused_at_the_first_start(cluster: Cluster) -> None:
    process = start(cluster, "pretrain.py", cluster.disk / "run")
    output = finish(process)
    assert process.returncode != 0
    assert output.count("error: what rank 0 on node-a wrote to") == 2  # one line for each node
    assert "is not there on node-b" in output
    for host in cluster.hosts:
        left = host.run(f"mkdir -p {cluster.disk}/run; ls -A {cluster.disk}/run").stdout.split()
        assert set(left) <= {run_directory.LOCK, run_directory.MET}, "something was left behind"


def test_a_host_that_is_down_is_named(cluster: Cluster, corpus: Path) -> None:
    cluster.b.kill()
    try:
        process = start(cluster, "doctor.py", cluster.folder / "down", "--timeout_s 20")
        output = finish(process)
    finally:
        cluster.b.start()
        copy_data(cluster.b, corpus)
    assert process.returncode != 0
    assert "2 of 4 ranks have come; missing: ranks 2, 3 of node-b" in output


def test_a_killed_host_and_a_second_start_end_as_one_undisturbed_machine(cluster: Cluster, corpus: Path) -> None:
    """TP 2 within each host, DP 2 across. The reference runs on one machine, without ssh or a second host."""
    run_dir, alone = cluster.folder / "run", cluster.folder / "undisturbed"
    began = time.monotonic()
    process = start(cluster, "pretrain.py", run_dir)
    while len(steps(run_dir)) < KILL_AFTER:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < began + LIMIT_S, "no step"
        time.sleep(0.02)
    cluster.b.kill()
    killed = time.monotonic()
    output = finish(process)
    print(
        f"node-b killed after step {len(steps(run_dir))}; deepspeed ended {time.monotonic() - killed:.1f} s later"
    )
    assert process.returncode != 0, output
    assert KILL_AFTER <= len(steps(run_dir)) < STEPS, "killed in the middle"
    while cluster.a.run("pgrep -f launchers/pretrain[.]py", check=False).returncode == 0:
        assert time.monotonic() < killed + LIMIT_S, "a rank of node-a lives on"
        time.sleep(0.5)

    cluster.b.start()  # a fresh machine: an empty disk
    copy_data(cluster.b, corpus)
    began = time.monotonic()
    process = start(cluster, "pretrain.py", run_dir)
    output = finish(process)
    assert process.returncode == 0, output
    resumed = next(line for line in output.splitlines() if "resuming at step" in line)
    print(f"{resumed.split(': ', 1)[-1].strip()}; done in {time.monotonic() - began:.1f} s")
    for host in cluster.hosts:  # built on each, though node-b holds no rank 0
        assert "build.lock" in host.run(f"ls {cluster.disk}/{corpus.name}.index_cache").stdout

    shutil.copytree(corpus.parent, cluster.folder / "copy", ignore=shutil.ignore_patterns("*.index_cache"))
    subprocess.run(
        f"{DEEPSPEED} --num_gpus 4 --master_port 29533 launchers/pretrain.py --ds_config ds_configs/zero1.json "
        f"--config {cluster.folder}/tiny.yaml --run_dir {alone} "
        f"--data.prefixes [{cluster.folder}/copy/{corpus.name}]".split(),
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert list(steps(run_dir)) == list(range(1, STEPS + 1))
    assert steps(run_dir) == steps(alone), "bitwise"
    ours, reference = (run_directory.complete_checkpoints(folder)[-1] for folder in (run_dir, alone))
    for path in sorted(reference.glob("weights_tp*.safetensors")):
        expected, found = load_file(path), load_file(ours / path.name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), path.name
    print(f"{STEPS} losses, gradient norms and all weights equal one undisturbed machine's bitwise")
    size = sum(path.stat().st_size for path in ours.rglob("*") if path.is_file())
    estimate = accounting.checkpoint_bytes(recipes.load(run_dir / run_directory.RECIPE), zero_stage=1)
    print(f"a checkpoint: {size:,} bytes, estimated {estimate:,}")
    assert estimate < size < 1.25 * estimate  # random states and framing weigh something at this size


def test_a_supervised_run_saves_on_both_hosts_at_sigterm(cluster: Cluster) -> None:
    """No rank is below the supervisor: pdsh starts them by sshd."""
    run_dir = cluster.folder / "stopped"
    supervise = f"{sys.executable} launchers/supervise.py --auto_restart 2 --"
    process = start(cluster, "pretrain.py", run_dir, "--training.train_steps=4000", under=supervise)
    began = time.monotonic()
    while len(steps(run_dir)) < 3:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < began + LIMIT_S, "no step"
        time.sleep(0.1)
    cluster.a.run(f"pkill -TERM -f '^{sys.executable} launchers/supervise'")
    output = finish(process)
    assert process.returncode == EXIT_STOPPED, output
    assert "1 of 4 ranks got SIGTERM, SIGUSR1 or RUN/stop; saved, the same command goes on" in output, output
    assert "no restart: asked to stop" in output
    saved = run_directory.complete_checkpoints(run_dir)[-1]
    assert run_directory.step_of(saved) == max(steps(run_dir))
    assert not (run_dir / run_directory.STOP).exists()
