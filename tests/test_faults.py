"""Faults injected into a training step, and what all ranks then do alike."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from distributed_cases import Case
from fault_cases import faulty_run, replica_fault, rolled_back_run, seeds_differ, stopping_run

from leviathan_ds import run_directory
from leviathan_ds.parallel import registry

BAD = (2, 3)  # a step after which the optimizer has moments, twice in a row


def check_skips(pool, case: Case, tmp_path, kind: str, faulty_rank: int = 1) -> list[str]:
    """A run whose bad steps are skipped ends bitwise where a run ends that never had them."""
    left_out = pool.run(faulty_run, case, tmp_path, None, BAD, faulty_rank)
    faulty = pool.run(faulty_run, case, tmp_path, kind, BAD, faulty_rank)
    for found, expected in zip(faulty, left_out, strict=True):
        assert expected["skipped"] == 0
        assert found["skipped"] == found["counted_by_deepspeed"] == len(BAD)
        assert found["steady"], "moments moved in a skipped step"
        assert found["differing"] == {}
        for name, weight in found["weights"].items():
            assert torch.isfinite(weight).all(), name
            assert torch.equal(weight, expected["weights"][name]), name
    return faulty[0]["said"]


def covering(all_cases: Iterable[tuple], *by_default: tuple) -> list[Any]:
    """Parameters of which those that do not run by default are marked slow."""
    cases = list(all_cases)
    assert set(by_default) < set(cases)
    return [pytest.param(*case, marks=() if case in by_default else pytest.mark.slow) for case in cases]


STAGES = ("zero0", "zero1", "zero2", "zero3")
BF16_STAGES = ("zero1", "zero2", "zero3", "zero2_offload")


@pytest.mark.parametrize(
    ("tp", "zero", "accumulation"),
    covering(
        itertools.product((1, 2), STAGES, (1, 4)),
        *((1, "zero0", 4), (2, "zero1", 1), (1, "zero2", 4), (2, "zero3", 4)),
    ),
)
def test_nan_loss_on_one_rank_skips_the_step_on_all(two_ranks, tmp_path, tp, zero, accumulation):
    case = Case(tp=tp, zero=zero, accumulation=accumulation)
    said = check_skips(two_ranks, case, tmp_path, "loss")
    micro = 8 // accumulation // (2 // tp)
    first = 2 * 8 + (micro if tp == 1 else 0)
    assert f"skipped: the loss is not finite; samples {first}–{first + micro - 1} (rank 1, pass 0)" in said[0]
    assert "2 in a row, 2 in all" in said[1]


@pytest.mark.parametrize("zero", covering(((zero,) for zero in STAGES), ("zero2",)))
def test_nan_loss_on_one_of_four_ranks(four_ranks, tmp_path, zero):
    """TP 2 × DP 2; the samples are those of the rank's data-parallel group."""
    said = check_skips(four_ranks, Case(tp=2, zero=zero), tmp_path, "loss", faulty_rank=2)
    assert "samples 20–23 (rank 2, pass 0);" in said[0]


@pytest.mark.parametrize(
    ("precision", "zero"),
    covering(
        [*itertools.product(("fp32",), (*STAGES, "zero2_offload")), *itertools.product(("bf16",), BF16_STAGES)],
        *(("fp32", "zero0"), ("fp32", "zero3"), ("bf16", "zero1"), ("bf16", "zero2_offload")),
    ),
)
def test_infinite_gradient_of_one_rank(two_ranks, tmp_path, zero, precision):
    case = Case(zero=zero, precision=precision)
    said = check_skips(two_ranks, case, tmp_path, "gradient")
    assert "the gradient is not finite, the loss is; samples 16–19 (rank 0, pass 0); 20–23 (rank 1" in said[0]


def test_spike_on_one_rank_is_skipped_and_kept_out_of_the_window(two_ranks, tmp_path):
    said = check_skips(two_ranks, Case(zero="zero2", accumulation=2), tmp_path, "spike")
    assert (
        "that faults.loss_spike_zscore allows; samples 18–19 (rank 1, pass 0); 22–23 (rank 1, pass 1)" in said[0]
    )
    assert len(said) == len(BAD), "the spikes would else have widened the window"
    records = [json.loads(line) for line in (tmp_path / run_directory.FAULTS).read_text().splitlines()]
    assert [(record["kind"], record["step"]) for record in records] == [("skip", 3), ("skip", 4)]
    assert records[0]["samples"] == [[18, 19], [22, 23]]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", "age"])
def test_all_ranks_stop_after_the_step_in_which_one_was_asked(two_ranks, tmp_path, how):
    first, second = two_ranks.run(stopping_run, Case(zero="zero1"), tmp_path, 1, how)
    assert first == second
    assert [step for step, _ in first] == [0, 1]
    assert first[0][1] is None
    assert first[1][1] == (
        "run.exit_duration_minutes is over" if how == "age" else "1 of 2 ranks got SIGTERM, SIGUSR1 or RUN/stop"
    )


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_rollback_loads_the_checkpoint_from_before_the_skips(two_ranks, tmp_path, zero):
    """Which was not rotated out by those that were written since, though only one is to be kept."""
    for found in two_ranks.run(rolled_back_run, Case(zero=zero), tmp_path, 1):
        assert found["rolled_back"] and found["restored"]
        assert "back to the weights of step_00000002, and on with the data after step 5" in found["said"][-1]
        assert found["verified"] == ["step_00000002"]


def test_rollback_looks_at_a_checkpoint_as_closely_as_the_recipe_says(two_ranks, tmp_path):
    for found in two_ranks.run(rolled_back_run, Case(zero="zero2"), tmp_path, 1, "sizes"):
        assert found["rolled_back"] and found["verified"] == []


def test_too_many_skips_stop_with_a_report_and_leave_a_healthy_checkpoint(two_ranks, tmp_path):
    for found in two_ranks.run(rolled_back_run, Case(zero="zero2"), tmp_path, 0):
        assert found["ended"]
        assert "3 steps in a row were skipped (3 to 5)" in found["said"][-1]
        assert "step_00000002" in found["said"][-1] and "a lower training.lr" in found["said"][-1]
    states = [run_directory.read_state(path) for path in run_directory.complete_checkpoints(tmp_path)]
    assert [(state.step, state.guard["consecutive_skips"]) for state in states] == [(2, 0), (3, 1), (4, 2)]


NORM, MATRIX = "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    "zero, name, faulty_rank, named",
    [
        ("zero2", NORM, 2, [2]),  # one of four replicas
        ("zero2", MATRIX, 3, [1, 3]),  # a shard has two, and of two nobody knows the right one
        ("zero3", NORM, 2, [2, 3]),  # its partition is also its tensor-parallel neighbour's
        ("zero3", MATRIX, 2, []),  # nobody else holds it
    ],
)
def test_one_bit_of_one_replica_is_found_with_its_rank(four_ranks, zero, name, faulty_rank, named):
    for found in four_ranks.run(replica_fault, Case(tp=2, zero=zero), faulty_rank, name):
        assert found == ({name: named} if named else {})


@pytest.mark.parametrize("zero", ["zero0", "zero3"])
def test_another_initial_seed_on_one_rank_stops_the_start(two_ranks, zero):
    for error in two_ranks.run(seeds_differ, Case(tp=2, zero=zero), 1):
        assert error.startswith("replicas differ: embedding.generator.")
        assert "on rank 0, 1" in error


def test_checksum_sees_every_bit_and_every_swap():
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    seen = {int(registry.bit_checksum(tensor))}
    for index in range(tensor.numel()):
        for bit in (0, 12, 31):
            changed = tensor.clone()
            flip = -(2**31) if bit == 31 else 1 << bit
            changed.view(torch.int32).view(-1)[index] ^= flip
            seen.add(int(registry.bit_checksum(changed)))
    for one in range(tensor.numel()):
        for other in range(one):
            swapped = tensor.clone().view(-1)
            swapped[[one, other]] = swapped[[other, one]]
            seen.add(int(registry.bit_checksum(swapped.view_as(tensor))))
    assert len(seen) == 1 + 35 * 3 + 35 * 34 // 2
    zero, minus_zero = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert registry.bit_checksum(zero) != registry.bit_checksum(minus_zero)
    assert registry.bit_checksum(torch.full((2,), math.nan)) == registry.bit_checksum(torch.full((2,), math.nan))
    assert int(registry.bit_checksum(torch.zeros(0))) == 0
