"""A shard's documents to its part: what a worker does, and the options it needs for that."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.duplicates import DuplicateOptions
from data_prep.errors import UserError
from data_prep.manifest import DomainCounts
from data_prep.parts import Output, Part, PartWriter
from data_prep.sources import Document, ReadOptions, Shard, Source, read_shard
from data_prep.splits import HashSplit, Shares
from data_prep.tokenizers import Backend, Tokenizer

MOST_OUTPUTS = 3000
"""Datasets that one run may make; more of them come of a wrong --split_by."""

_BATCH_BYTES = 1 << 20  # text that is encoded at once
_BATCH_DOCUMENTS = 4096
_REPORT_S = 0.25


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """What every worker needs besides its shards.

    folder, plan: where the parts go, and the digest of their plan. split: shares of train, validation and
    test, None for one dataset. by_domain: a dataset for each domain. duplicates: which documents to drop, None
    for none."""

    backend: Backend
    read: ReadOptions
    folder: Path
    plan: str
    split: Shares | None = None
    by_domain: bool = False
    duplicates: DuplicateOptions | None = None


@dataclass(slots=True)
class Progress:
    """Work done: of the sources' bytes on the disk, documents, tokens, bytes of UTF-8 text, records skipped."""

    source_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    skipped: int = 0

    def __add__(self, other: "Progress") -> "Progress":
        return Progress(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __sub__(self, other: "Progress") -> "Progress":
        return Progress(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


class ShardEncoder:
    """Encodes shards into parts, one after the other."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._split = HashSplit(options.split) if options.split else None
        self._eod = np.array([tokenizer.eod_id], np.int32)

    def encode(
        self,
        number: int,
        shard: Shard,
        drop: NDArray[np.int64] | None,
        report: Callable[[Progress], None],
    ) -> Part:
        """Make part `number` of `shard`.

        drop: positions of documents that are duplicates, as read_shard takes them; report: gets what was done
        so far, now and then. Raises UserError as reading does, and for more than MOST_OUTPUTS outputs."""
        reader = read_shard(shard, self._options.read, drop)
        skipped = Counter[str]()
        done = Progress()
        reported = time.monotonic()
        batch: dict[Output, list[Document]] = {}
        held_bytes = held_documents = 0
        with PartWriter(
            self._options.folder,
            number,
            self._options.plan,
            self._tokenizer.vocab_size,
            self._tokenizer.eod_id,
        ) as writer:
            for _, parsed in reader:
                if not isinstance(parsed, Document):
                    skipped[parsed.reason] += 1
                    continue
                batch.setdefault(self._output(parsed), []).append(parsed)
                held_bytes += len(parsed.text)
                held_documents += 1
                if held_bytes >= _BATCH_BYTES or held_documents >= _BATCH_DOCUMENTS:
                    done += self._write(writer, batch)
                    batch.clear()
                    held_bytes = held_documents = 0
                    if time.monotonic() - reported > _REPORT_S:
                        done.source_bytes, done.skipped = reader.num_bytes, skipped.total()
                        report(done)
                        reported = time.monotonic()
            done += self._write(writer, batch)
            streamed = [piece.source.path for piece in shard.pieces if not is_file(piece.source)]
            part = writer.finish(skipped, reader.sha256, streamed)
        done.source_bytes, done.skipped = reader.num_bytes, skipped.total()
        report(done)
        return part

    def _output(self, document: Document) -> Output:
        split = self._split.of(document.text.encode()) if self._split else None
        return Output(document.domain if self._options.by_domain else None, split)

    def _write(self, writer: PartWriter, batch: dict[Output, list[Document]]) -> Progress:
        """Encode the documents of a batch and add them to their outputs."""
        done = Progress()
        for output, documents in batch.items():
            pieces: list[NDArray[np.int32]] = []
            for ids in self._tokenizer.encode_batch([document.text for document in documents]):
                pieces += (ids, self._eod)
            lengths = np.fromiter(map(len, pieces[::2]), np.int32, len(documents)) + np.int32(1)
            counts: dict[str, list[int]] = {}
            for document, length in zip(documents, lengths.tolist(), strict=True):
                text = document.text
                num_bytes = len(text) if text.isascii() else len(text.encode())
                domain = counts.setdefault(document.domain, [0, 0, 0])
                domain[0] += 1
                domain[1] += length
                domain[2] += num_bytes
            domains = {name: DomainCounts(*each) for name, each in counts.items()}
            writer.add(output, np.concatenate(pieces), lengths, domains)
            check_outputs(writer.num_outputs, self._options.read.domain_key, output)
            done.documents += len(documents)
            done.tokens += int(lengths.sum(dtype=np.int64))
            done.text_bytes += sum(each.bytes for each in domains.values())
        return done


def check_outputs(num_outputs: int, domain_key: str, example: Output) -> None:
    """Raise UserError if a run would make more datasets than anybody wants."""
    if num_outputs > MOST_OUTPUTS:
        raise UserError(
            f"--split_by {domain_key}: makes more than {MOST_OUTPUTS} datasets, as of {example.domain!r}; "
            "choose a key with fewer values"
        )


def is_file(source: Source) -> bool:
    """Whether a source has a size and a hash of its own; else it is a stream."""
    return source.format != "hf-stream"
