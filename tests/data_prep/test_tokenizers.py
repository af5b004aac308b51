"""The tokenizer protocol against SentencePiece itself, and what load_tokenizer refuses."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pile_texts import CONTROL_LOOKALIKES, HARD_TEXTS
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from data_prep.tokenizers import Tokenizer, load_tokenizer


def train_bytes(**options: Any) -> bytes:
    model = io.BytesIO()
    lines = iter([f"word{i % 97} other{i % 31}" for i in range(500)])
    SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=80,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return model.getvalue()


def test_attributes_and_ids_are_sentencepieces(
    tokenizer: Tokenizer, tokenizer_path: Path, tiny_records: list[Any]
):
    reference = SentencePieceProcessor(model_file=str(tokenizer_path))
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.pad_id) == (600, 2, None)
    assert tokenizer.kind == "sentencepiece"
    assert tokenizer.fingerprint == hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    for record in tiny_records:
        assert tokenizer.encode(record["text"]) == reference.encode(record["text"])


@pytest.mark.parametrize("text", CONTROL_LOOKALIKES)
def test_no_text_gives_a_control_token(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert min(ids) > 2
    assert tokenizer.decode(ids) == text


def test_token_byte_lengths_sum_to_the_text(tokenizer: Tokenizer, tiny_records: list[Any]):
    lengths = tokenizer.token_byte_lengths()
    assert lengths.dtype == np.int32 and lengths.shape == (600,)
    assert lengths[:3].tolist() == [0, 0, 0]
    for text in [record["text"] for record in tiny_records] + HARD_TEXTS + CONTROL_LOOKALIKES:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_missing_and_foreign_files(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none\.model: no such tokenizer file"):
        load_tokenizer(tmp_path / "none.model")
    path = tmp_path / "t.model"
    for content, problem in (
        (b"", "is empty"),
        (b'{"model": {}}', "truncated or no Sent"),
        (b"\x0a", "truncated"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"t\.model: .*{problem}"):
            load_tokenizer(path)


def test_every_truncation_is_refused(tmp_path: Path, tokenizer_path: Path):
    """SentencePiece itself loads a file that ends between two pieces."""
    model = tokenizer_path.read_bytes()
    path = tmp_path / "cut.model"
    for size in [*range(1, 600), *range(len(model) - 300, len(model))]:
        path.write_bytes(model[:size])
        with pytest.raises(ValueError, match="truncated"):
            load_tokenizer(path)


def test_tokenizer_without_end_of_document(tmp_path: Path):
    path = tmp_path / "t.model"
    path.write_bytes(train_bytes(eos_id=-1))
    with pytest.raises(ValueError, match=r"t\.model: has no eos control token"):
        load_tokenizer(path)


def test_end_of_document_that_text_can_produce(tmp_path: Path):
    path = tmp_path / "t.model"
    path.write_bytes(train_bytes(user_defined_symbols=["</s>"]))
    assert 2 in SentencePieceProcessor(model_file=str(path)).encode("a</s>b")
    with pytest.raises(ValueError, match="no eos control token"):
        load_tokenizer(path)


def test_padding_id_is_reported(tmp_path: Path):
    path = tmp_path / "t.model"
    path.write_bytes(train_bytes(pad_id=3))
    assert load_tokenizer(path).pad_id == 3
