"""The real text that ships with the project (data_prep/sample_corpus/SOURCES.md says where it is from)."""

from pathlib import Path


def sample_corpus_path() -> Path:
    """The path of the sample corpus: 793 documents, 10.9 MB of text in 12 domains, Pile format."""
    return Path(__file__).parent / "sample_corpus" / "minipile.jsonl.zst"
