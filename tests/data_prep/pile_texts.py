"""Texts that several tests share. (No __init__.py here: a package tests/data_prep could hide data_prep.)"""

from pathlib import Path

from data_prep.files import dataset_tokenizer_path

TINY = Path(__file__).parent / "minipile_tiny.jsonl"
"""35 short documents of the sample corpus."""


def tokenizer_copy(prefix: Path) -> Path:
    """The tokenizer beside a dataset of the SentencePiece fixture."""
    return dataset_tokenizer_path(prefix, "sentencepiece")


CONTROL_LOOKALIKES = ["</s>", "<s>", "<unk>", "<pad>", "<|endoftext|>", "<0x41>", "a</s>b", " </s>\n<s>"]
HARD_TEXTS = [
    " a",
    "a ",
    "  a   b  ",
    "\t\ta\n\n\n b\r\nc",
    "\n",
    "\x00",
    "é e\u0301 漢字 🙂",
    "\ufeffx",
    " ⁇ ",
]
