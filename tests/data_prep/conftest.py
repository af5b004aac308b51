"""Fixtures: one small tokenizer and one small dataset for the whole session."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pile_texts import TINY

from data_prep.preprocess import preprocess
from data_prep.tokenizers import Tokenizer, load_tokenizer
from data_prep.train_tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tiny_records() -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in TINY.read_bytes().splitlines()]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tok.model"
    train_tokenizer([TINY], path, vocab_size=600)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_path)


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path) -> Path:
    """The prefix of a dataset of the tiny corpus; not to be changed."""
    prefix = tmp_path_factory.mktemp("dataset") / "tiny"
    preprocess([TINY], tokenizer_path, prefix)
    return prefix


@pytest.fixture
def dataset_copy(tmp_path: Path, tiny_dataset: Path) -> Path:
    """The prefix of a copy of it that a test may damage."""
    shutil.copytree(tiny_dataset.parent, tmp_path / "copy")
    return tmp_path / "copy" / tiny_dataset.name


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """write_jsonl(records, name="in.jsonl"): a source; a record given as bytes is a raw line."""

    def write(records: list[Any], name: str = "in.jsonl") -> Path:
        lines = [record if isinstance(record, bytes) else orjson.dumps(record) for record in records]
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write
