"""Inputs to documents, in a fixed order, in pieces that any process can read.

expand_inputs(inputs)          what the user named → Sources: files, or parts of a Hugging Face dataset
plan_shards(sources, options)  Sources → Shards of similar size, the same on every machine and at any
                               number of workers
read_shard(shard, options)     a Shard → (Place, Document | Skip) in order; its size and hash
iter_documents(inputs)         all of it in one process
"""

from data_prep.sources.documents import (
    DEFAULT_DOMAIN_KEY,
    DEFAULT_TEXT_KEY,
    UNKNOWN_DOMAIN,
    BadLine,
    Document,
    OnError,
    Place,
    ReadOptions,
    Skip,
)
from data_prep.sources.inputs import (
    INPUT_HELP,
    STANDARD_INPUT,
    SUFFIXES,
    Source,
    expand_inputs,
    remove_spooled,
)
from data_prep.sources.reading import ShardReader, iter_documents, read_shard
from data_prep.sources.shards import Piece, Shard, plan_shards

__all__ = [
    "DEFAULT_DOMAIN_KEY",
    "DEFAULT_TEXT_KEY",
    "INPUT_HELP",
    "STANDARD_INPUT",
    "SUFFIXES",
    "UNKNOWN_DOMAIN",
    "BadLine",
    "Document",
    "OnError",
    "Piece",
    "Place",
    "ReadOptions",
    "Shard",
    "ShardReader",
    "Skip",
    "Source",
    "expand_inputs",
    "iter_documents",
    "plan_shards",
    "read_shard",
    "remove_spooled",
]
