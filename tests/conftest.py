"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook
from workers import WorkerPools

# Two cores serve this process and its workers; more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every shape in an annotation of the model is checked while the tests run.
install_import_hook("leviathan_ds.model", "beartype.beartype")

# ---- ranks ---------------------------------------------------------------------------------------------------
# Started when first asked for and kept: worlds of two ranks and of four, one for each tensor-parallel size.


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[WorkerPools]:
    pool = WorkerPools(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[WorkerPools]:
    pool = WorkerPools(4)
    yield pool
    pool.close()


# ---- data: one tiny tokenizer and dataset for the session ----

TINY_CORPUS = Path(__file__).parent / "data_prep" / "minipile_tiny.jsonl"


@pytest.fixture(scope="session")
def corpus_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 600 pieces, of the tiny corpus."""
    from data_prep.train_tokenizer import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tok.model"
    train_tokenizer([TINY_CORPUS], path, vocab_size=600)
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, corpus_tokenizer: Path) -> Path:
    """The prefix of the tiny corpus, encoded; not to be changed."""
    from data_prep.preprocess import preprocess

    prefix = tmp_path_factory.mktemp("corpus") / "tiny"
    preprocess([TINY_CORPUS], corpus_tokenizer, prefix)
    return prefix


@pytest.fixture
def corpus_copy(tmp_path: Path, corpus: Path) -> Callable[..., Path]:
    """corpus_copy(name="copy"): the prefix of a copy without index cache that a test may damage."""

    def copy(name: str = "copy") -> Path:
        shutil.copytree(corpus.parent, tmp_path / name, ignore=shutil.ignore_patterns("*.index_cache"))
        return tmp_path / name / corpus.name

    return copy


# ---- process groups of this process alone ----


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron's groups with one rank."""
    from leviathan_ds.parallel import topology

    topology.initialize(1)
    yield
    topology.shutdown()


# ---- the sample corpus, for exports ----


@pytest.fixture(scope="session")
def sample_documents() -> list[str]:
    from data_prep.sample import sample_corpus_path
    from data_prep.sources import iter_documents

    return [document.text for document in iter_documents([sample_corpus_path()])]


@pytest.fixture(scope="session")
def sample_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 509 pieces, of the sample corpus."""
    from data_prep.sample import sample_corpus_path
    from data_prep.train_tokenizer import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tok.model"
    train_tokenizer([sample_corpus_path()], path, 509, sample_bytes=200_000)
    return path


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every export checks its tokenizer on real text; tests/test_export_tokenizer.py does so at length."""
    from leviathan_ds.export import verify

    monkeypatch.setattr(verify, "TEXT_CHARACTERS", 100_000)
