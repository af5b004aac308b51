"""How long a save keeps the training waiting, written beside it and not; MB/s against plain torch.save and load.

    python -W ignore benchmarks/checkpoint.py [--hidden_size 512] [--repeats 5] [--folder DIR]

One process, ZeRO-2, float32, one thread for the training. The arms alternate; medians are printed as JSON lines.
stall_s of a save is what it adds to the steps around it: the time from its beginning until a whole number of steps
after the file is on the disk, less the time that as many steps take without a save.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from leviathan_ds import run_directory
from leviathan_ds.config import ModelConfig, Recipe, RunConfig, TrainingConfig
from leviathan_ds.data.loader import collate
from leviathan_ds.parallel import ds_config, topology
from leviathan_ds.training import checkpoint, loop
from leviathan_ds.training.checkpoint_engine import load_plain
from leviathan_ds.training.step import train_step

BATCH, SEQUENCE = 4, 128
CONFIG = Path(__file__).parent.parent / "ds_configs" / "zero2.json"


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured; default: /tmp")
    options = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(folder, options.hidden_size, options.repeats)
    finally:
        shutil.rmtree(folder)
        topology.shutdown()


def measure(folder: Path, hidden_size: int, repeats: int) -> None:
    topology.initialize(1)
    recipe = Recipe(
        model=ModelConfig(vocab_size=8192, hidden_size=hidden_size),
        training=TrainingConfig(micro_batch_size=BATCH, global_batch_size=BATCH, precision="fp32"),
    )
    filled = ds_config.fill(ds_config.read(CONFIG), recipe, 1, CONFIG)
    engine, num_parameters = loop.build_engine(recipe, filled)
    tokens = torch.randint(0, 8192, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    batch = collate([{"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(SEQUENCE)} for row in tokens])

    def step() -> None:
        train_step(engine, iter([batch]), 1, 1e-4, torch.device("cpu"))

    arms = {
        name: checkpoint.Checkpoints(
            engine, folder / name, replace(recipe, run=RunConfig(keep_checkpoints=1, async_save=name == "async"))
        )
        for name in ("blocking", "async")
    }
    times: dict[str, list[float]] = defaultdict(list)
    plain = folder / "plain.pt"
    for repeat in range(repeats + 1):  # the first one allocates memory and is not counted
        for name, checkpoints in arms.items():
            usual = statistics.median(timed(step) for _ in range(3))
            state = run_directory.TrainerState(repeat, repeat, {}, [], None)
            start, steps = time.perf_counter(), 0
            checkpoints.save(state)
            times[f"{name} call"].append(time.perf_counter() - start)
            while checkpoints.running:
                step()
                steps += 1
            checkpoints.wait()
            times[f"{name} stall"].append(time.perf_counter() - start - steps * usual)
        (written,) = run_directory.complete_checkpoints(folder / "async")
        states: dict[str, Any] = {path.name: load_plain(path) for path in written.glob("*.pt")}
        states["weights"] = {name: value.clone() for name, value in engine.module.named_parameters()}
        plain.unlink(missing_ok=True)  # a new file, like a checkpoint's
        times["torch.save"].append(timed(partial(torch.save, states, plain)))
        times["torch.save, fsync"].append(times["torch.save"][-1] + timed(partial(sync, plain)))
        states.clear()
        times["torch.load"].append(timed(partial(torch.load, plain, weights_only=False)))
        times["verify"].append(timed(partial(checkpoint.damage, written)))
        times["load"].append(timed(partial(checkpoint.load, engine, written)))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    size = sum(path.stat().st_size for path in written.iterdir()) / 1e6
    record = {"benchmark": "checkpoint", "parameters": num_parameters, "MB": round(size)}
    for name in ("blocking", "async"):
        stall = medians[f"{name} stall"]
        figures = {"stall_s": stall, "call_s": medians[f"{name} call"], "all_stalls_s": times[f"{name} stall"][1:]}
        print(json.dumps({**record, "arm": f"{name} save", **figures, "share": stall / medians["blocking stall"]}))
    for name, seconds in (
        ("blocking save", medians["blocking call"]),
        ("torch.save", medians["torch.save"]),
        ("torch.save, fsync", medians["torch.save, fsync"]),
        ("verify", medians["verify"]),
        ("load, verified", medians["verify"] + medians["load"]),
        ("torch.load", medians["torch.load"]),
    ):
        megabytes = (plain.stat().st_size / 1e6) if name.startswith("torch") else size
        print(json.dumps({**record, "arm": name, "s": seconds, "MB_per_s": megabytes / seconds}))


if __name__ == "__main__":
    main()
