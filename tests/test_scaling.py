"""The formula of communication against counts of real steps, to the byte; predictions against hand arithmetic."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from distributed_cases import Case, counted_collectives, counted_log, counted_over_a_strange_group, counted_run

from leviathan_ds import accounting
from leviathan_ds import recipe as recipes
from leviathan_ds.communication import Zero3Limits, communication
from leviathan_ds.config import ParallelConfig
from leviathan_ds.scaling import Cluster, predict_step, with_batch

# Without prefetching and with these limits, ZeRO-3 releases and gathers again even in a tiny model.
NOTHING_KEPT = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
SOME_KEPT = {"stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 30_000}

CASES = [
    (Case(zero="zero0", accumulation=2), {}),
    (Case(zero="zero1", accumulation=2), {}),
    (Case(zero="zero1", precision="bf16"), {}),
    (Case(zero="zero2", accumulation=2, precision="bf16"), {}),
    (Case(zero="zero2", embedding="dense_untied"), {}),
    (Case(zero="zero3", accumulation=2, precision="bf16"), {}),
    (Case(zero="zero3", accumulation=2, recompute="full"), SOME_KEPT),
    (Case(zero="zero3", embedding="dense_tied"), NOTHING_KEPT),
    (Case(tp=2, zero="zero0"), {}),
    (Case(tp=2, zero="zero1", accumulation=2, precision="bf16"), {}),
    (Case(tp=2, zero="zero2", embedding="dense_tied", recompute="selective"), {}),
    (Case(tp=2, zero="zero1", sequence_parallel=True, precision="bf16"), {}),
    (Case(tp=2, zero="zero3", sequence_parallel=True, embedding="dense_untied", recompute="full"), {}),
]


def check(pool, case: Case, limits: dict[str, int], world_size: int) -> None:
    settings = limits | ({"stage3_prefetch_bucket_size": 0} if limits else {})
    for recipe, ids, counted in pool.run(counted_run, replace(case, steps=3), settings):
        kept = Zero3Limits(**{key.removeprefix("stage3_"): value for key, value in limits.items()})
        stage = int(case.zero.removeprefix("zero"))
        formula = communication(recipe, stage, world_size, ids, kept)  # pyright: ignore[reportArgumentType]
        assert +formula == counted
        assert counted.total() > 0


@pytest.mark.parametrize("case, limits", CASES)
def test_two_ranks_communicate_what_the_formula_says(two_ranks, case, limits):
    check(two_ranks, case, limits, 2)


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, zero="zero0", accumulation=2),
        Case(tp=2, zero="zero1", precision="bf16"),
        Case(tp=2, zero="zero2", accumulation=2),
        Case(tp=2, zero="zero3", precision="bf16"),
        Case(zero="zero3"),
    ],
)
def test_four_ranks_communicate_what_the_formula_says(four_ranks, case):
    check(four_ranks, case, {}, 4)


def test_a_log_adds_what_the_docs_say(four_ranks, two_ranks):
    for components, found in four_ranks.run(counted_log, Case(tp=2, zero="zero1", steps=3)):
        assert found == {("world", "all_reduce"): 8 * components + 16, ("dp", "all_reduce"): 4 * 3}
    for components, found in two_ranks.run(counted_log, Case(zero="zero3", steps=2)):
        assert found == {("dp", "all_reduce"): 8 * components + 16 + 4 * 2}


def test_ranks_that_are_no_known_group_are_refused(four_ranks):
    four_ranks.run(counted_over_a_strange_group, Case(tp=2))


def test_every_kind_of_collective_is_counted_whole(two_ranks):
    for found in two_ranks.run(counted_collectives, 0):
        assert found == [
            Counter({("tp", "all_reduce"): 24}),
            Counter({("tp", "all_gather"): 12}),
            Counter({("tp", "all_gather"): 24}),
            Counter({("tp", "reduce_scatter"): 24}),
            Counter({("tp", "broadcast"): 6}),
            Counter({("tp", "reduce"): 24}),
            Counter(),
        ]


# ---- arithmetic ----

ROOT = Path(__file__).parent.parent
LARGE = recipes.load(ROOT / "recipes" / "leviathan_1200m.yaml")


def test_one_rank_communicates_nothing():
    assert not +communication(LARGE, 3, 1)


def test_a_shared_generator_adds_its_embeddings_and_gradients():
    split = replace(LARGE, parallel=ParallelConfig(2))
    one_pass = replace(split, training=replace(split.training, global_batch_size=16))
    whole = replace(one_pass, parallel=ParallelConfig(2, split_distinct_ids=False))
    added = communication(one_pass, 1, 2, distinct_ids=[3727])
    added.subtract(communication(whole, 1, 2))
    generator = accounting.count_parameters(LARGE.model).embedding
    assert +added == {("tp", "all_gather"): 2 * 3728 * 2048, ("tp", "all_reduce"): 2 * generator}


def test_collectives_go_as_fast_as_their_slowest_link():
    cluster = Cluster(nvlink_bytes_per_s=400.0, network_bytes_per_s=50.0, link_utilization=0.5, gpus_per_node=8)
    assert cluster.collective_s("all_reduce", 800, size=1, stride=1) == 0
    assert cluster.collective_s("all_reduce", 800, size=8, stride=1) == pytest.approx(2 * 7 / 8 * 800 / 200)
    assert cluster.collective_s("all_gather", 800, size=4, stride=2) == pytest.approx(3 / 4 * 800 / 200)
    # Over two nodes: by two adapters where every fourth GPU takes part, by one where every eighth does.
    assert cluster.collective_s("reduce_scatter", 800, size=4, stride=4) == pytest.approx(3 / 4 * 800 / 50)
    assert cluster.collective_s("all_reduce", 800, size=2, stride=8) == pytest.approx(800 / 25)


def test_a_step_takes_its_flops_and_its_bytes():
    cluster = Cluster()
    time = predict_step(LARGE, 1, 8, cluster)
    flops = accounting.flops_per_token(LARGE.model, 512).total * 512 * 512
    assert time.compute_s == pytest.approx(flops / (8 * 989.4e12 * 0.45))
    weights = 2 * accounting.count_parameters(LARGE.model, padded=True).total
    # An all-reduce and an all-gather are three passes; padding and the norm are too few bytes to see.
    assert time.data_parallel_s == pytest.approx(3 * 7 / 8 * weights / (450e9 * 0.8), rel=1e-6)
    assert time.tensor_parallel_s == 0
    assert time.total_s == time.compute_s + time.data_parallel_s
    assert time.overlapped_s == time.compute_s


def test_a_batch_is_spread_in_micro_batches_that_divide_it():
    each = with_batch(LARGE, 2048, 64)
    assert each is not None and each.training.micro_batch_size == 16
    each = with_batch(LARGE, 24 * 8, 8)
    assert each is not None and each.training.micro_batch_size == 12
    assert with_batch(LARGE, 512, 1024) is None


def test_the_docs_print_what_the_benchmark_predicts():
    command = [sys.executable, "benchmarks/scale.py", "--predict"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed in (ROOT / "docs" / "scaling.md").read_text()
