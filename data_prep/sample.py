"""The real text that ships with the project (data_prep/sample_corpus/SOURCES.md says where it is from)."""

from collections.abc import Sequence
from pathlib import Path


def sample_corpus_path() -> Path:
    """The path of the sample corpus: 793 documents, 10.9 MB of text in 12 domains, Pile format."""
    return Path(__file__).parent / "sample_corpus" / "minipile.jsonl.zst"


DEMO_PREFIX = Path("data/demo/sample")
_DEMO_VOCAB_SIZE = 8192


def is_demo(prefixes: Sequence[str]) -> bool:
    """Whether these are the data that launchers/pretrain.py prepares itself when they are not there."""
    return tuple(prefixes) == (str(DEMO_PREFIX),)


def prepare_demo() -> None:
    """Train the demo's tokenizer on the sample corpus and encode it to data/demo/sample, if that is not done."""
    from data_prep.files import manifest_path
    from data_prep.preprocess import preprocess
    from data_prep.train_tokenizer import train_tokenizer

    if manifest_path(DEMO_PREFIX).is_file():
        return
    tokenizer = DEMO_PREFIX.with_name("tokenizer.model")
    if not tokenizer.is_file():
        train_tokenizer([sample_corpus_path()], tokenizer, _DEMO_VOCAB_SIZE)
    preprocess([sample_corpus_path()], tokenizer, DEMO_PREFIX, workers=2)
