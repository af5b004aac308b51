"""Gradient norms by component from DeepSpeed's parts equal those of plain autograd in one process."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from distributed_cases import Case, component_norms_run, single_process_component_norms

from leviathan_ds.parallel import gradients

TOLERANCE = 1e-5  # relative, in fp32


def test_millions_of_values_keep_their_sum() -> None:
    values = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0)) ** 3
    found = gradients._sum_of_squares([values, values[:5]])
    expected = values.double().square().sum() + values[:5].double().square().sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)


@lru_cache
def reference(embedding: str) -> list[dict[str, float]]:
    return single_process_component_norms(Case(embedding=embedding, steps=2))


def check(results: list[dict], case: Case, tolerance: float = TOLERANCE) -> None:
    for rank in results:
        assert any("sqrt" in name for name in rank["operations"])
        assert not any("_local_scalar_dense" in name for name in rank["operations"]), "read back to the host"
        for found, expected in zip(rank["by_component"], reference(case.embedding), strict=True):
            assert found == pytest.approx(expected, rel=tolerance)
        for found, whole in zip(rank["by_component"], rank["whole"], strict=True):
            if case.zero != "zero0":
                assert sum(norm**2 for norm in found.values()) ** 0.5 == pytest.approx(whole, rel=tolerance)


@pytest.mark.parametrize("zero", ["zero0", "zero1", "zero2", "zero3"])
def test_tp_2_dp_2(four_ranks, zero):
    """Accumulation over two passes, sequence parallelism: sharded, replicated and partial gradients."""
    case = Case(tp=2, zero=zero, accumulation=2, sequence_parallel=True, steps=2)
    check(four_ranks.run(component_norms_run, case), case)


@pytest.mark.parametrize("zero", ["zero1", "zero2_offload", "zero3_offload"])
def test_dp_2(two_ranks, zero):
    """Parts that end inside a parameter; an offloaded optimizer."""
    case = Case(zero=zero, steps=2)
    check(two_ranks.run(component_norms_run, case), case)


@pytest.mark.parametrize("embedding, components", [("dense_tied", 2), ("dense_untied", 3)])
def test_a_model_without_a_component_has_no_norm_for_it(two_ranks, embedding, components):
    case = Case(tp=2, zero="zero2", embedding=embedding, steps=2)
    results = two_ranks.run(component_norms_run, case)
    check(results, case)
    assert len(results[0]["by_component"][0]) == components


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3"])
def test_bf16_stays_near_fp32(two_ranks, zero):
    case = Case(tp=1, zero=zero, precision="bf16", accumulation=2, steps=2)
    check(two_ranks.run(component_norms_run, case), case, tolerance=5e-2)
