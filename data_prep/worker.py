"""A worker process: batches of raw lines in, token ids out, over one pipe.

Started by data_prep.encode as `python -m data_prep.worker FD` in a fresh interpreter, so that nothing the
parent holds (threads, locks, a tokenizer, torch) comes along. It ends when its pipe does.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.manifest import DomainCounts
from data_prep.sources import BadLine, OnError, Skip, parse_line
from data_prep.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """What every worker needs besides the lines."""

    tokenizer: Path
    text_key: str
    domain_key: str
    on_error: OnError


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive raw lines of one source file; the first has the number `first_line`."""

    path: str
    first_line: int
    lines: list[bytes]


@dataclass(slots=True)
class EncodedBatch:
    """The documents of a Batch, in their order.

    ids: [tokens] int32, each document ending with end-of-document; lengths: [documents] int32."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    domains: dict[str, DomainCounts] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)


def encode_batch(batch: Batch, tokenizer: Tokenizer, options: EncodeOptions) -> EncodedBatch:
    """Parse and encode the lines of `batch`.

    Raises BadLine for the first unreadable line, unless options.on_error is "skip"."""
    documents: list[NDArray[np.int32]] = []
    domains: dict[str, DomainCounts] = {}
    skipped = Counter[str]()
    for number, raw in enumerate(batch.lines, start=batch.first_line):
        try:
            parsed = parse_line(raw, batch.path, number, options.text_key, options.domain_key)
        except BadLine as error:
            if options.on_error == "fail":
                raise
            parsed = Skip(error.reason)
        if isinstance(parsed, Skip):
            skipped[parsed.reason] += 1
            continue
        ids = np.array([*tokenizer.encode(parsed.text), tokenizer.eod_id], dtype=np.int32)
        documents.append(ids)
        counts = domains.get(parsed.domain, DomainCounts(0, 0, 0))
        domains[parsed.domain] = DomainCounts(
            counts.documents + 1, counts.tokens + len(ids), counts.bytes + len(parsed.text.encode())
        )
    lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
    return EncodedBatch(np.concatenate([np.empty(0, np.int32), *documents]), lengths, domains, skipped)


def serve(connection: Connection) -> None:
    """Receive EncodeOptions, then answer each Batch with an EncodedBatch or the UserError it met."""
    options = connection.recv()
    tokenizer = load_tokenizer(options.tokenizer)
    while True:
        try:
            batch = connection.recv()
        except EOFError:  # the parent has no more work, or has died
            return
        try:
            answer = encode_batch(batch, tokenizer, options)
        except UserError as error:
            answer = error
        connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
