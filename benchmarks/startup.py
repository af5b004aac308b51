"""Seconds from `deepspeed …` to the first step of the demo recipe, and of `--help` of the data tools.

    python benchmarks/startup.py

Runs each command five times and prints medians as JSON lines. The demo's data must be prepared (make demo).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPEATS = 5


def seconds_to_first_step() -> float:
    """Until the first line of metrics.jsonl that holds a training loss."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("deepspeed")), "launchers/pretrain.py"]
        command += [
            "--ds_config",
            "ds_configs/zero2.json",
            "--config",
            "recipes/demo.yaml",
            "--run_dir",
            f"{folder}/run",
        ]
        command += ["--run.log_interval=1", "--training.train_steps=1", "--training.warmup_steps=1"]
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics = Path(folder) / "run" / "metrics.jsonl"
        while not (metrics.is_file() and '"loss"' in metrics.read_text()):
            if process.poll() not in {None, 0}:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.05)
        elapsed = time.monotonic() - start
        process.wait()
        return elapsed


def seconds_of_help(module: str) -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def main() -> None:
    first = [seconds_to_first_step() for _ in range(REPEATS)]
    print(json.dumps({"benchmark": "first step", "median_s": statistics.median(first), "all_s": first}))
    for module in ("data_prep.train_tokenizer", "data_prep.preprocess", "data_prep.verify"):
        times = [seconds_of_help(module) for _ in range(REPEATS)]
        print(json.dumps({"benchmark": f"{module} --help", "median_s": statistics.median(times)}))


if __name__ == "__main__":
    main()
