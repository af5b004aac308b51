"""The memory of a join, on parts that no tokenizer made."""

import hashlib
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep.indexed import IndexedReader
from data_prep.joining import join_parts
from data_prep.manifest import DomainCounts, TokenizerInfo
from data_prep.parts import WHOLE, PartWriter, Plan, claim_parts
from data_prep.verify import verify

DOCUMENTS = 100_000  # of a part
TOKENIZER = b"a tokenizer"


def join_tiny_documents(folder: Path, num_parts: int) -> tuple[Path, int]:
    """(prefix, peak of the memory that the join held) of a dataset of two-token documents."""
    info = TokenizerInfo("tiktoken", hashlib.sha256(TOKENIZER).hexdigest(), 100_000, 2, None, "")
    options = {"split": None, "by_domain": False, "domain_key": "meta"}
    plan = Plan((), info, options, num_parts, "cuts")
    claim_parts(folder / "d.parts", plan, TOKENIZER, overwrite=False)
    for number in range(num_parts):
        ids = np.full((DOCUMENTS, 2), 2, np.int32)
        ids[:, 0] = np.arange(DOCUMENTS) % 90_000 + 3
        with PartWriter(folder / "d.parts", number, plan.digest, 100_000, 2) as writer:
            lengths = np.full(DOCUMENTS, 2, np.int32)
            writer.add(WHOLE, ids.reshape(-1), lengths, {"x": DomainCounts(DOCUMENTS, 2 * DOCUMENTS, 7)})
            writer.finish(Counter(), "", [])
    tracemalloc.start()
    join_parts(folder / "d", plan, [folder / "d.parts"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return folder / "d", peak


def test_memory_of_the_join_does_not_grow_with_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data_prep.indexed._BLOCK_DOCUMENTS", DOCUMENTS)
    monkeypatch.setattr("data_prep.joining._THREADS", 1)  # each holds a block
    _, few = join_tiny_documents(tmp_path / "few", 2)
    prefix, many = join_tiny_documents(tmp_path / "many", 20)  # an index of 40 MB
    assert many < few + 4 * DOCUMENTS and many < 20 << 20
    reader = IndexedReader(prefix)
    assert len(reader) == 20 * DOCUMENTS and reader[1_234_567].tolist() == [34_567 + 3, 2]
    with pytest.raises(ValueError, match="tokenizer"):  # all but the tokenizer, which is none, is right
        verify(prefix)
