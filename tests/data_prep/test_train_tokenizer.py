"""Training: lossless, reproducible, bounded in memory, with clear refusals."""

from pathlib import Path
from typing import Any

import pytest
from pile_texts import CONTROL_LOOKALIKES, HARD_TEXTS, TINY
from sentencepiece import SentencePieceProcessor

from data_prep.domain_sample import PILE_WEIGHTS, DomainSample, DomainWeights
from data_prep.errors import UserError
from data_prep.sample import sample_corpus_path
from data_prep.sources import Document, iter_documents
from data_prep.tokenizers import load_tokenizer
from data_prep.train_tokenizer import PieceRules, is_held_out, main, train_tokenizer


def test_the_demo_tokenizer_is_lossless_on_all_of_the_sample_corpus(tmp_path: Path):
    trained = train_tokenizer([sample_corpus_path()], tmp_path / "tok.model", vocab_size=8192)
    tokenizer = load_tokenizer(tmp_path / "tok.model")
    lengths = tokenizer.token_byte_lengths()
    counts = {True: [0, 0], False: [0, 0]}
    for document in iter_documents([sample_corpus_path()]):
        ids = tokenizer.encode(document.text)
        assert tokenizer.decode(ids) == document.text
        assert lengths[ids].sum() == len(document.text.encode())
        held_out = counts[is_held_out(document.text)]
        held_out[0] += len(document.text.encode())
        held_out[1] += len(ids)
    total = trained.total
    assert trained.held_out and total.sample_bytes == counts[False][0]
    # All of the held-out text fits; its documents are cut into blocks, which may part a piece or two.
    assert total.measured_bytes == counts[True][0] and 0.02 < counts[True][0] / 10_939_815 < 0.1
    assert total.measured_tokens == pytest.approx(counts[True][1], rel=1e-3)
    assert total.measured_bytes / total.measured_tokens > 3.0
    assert sum(row.measured_bytes for row in trained.domains.values()) == total.measured_bytes
    assert len(trained.domains) == 12


@pytest.mark.parametrize(
    ("model_type", "pieces"),
    [
        ("bpe", PieceRules()),
        ("unigram", PieceRules()),
        ("bpe", PieceRules(split_by_whitespace=False, split_digits=False, max_piece_length=24)),
        ("bpe", PieceRules(whitespace_pieces=False)),
        ("bpe", PieceRules(whitespace_as_suffix=True)),
        ("unigram", PieceRules(whitespace_as_suffix=True)),
    ],
    ids=str,
)
def test_hard_texts_round_trip(tmp_path: Path, model_type: Any, pieces: PieceRules):
    train_tokenizer([TINY], tmp_path / "tok.model", vocab_size=600, model_type=model_type, pieces=pieces)
    tokenizer = load_tokenizer(tmp_path / "tok.model")
    for text in HARD_TEXTS + CONTROL_LOOKALIKES:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert min(ids) > 2


@pytest.mark.parametrize(
    ("pieces", "shows"),
    [
        (PieceRules(split_by_whitespace=False), lambda piece: "▁" in piece.strip("▁")),
        (PieceRules(whitespace_as_suffix=True), lambda piece: len(piece) > 1 and piece.endswith("a▁")),
        (PieceRules(max_piece_length=3), lambda piece: False),
    ],
    ids=["across_spaces", "suffix", "short"],
)
def test_each_rule_shows_in_the_pieces(tmp_path: Path, pieces: PieceRules, shows: Any):
    train_tokenizer([TINY], tmp_path / "tok.model", vocab_size=700, pieces=pieces)
    found = SentencePieceProcessor(model_file=str(tmp_path / "tok.model")).id_to_piece(list(range(260, 700)))
    assert any(map(shows, found)) or pieces.max_piece_length == 3 == max(map(len, found))


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
    train_tokenizer([years], tmp_path / "joined", vocab_size=600, pieces=PieceRules(split_digits=False))
    joined = SentencePieceProcessor(model_file=str(tmp_path / "joined")).id_to_piece(list(range(260, 600)))
    assert any(sum(c.isdigit() for c in piece) > 1 for piece in joined)


def drawn(documents: list[Document], sample_bytes: int, weights: str, seed: int = 0) -> list[tuple[str, str]]:
    sample = DomainSample(sample_bytes, DomainWeights(weights), seed)
    for document in documents:
        sample.add(document)
    assert sample.num_bytes == sum(len(text.encode()) for _, text in sample.blocks())
    return sample.blocks()


def test_sample_is_bounded_uniform_and_in_order():
    documents = [Document(f"{i:06d}" + "x" * 994, "A") for i in range(2000)]
    sample = drawn(documents, 500_000, "size")
    numbers = [int(block[:6]) for _, block in sample]
    assert numbers == sorted(set(numbers)) and len(numbers) == 500
    assert 850 < sum(numbers) / len(numbers) < 1150  # 1000 in the mean, 4 sigma is 90
    assert drawn(documents[:5], 500_000, "size") == [("A", document.text) for document in documents[:5]]


def test_domains_share_the_sample_by_weight(tmp_path: Path):
    """Whatever their order: here they come one after the other, the smallest last."""
    sizes = {"big": 1000, "middle": 400, "small": 20}
    documents = [Document(f"{i:06d}" + "x" * 994, name) for name, count in sizes.items() for i in range(count)]
    file = tmp_path / "weights.yaml"
    file.write_text("big: 1\nmiddle: 3.0\nsmall: 6\nabsent: 2\n")
    for weights, expected in (
        ("uniform", {"big": 90, "middle": 90, "small": 20}),  # all of the small one, the others alike
        (str(file), {"big": 45, "middle": 135, "small": 20}),
    ):
        for order in (documents, documents[::-1]):
            sample = drawn(order, 200_000, weights)
            counts = {name: sum(domain == name for domain, _ in sample) for name in sizes}
            assert all(abs(counts[name] - expected[name]) <= 1 for name in sizes), (weights, counts)
            assert sum(len(text) for _, text in sample) <= 200_000
            middle = [int(text[:6]) for domain, text in sample if domain == "middle"]
            assert 130 < sum(middle) / len(middle) < 270  # 200 in the mean: no part of a domain is preferred
    by_size = [domain for domain, _ in drawn(documents, 200_000, "size")]
    assert 110 < by_size.count("big") < 170  # 141 in the mean


def test_the_piles_weights_are_shipped():
    weights = DomainWeights("pile")
    assert weights.weight("Pile-CC") == 18.11 and weights.weight("Enron Emails") == 0.14
    with pytest.raises(UserError, match="--domain_weights pile: no weight for the domain 'Rust book'"):
        weights.pool("Rust book")
    assert PILE_WEIGHTS.read_text().count("name:") == 22


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "cannot be read"),
        ("- 1", "holds no weights"),
        ("", "holds no weights"),
        ("a: -1", "'a': -1 is no domain with a weight"),
        ("a: true", "'a': True is no domain"),
        ("1: 2", "1: 2 is no domain"),
        ("- {name: a}", "'a': None is no domain"),
    ],
)
def test_wrong_weights(tmp_path: Path, content: str, message: str):
    file = tmp_path / "w.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=rf"w\.yaml.*{message}"):
        DomainWeights(str(file))
    with pytest.raises(UserError, match=r"none\.yaml cannot be read .*; or give size, uniform or pile"):
        DomainWeights(str(tmp_path / "none.yaml"))


def test_blocks_lose_no_text():
    text = "".join(f"line {i} é\n" * (i % 7) for i in range(3000)) + "x" * 30_000
    assert "".join(block for _, block in drawn([Document(text, "A")], 10**9, "size")) == text


def test_held_out_documents_are_not_trained_on(tmp_path: Path, write_jsonl: Any):
    """Each has a word of its own, which the tokenizer would know."""
    words = [
        "".join(f"{'bcdfghklmnpr'[i // 12**k % 12]}{'aeiou'[i // 7**k % 5]}" for k in range(3)) for i in range(200)
    ]
    texts = [f"{word} {word}. " * 40 for word in words]
    kept_out = [i for i, text in enumerate(texts) if is_held_out(text)]
    assert 3 < len(kept_out) < 20
    source = write_jsonl([{"text": text} for text in texts])
    trained = train_tokenizer([source], tmp_path / "tok.model", 700)
    assert trained.total.measured_bytes == sum(len(texts[i].encode()) for i in kept_out)
    pieces = set(SentencePieceProcessor(model_file=str(tmp_path / "tok.model")).id_to_piece(list(range(700))))
    assert not any(f"▁{words[i]}" in pieces for i in kept_out)
    assert sum(f"▁{word}" in pieces for word in words) > 100


def test_one_document_is_trained_on_and_measured(tmp_path: Path, write_jsonl: Any):
    for held_out in (False, True):
        text = next(t for i in range(1000) if is_held_out(t := TINY.read_text() + str(i)) == held_out)
        trained = train_tokenizer([write_jsonl([{"text": text}])], tmp_path / "tok.model", 600)
        assert not trained.held_out and trained.total.sample_bytes == trained.total.measured_bytes


def test_refusals_are_one_line(tmp_path: Path, write_jsonl: Any, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "tok.model"
    short = write_jsonl([{"text": "a few words"}], "short.jsonl")
    folder = tmp_path / "folder"
    folder.mkdir()
    empty = write_jsonl([{"text": " "}], "empty.jsonl")
    for source, size, message in (
        (short, "8192", "suffices for at most"),
        (TINY, "300", "need at least"),
        (TINY, "1", "at least 260"),
        (TINY, "99999999999999", "less than 2^31"),
        (folder, "600", "no file in this directory"),
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


def test_command_prints_the_compression_of_each_domain(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "new" / "tok.model"
    arguments = f"--input {TINY} --vocab_size 500 --output {output} --domain_weights uniform".split()
    assert main([*arguments, "--sample_bytes", "60000", "--no_split_by_whitespace"]) == 0
    printed = capsys.readouterr().out
    assert "held-out bytes" in printed and "bytes/token" in printed
    assert "WordNet" in printed and "total" in printed and "decided nothing" not in printed
    assert [path.name for path in output.parent.iterdir()] == ["tok.model"]
    assert main(arguments) == 0
    assert "--domain_weights uniform decided nothing: all text fits" in capsys.readouterr().out
    assert main([*arguments[:-1], "pile"]) == 2
    assert "no weight for the domain" in capsys.readouterr().err
