"""Megatron-core's .bin/.idx in numpy: a writer, a reader and a structural check.

The .bin holds the token ids and nothing else. The .idx, little endian:

    9 bytes  b"MMIDIDX\\0\\0"
    u64      version, 1
    u8       dtype code of the .bin
    u64      N, number of sequences
    u64      M, number of document indices = documents + 1
    int32    [N] lengths in tokens
    int64    [N] byte offsets of the sequences in the .bin
    int64    [M] document indices: sequences before each document, then their total

Here every document is one sequence. Positions are 64-bit throughout.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.files import bin_path, idx_path

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
_DTYPES = {code: np.dtype(name).newbyteorder("<") for code, name in enumerate(_DTYPE_NAMES, start=1)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_TOKEN_CODES = (4, 8)  # int32 and uint16: what holds token ids
_BLOCK_DOCUMENTS = 1 << 20  # index arrays are written in blocks of this many documents


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 below a vocabulary of 65,500 and int32 from there on, as in megatron-core."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def write_index(file: IO[bytes], lengths: Iterable[NDArray[np.int32]], dtype: np.dtype) -> None:
    """Write the .idx of one-sequence documents.

    lengths: blocks [documents of the block] of tokens of each; iterated over several times, one block in memory
    at a time. dtype: of the ids in the .bin."""
    documents = sum(len(block) for block in lengths)
    file.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], documents, documents + 1))
    for block in lengths:
        file.write(np.ascontiguousarray(block, dtype="<i4").data)
    offset = 0
    for block in lengths:
        for start in range(0, len(block), _BLOCK_DOCUMENTS):
            sizes = block[start : start + _BLOCK_DOCUMENTS].astype("<i8") * dtype.itemsize
            ends = offset + np.cumsum(sizes)
            file.write((ends - sizes).data)
            offset = int(ends[-1])
    for start in range(0, documents + 1, _BLOCK_DOCUMENTS):
        file.write(np.arange(start, min(start + _BLOCK_DOCUMENTS, documents + 1), dtype="<i8").data)


def check_documents(
    ids: NDArray[np.integer], lengths: NDArray[np.int32], vocab_size: int, eod_id: int, first: int = 0
) -> None:
    """Refuse documents that no dataset may hold; `first` is the number of the first one, for the message.

    ids: [sum of lengths], each document ending with its only end-of-document id; lengths: [documents], each at
    least 1. Raises ValueError for an id outside the vocabulary and for a document without exactly one
    end-of-document at its end.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    if ends[-1] != len(ids) or lengths.min() < 1:
        raise ValueError(f"lengths sum to {ends[-1]}, least {lengths.min()}, for {len(ids)} ids")
    if ids.min() < 0 or ids.max() >= vocab_size:  # a cast would wrap silently
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))[0]
        document = first + int(np.searchsorted(ends, wrong, side="right"))
        raise ValueError(f"id {ids[wrong]} in document {document} is outside the vocabulary of {vocab_size}")
    if np.any(ids[ends - 1] != eod_id) or np.count_nonzero(ids == eod_id) != len(lengths):
        raise ValueError(f"every document must end with its only end-of-document id, {eod_id}")


class IndexedReader:
    """Memory-mapped documents of a checked dataset; `reader[i]` is document i's ids.

    Attributes: dtype; lengths [sequences] int32 in tokens; offsets [sequences] int64 in bytes;
    document_indices [documents + 1] int64; tokens [all tokens] in `dtype`.
    """

    def __init__(self, prefix: Path | str) -> None:
        """Raises UserError as check_dataset does."""
        self.dtype, sequences, indices = check_dataset(prefix)
        index = idx_path(prefix)
        start = _HEADER.size
        self.lengths = np.memmap(index, "<i4", "r", start, (sequences,))
        self.offsets = np.memmap(index, "<i8", "r", start + 4 * sequences, (sequences,))
        self.document_indices = np.memmap(index, "<i8", "r", start + 12 * sequences, (indices,))
        self.tokens = np.memmap(bin_path(prefix), self.dtype, "r")

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    def __getitem__(self, document: int) -> NDArray[np.integer]:
        """[tokens of the document] ids, a view of the mapped file."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        first, last = (int(i) for i in self.document_indices[document : document + 2])
        if first == last:
            return self.tokens[:0]
        start = int(self.offsets[first]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[first:last].sum(dtype=np.int64))]

    def __iter__(self) -> Iterator[NDArray[np.integer]]:
        return (self[document] for document in range(len(self)))


def check_dataset(prefix: Path | str) -> tuple[np.dtype, int, int]:
    """Check header and sizes of a .bin/.idx pair without reading them through.

    Returns (dtype of the .bin, number of sequences, number of document indices). Raises UserError (a
    ValueError) naming the file and what is wrong: missing, not an index, of an impossible size, a .bin
    of another size than its .idx describes, or without a single token.
    """
    index, data = idx_path(prefix), bin_path(prefix)
    for path in (index, data):
        if not path.is_file():
            raise UserError(f"{path}: no such file; prepare the dataset with python -m data_prep.preprocess")
    index_bytes, data_bytes = index.stat().st_size, data.stat().st_size
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise UserError(f"{index}: {index_bytes} bytes are too few for an index; prepare the dataset again")
    magic, version, code, sequences, indices = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1:
        raise UserError(f"{index}: is no megatron-core index of version 1")
    if code not in _TOKEN_CODES:
        raise UserError(f"{index}: dtype code {code} holds no token ids (uint16 is 8, int32 is 4)")
    expected = _HEADER.size + 12 * sequences + 8 * indices
    if index_bytes != expected:
        raise UserError(
            f"{index}: has {index_bytes} bytes, its header describes {expected}; prepare the dataset again"
        )
    dtype = _DTYPES[code]
    described = _described_bin_bytes(index, dtype, sequences)
    if described != data_bytes:
        raise UserError(
            f"{data}: has {data_bytes} bytes, {index} describes {described}: truncated, or not of this index"
        )
    if data_bytes == 0:
        raise UserError(f"{data}: the dataset holds no token")
    return dtype, sequences, indices


def _described_bin_bytes(index: Path, dtype: np.dtype, sequences: int) -> int:
    """Where the last sequence ends: with the offsets right, the .bin's size in bytes."""
    if sequences == 0:
        return 0
    with index.open("rb") as file:
        file.seek(_HEADER.size + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 12 * sequences - 8)
        (offset,) = struct.unpack("<q", file.read(8))
    return offset + length * dtype.itemsize
