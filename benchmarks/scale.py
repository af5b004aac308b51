"""Bytes that one optimizer step communicates: counted in real runs, against the closed formula; and predictions.

    python benchmarks/scale.py             counts on 1, 2 and 4 gloo ranks, a JSON line a layout; exit code 1 if
                                           a count differs from the formula
    python benchmarks/scale.py --predict   tables of the 1.2B recipe on 8 to 512 GPUs: predicted, not measured

The counts are of small models: the formula (leviathan_ds/communication.py) is exact at any size.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leviathan_ds import recipe as recipes
from leviathan_ds.accounting import ZeroStage
from leviathan_ds.communication import communication
from leviathan_ds.config import (
    DataConfig,
    EmbeddingKind,
    GeneratorConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    Recipe,
    TrainingConfig,
)
from leviathan_ds.scaling import Cluster, predict_step, with_batch

ROOT = Path(__file__).parent.parent
WORLDS = (1, 2, 4)
STEPS = 3  # ZeRO-3 traces the first two
EMBEDDINGS: tuple[EmbeddingKind, ...] = ("leviathan", "dense_tied", "dense_untied")


@dataclass(frozen=True)
class Layout:
    world_size: int
    zero_stage: ZeroStage
    tp: int = 1
    sequence_parallel: bool = False
    embedding: EmbeddingKind = "leviathan"
    accumulation: int = 1
    precision: Precision = "fp32"

    @property
    def recipe(self) -> Recipe:
        """A small model whose sizes divide badly, so that padding shows."""
        model = ModelConfig(
            vocab_size=1003,
            embedding=self.embedding,
            hidden_size=48,
            num_layers=3,
            num_attention_heads=4,
            num_query_groups=2,
            generator=GeneratorConfig(seed_size=9, num_heads=3, num_knots=5, rank=7),
        )
        data_parallel_size = self.world_size // self.tp
        training = TrainingConfig(
            micro_batch_size=2,
            global_batch_size=2 * self.accumulation * data_parallel_size,
            warmup_steps=0,
            precision=self.precision,
        )
        parallel = ParallelConfig(self.tp, self.sequence_parallel)
        return Recipe(model=model, parallel=parallel, data=DataConfig(sequence_length=32), training=training)


def layouts(world_size: int) -> list[Layout]:
    """World 1; DP = 2 and TP 2 × DP 2 at every ZeRO stage; TP = 2 with and without sequence parallelism; each
    with its twins."""
    shapes = [Layout(world_size, 1)]
    if world_size > 1:
        stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
        shapes = [Layout(world_size, stage, tp=world_size // 2) for stage in stages]
        if world_size == 2:
            shapes += [Layout(2, 1, tp=2, sequence_parallel=parallel) for parallel in (False, True)]
        shapes += [replace(shape, precision="bf16") for shape in shapes if shape.zero_stage > 0]
    return [
        replace(shape, embedding=embedding, accumulation=accumulation)
        for shape in shapes
        for embedding in EMBEDDINGS
        for accumulation in (1, 2)
    ]


def count(layout: Layout) -> tuple[dict[str, int], list[int]]:
    """Bytes of the last of STEPS optimizer steps by group and kind, and the distinct ids of its micro-batches.

    Collective over `layout.world_size` ranks.
    """
    import torch

    from leviathan_ds.data.loader import collate
    from leviathan_ds.data.sampler import GlobalBatchSampler
    from leviathan_ds.parallel import ds_config, topology
    from leviathan_ds.parallel.collectives import CountCollectives
    from leviathan_ds.parallel.watchdog import Watchdog
    from leviathan_ds.training import loop
    from leviathan_ds.training.faults import StepGuard
    from leviathan_ds.training.metrics import Metrics
    from leviathan_ds.training.step import train_step

    topology.initialize(layout.tp)
    recipe = layout.recipe
    path = ROOT / "ds_configs" / f"zero{layout.zero_stage}.json"
    engine, _ = loop.build_engine(
        recipe, ds_config.fill(ds_config.read(path), recipe, topology.world_size(), path)
    )
    # As in a run; no step is skipped, so that its metrics and its folder are never used.
    sampler = GlobalBatchSampler(
        0,
        STEPS,
        recipe.training.global_batch_size,
        2,
        topology.data_parallel_rank(),
        topology.data_parallel_size(),
    )
    silent = Metrics(Path(), recipe.run, STEPS, 0, None, enabled=False, settings={})
    guard = StepGuard(recipe.faults, sampler, Watchdog(600), None, Path(), {}, silent, {})
    generator = torch.Generator().manual_seed(topology.data_parallel_rank())
    shape = (recipe.training.micro_batch_size, recipe.data.sequence_length + 1)
    for step in range(STEPS):
        rows = [
            torch.randint(0, recipe.model.vocabulary, shape, generator=generator)
            for _ in range(layout.accumulation)
        ]
        batches = [
            collate(
                [{"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(shape[1] - 1)} for row in batch]
            )
            for batch in rows
        ]
        with CountCollectives() as counted:
            train_step(engine, iter(batches), layout.accumulation, recipe.training.lr, topology.device(), guard)
            guard.settle(engine, step)
    engine.destroy()
    found = {" ".join(key): value for key, value in sorted(counted.bytes.items())}
    return found, [len(batch.distinct_ids) for batch in batches]


def _rank(rank: int, world_size: int, port: int, output: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    counts = [count(layout) for layout in layouts(world_size)]
    Path(output, f"{rank}.json").write_text(json.dumps(counts))


def counted_on(world_size: int) -> list[list[tuple[dict[str, int], list[int]]]]:
    """Counts of every layout, from each of `world_size` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, port, folder)) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def compare() -> bool:
    """Print a JSON line for each layout; whether all counts equal the formula on all ranks."""
    all_equal = True
    for world_size in WORLDS:
        for layout, *ranks in zip(layouts(world_size), *counted_on(world_size), strict=True):
            formulas = [_formula(layout, distinct_ids) for _, distinct_ids in ranks]
            equal = all(counted == formula for (counted, _), formula in zip(ranks, formulas, strict=True))
            all_equal &= equal
            record: dict[str, Any] = {"benchmark": "scale", **vars(layout)}
            record |= {"counted_bytes": ranks[0][0], "formula_bytes": formulas[0], "equal": equal}
            print(json.dumps(record))
    return all_equal


def _formula(layout: Layout, distinct_ids: list[int]) -> dict[str, int]:
    traffic = communication(layout.recipe, layout.zero_stage, layout.world_size, distinct_ids)
    return {" ".join(key): value for key, value in sorted(traffic.items()) if value}


# ---- predictions ----

GPUS = (8, 16, 32, 64, 128, 256, 512)
FURTHEST = 1 << 16  # GPUs up to which the end of scaling is looked for
STRONG: tuple[tuple[int, ZeroStage], ...] = ((1 << 18, 1), (1 << 20, 1), (1 << 20, 3), (1 << 22, 1))


def predict(path: Path) -> None:
    """Print step times of a recipe by number of GPUs, and where each way of scaling stops."""
    recipe, cluster = replace(recipes.load(path), parallel=ParallelConfig()), Cluster()
    length = recipe.data.sequence_length
    print(f"Predicted, not measured: {path.stem}, sequences of {length} tokens, bf16, no tensor parallelism.")
    for tokens, stage in STRONG:
        batch = tokens // length
        print(f"\nStrong scaling, ZeRO-{stage}, {tokens:,} tokens a step:\n")
        _print_table({gpus: with_batch(recipe, batch, gpus) for gpus in GPUS}, stage, cluster)
        print(f"\n{_end_of_scaling(recipe, batch, stage, cluster)}")
    micro = recipe.training.micro_batch_size
    print(f"\nWeak scaling, ZeRO-1, {micro * length:,} tokens a GPU and step:\n")
    _print_table({gpus: with_batch(recipe, micro * gpus, gpus) for gpus in GPUS}, 1, cluster)
    print(f"\nBy layout: 512 GPUs, {1 << 22:,} tokens a step, sequence parallelism with TP:\n")
    _print_layouts(recipe, (1 << 22) // length, cluster)


def _print_table(sizes: dict[int, Recipe | None], stage: ZeroStage, cluster: Cluster) -> None:
    columns = ("GPUs", "sequences a GPU", "compute ms", "communication ms", "step ms", "share", "overlapped ms")
    print("|", " | ".join((*columns, "tokens/s")), "|")
    print("|--:" * 8 + "|")
    for gpus, recipe in sizes.items():
        if recipe is None:
            continue
        time = predict_step(recipe, stage, gpus, cluster)
        batch = recipe.training.global_batch_size
        spent = (time.compute_s, time.total_s - time.compute_s, time.total_s)
        row = " | ".join(f"{1e3 * seconds:.1f}" for seconds in spent)
        rate = batch * recipe.data.sequence_length / time.total_s
        overlapped = f"{time.communication_share:.0%} | {1e3 * time.overlapped_s:.1f}"
        print(f"| {gpus} | {batch // gpus} | {row} | {overlapped} | {rate:,.0f} |")


def _end_of_scaling(recipe: Recipe, batch: int, stage: ZeroStage, cluster: Cluster) -> str:
    """Doubles the GPUs until a step is mostly communication or a GPU has no whole sequence."""
    gpus = 1
    while gpus <= FURTHEST:
        each = with_batch(recipe, batch, 2 * gpus)
        if each is None:
            return f"Stops at {gpus:,} GPUs: on more, a GPU has less than one sequence."
        share = predict_step(each, stage, 2 * gpus, cluster).communication_share
        if share > 0.5:
            return f"Stops at {gpus:,} GPUs: on twice as many, {share:.0%} of the step is communication."
        gpus *= 2
    return f"Does not stop before {FURTHEST:,} GPUs."


def _print_layouts(recipe: Recipe, batch: int, cluster: Cluster) -> None:
    print("| layout | compute ms | data-parallel ms | tensor-parallel ms | step ms | share |")
    print("|---|--:|--:|--:|--:|--:|")
    stages: tuple[ZeroStage, ...] = (1, 2, 3)
    for tp in (1, 2, 4, 8):
        each = with_batch(replace(recipe, parallel=ParallelConfig(tp, sequence_parallel=tp > 1)), batch, 512)
        assert each is not None
        for stage in stages:
            time = predict_step(each, stage, 512, cluster)
            spent = (time.compute_s, time.data_parallel_s, time.tensor_parallel_s, time.total_s)
            row = " | ".join(f"{1e3 * seconds:.1f}" for seconds in spent)
            print(f"| TP {tp}, ZeRO-{stage} | {row} | {time.communication_share:.0%} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--config", type=Path, default=ROOT / "recipes" / "leviathan_1200m.yaml")
    options = parser.parse_args()
    if options.predict:
        predict(options.config)
        return 0
    return 0 if compare() else 1


if __name__ == "__main__":
    sys.exit(main())
