"""Fixtures by data_prep's names; the small tokenizer and dataset are those of tests/conftest.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pile_texts import TINY

from data_prep.tokenizers import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tiny_records() -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in TINY.read_bytes().splitlines()]


@pytest.fixture(scope="session")
def tokenizer_path(corpus_tokenizer: Path) -> Path:
    return corpus_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_path)


@pytest.fixture(scope="session")
def tiny_dataset(corpus: Path) -> Path:
    """The prefix of a dataset of the tiny corpus; not to be changed."""
    return corpus


@pytest.fixture
def dataset_copy(corpus_copy: Callable[..., Path]) -> Path:
    """The prefix of a copy of it that a test may damage."""
    return corpus_copy()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """write_jsonl(records, name="in.jsonl"): a source; a record given as bytes is a raw line."""

    def write(records: list[Any], name: str = "in.jsonl") -> Path:
        lines = [record if isinstance(record, bytes) else orjson.dumps(record) for record in records]
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write
