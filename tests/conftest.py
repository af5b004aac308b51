"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from workers import WorkerPool

# ---- ranks ---------------------------------------------------------------------------------------------------
# Started when first asked for and kept: one world of two ranks, one of four.


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two cores serve this process and its workers; more threads would only wait for each other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[WorkerPool]:
    pool = WorkerPool(4)
    yield pool
    pool.close()
