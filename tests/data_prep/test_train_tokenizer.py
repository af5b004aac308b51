"""Training: lossless, reproducible, bounded in memory, with clear refusals."""

from pathlib import Path
from typing import Any

import pytest
from pile_texts import CONTROL_LOOKALIKES, HARD_TEXTS, TINY
from sentencepiece import SentencePieceProcessor

from data_prep.sample import sample_corpus_path
from data_prep.sources import Document, iter_documents
from data_prep.tokenizers import load_tokenizer
from data_prep.train_tokenizer import main, sample_blocks, train_tokenizer


def test_the_demo_tokenizer_is_lossless_on_all_of_the_sample_corpus(tmp_path: Path):
    trained = train_tokenizer([sample_corpus_path()], tmp_path / "tok.model", vocab_size=8192)
    tokenizer = load_tokenizer(tmp_path / "tok.model")
    lengths = tokenizer.token_byte_lengths()
    num_bytes = num_tokens = 0
    for document in iter_documents([sample_corpus_path()]):
        ids = tokenizer.encode(document.text)
        assert tokenizer.decode(ids) == document.text
        assert lengths[ids].sum() == len(document.text.encode())
        num_bytes, num_tokens = num_bytes + len(document.text.encode()), num_tokens + len(ids)
    assert trained.sample_bytes == num_bytes == 10_939_815
    assert trained.bytes_per_token == pytest.approx(num_bytes / num_tokens, rel=0.05)
    assert num_bytes / num_tokens > 3.0


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_hard_texts_round_trip(tmp_path: Path, model_type: Any):
    train_tokenizer([TINY], tmp_path / "tok.model", vocab_size=600, model_type=model_type)
    tokenizer = load_tokenizer(tmp_path / "tok.model")
    for text in HARD_TEXTS + CONTROL_LOOKALIKES:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert min(ids) > 2


def test_same_inputs_same_bytes_and_the_seed_matters(tmp_path: Path):
    contents = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_tokenizer([TINY], tmp_path / name, vocab_size=500, sample_bytes=60_000, seed=seed)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_ids_of_the_special_pieces_and_digits(tokenizer_path: Path, tmp_path: Path, write_jsonl: Any):
    processor = SentencePieceProcessor(model_file=str(tokenizer_path))
    assert processor.id_to_piece(list(range(5))) == ["<unk>", "<s>", "</s>", "\n", "<0x00>"]
    pieces = processor.id_to_piece(list(range(600)))
    assert not any("\n" in piece for piece in pieces[4:])
    assert not any(sum(c.isdigit() for c in piece) > 1 for piece in pieces[260:])
    years = write_jsonl([{"text": "in 1984 and 1985, in 1984"}] * 50 + [{"text": TINY.read_text()}])
    train_tokenizer([years], tmp_path / "joined", vocab_size=600, split_digits=False)
    joined = SentencePieceProcessor(model_file=str(tmp_path / "joined")).id_to_piece(list(range(260, 600)))
    assert any(sum(c.isdigit() for c in piece) > 1 for piece in joined)


def test_sample_is_bounded_uniform_and_in_order():
    documents = [Document(f"{i:06d}" + "x" * 994, "A") for i in range(2000)]
    sample = sample_blocks(iter(documents), sample_bytes=500_000, seed=0)
    numbers = [int(block[:6]) for block in sample]
    assert numbers == sorted(set(numbers)) and len(numbers) == 500
    assert 850 < sum(numbers) / len(numbers) < 1150  # 1000 in the mean, 4 sigma is 90
    assert sample_blocks(iter(documents[:5]), 500_000, 0) == [document.text for document in documents[:5]]


def test_blocks_lose_no_text():
    text = "".join(f"line {i} é\n" * (i % 7) for i in range(3000)) + "x" * 30_000
    assert "".join(sample_blocks([Document(text, "A")], 10**9, 0)) == text


def test_refusals_are_one_line(tmp_path: Path, write_jsonl: Any, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "tok.model"
    short = write_jsonl([{"text": "a few words"}], "short.jsonl")
    empty = write_jsonl([{"text": " "}], "empty.jsonl")
    for source, size, message in (
        (short, "8192", "suffices for at most"),
        (TINY, "300", "need at least"),
        (TINY, "1", "at least 260"),
        (TINY, "99999999999999", "less than 2^31"),
        (tmp_path, "600", "is a directory"),
        (empty, "500", "no text to train on"),
        (tmp_path / "none.jsonl", "500", "no such file"),
    ):
        assert main(["--input", str(source), "--vocab_size", size, "--output", str(output)]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0]
        assert not list(tmp_path.glob("tok*"))
    for wrong, message in (("", "names no file"), (str(tmp_path), "is a directory")):
        assert main(["--input", str(TINY), "--vocab_size", "600", "--output", wrong]) == 2
        assert message in capsys.readouterr().err


def test_command_prints_bytes_per_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "new" / "tok.model"
    assert main(["--input", str(TINY), "--vocab_size", "500", "--output", str(output)]) == 0
    assert "bytes per token" in capsys.readouterr().out
    assert [path.name for path in output.parent.iterdir()] == ["tok.model"]
