"""An export's tokenizer encodes exactly as training did."""

import io
import json
import random
from pathlib import Path

import pytest
import tokenizers
from sentencepiece import SentencePieceTrainer
from transformers import AutoTokenizer

from data_prep.tokenizers import load_tokenizer
from leviathan_ds.export.tokenizer import PROBES, check_convertible, check_encoding, write_tokenizer


@pytest.mark.parametrize("stride", [64, pytest.param(8, marks=pytest.mark.slow)])
def test_tokenizer_encodes_exactly(
    stride: int, tmp_path: Path, sample_tokenizer: Path, sample_documents: list[str]
) -> None:
    tokenizer = load_tokenizer(sample_tokenizer)
    write_tokenizer(tokenizer, tmp_path, 64)
    draw = random.Random(0)
    alphabets = ["ab", " \n\t", "-=", "01", ["the", " the"], ["</s>", "<s>", "<unk>", "<0x0A>", "▁"], "é中🙂"]
    noise = ["".join(draw.choice(draw.choice(alphabets)) for _ in range(40)) for _ in range(24_000 // stride)]
    lines = [line for document in sample_documents[::stride] for line in document.split("\n")]
    assert (
        check_encoding(tmp_path, tokenizer, [*PROBES, *noise, *lines, *sample_documents[:: 2 * stride]])
        > 4_000_000 // stride
    )
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.eos_token_id not in exported.encode("</s>")
    assert exported.decode([tokenizer.eod_id, *tokenizer.encode("hi")], skip_special_tokens=True) == "hi"


def _sentencepiece(path: Path, sample_documents: list[str], **options: object) -> Path:
    model, defaults = io.BytesIO(), {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}
    SentencePieceTrainer.train(
        sentence_iterator=(line for text in sample_documents[:30] for line in text[:3000].split("\n") if line),
        model_writer=model,
        **{"vocab_size": 700, "normalization_rule_name": "identity", "minloglevel": 2} | defaults | options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"add_dummy_prefix": True},
        {"add_dummy_prefix": True, "user_defined_symbols": ["\n"]},
        {"add_dummy_prefix": False, "user_defined_symbols": ["\n", "<|sep|>", "<|sep|><|x|>"]},
        {"add_dummy_prefix": False, "byte_fallback": False, "pad_id": 3},
    ],
    ids=str,
)
def test_other_sentencepiece_settings_encode_exactly(
    options: dict, tmp_path: Path, sample_documents: list[str]
) -> None:
    tokenizer = load_tokenizer(_sentencepiece(tmp_path / "tok.model", sample_documents, **options))
    write_tokenizer(tokenizer, tmp_path, 64)
    draw = random.Random(0)
    parts = ["<|sep|>", "<|x|>", "word", " ", "  ", "\n", "é", "中", "a", "</s>"]
    noise = ["".join(draw.choices(parts, k=12)) for _ in range(500)]
    check_encoding(tmp_path, tokenizer, [*PROBES, *noise, *sample_documents[:60]])
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id == tokenizer.pad_id
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["add_prefix_space"] == options["add_dummy_prefix"], "what llama.cpp goes by"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "one with --model_type bpe"),
        ({"normalization_rule_name": "nmt_nfkc"}, "Unicode normalisation"),
        ({"remove_extra_whitespaces": True}, "removes whitespace"),
        ({"user_defined_symbols": ["<|sep|>"]}, "dummy prefix"),
        ({"user_defined_symbols": ["  "], "add_dummy_prefix": False}, "hold spaces"),
    ],
)
def test_tokenizers_without_an_exact_counterpart_are_refused(
    options: dict, message: str, tmp_path: Path, sample_documents: list[str]
) -> None:
    tokenizer = load_tokenizer(_sentencepiece(tmp_path / "tok.model", sample_documents, **options))
    with pytest.raises(ValueError, match=message):
        check_convertible(tokenizer)


@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base"])
def test_tiktoken_ranks_become_a_tokenizer_json(name: str, tmp_path: Path, sample_documents: list[str]) -> None:
    tokenizer = load_tokenizer(name)
    check_convertible(tokenizer)
    write_tokenizer(tokenizer, tmp_path, 64)
    draw = random.Random(0)
    # Runs and overlaps, where two merges to one token compete; scripts and odd characters, where patterns differ.
    runs = ["".join(draw.choice(" -=a*\t\n.#A_0/") * draw.randint(1, 70) for _ in range(8)) for _ in range(400)]
    everywhere = [
        "".join(f"a{chr(c)}b {chr(c)}1'{chr(c)} " for c in range(s, s + 97)) for s in range(0, 0xD700, 97)
    ]
    beyond = ["".join(f"a{chr(c)}B {chr(c)}" for c in range(s, s + 50)) for s in range(0x10000, 0x1FC00, 499)]
    texts = [*PROBES, *runs, *everywhere, *beyond, *sample_documents[::40], "s'ſ 'S 'll 'LL" + " " * 5000 + "x"]
    assert check_encoding(tmp_path, tokenizer, texts) > 300_000
    assert load_tokenizer(tmp_path / "tokenizer.tiktoken").fingerprint == tokenizer.fingerprint
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.eos_token_id == tokenizer.eod_id == {"o200k_base": 199_999, "cl100k_base": 100_257}[name]
    assert exported.decode([tokenizer.eod_id, *tokenizer.encode("hi")], skip_special_tokens=True) == "hi"
    for token in (65_499, 65_500, 65_535, 65_536, 99_999, *((150_000, 199_997) if name == "o200k_base" else ())):
        assert exported.convert_tokens_to_ids(exported.convert_ids_to_tokens(token)) == token
        assert exported.decode([token]) == tokenizer.decode([token])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base"])
def test_tiktoken_export_on_all_of_the_sample_corpus(
    name: str, tmp_path: Path, sample_documents: list[str]
) -> None:
    tokenizer = load_tokenizer(name)
    write_tokenizer(tokenizer, tmp_path, 64)
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    everywhere = ["".join(f"a{c}b A{c} B1'{c} {c}" for c in points[start::4096]) for start in range(4096)]
    check_encoding(tmp_path, tokenizer, [*sample_documents, *everywhere])


def test_a_tokenizer_json_is_exported_as_it_is(tmp_path: Path, sample_documents: list[str]) -> None:
    """Its truncation, and what it puts around a text, were not there in training."""
    source = tmp_path / "tokenizer.json"
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    bpe.decoder = tokenizers.decoders.ByteLevel()  # type: ignore
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        sample_documents[:20],
        tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),  # type: ignore
    )
    bpe.add_special_tokens(["<s>", "<stop>", "</s>", "<pad>"])
    bpe.enable_truncation(4)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore
        single="<s> $A </s>", special_tokens=[("<s>", 600), ("</s>", 602)]
    )
    source.write_text(bpe.to_str())
    for end, token in ((None, 602), ("<stop>", 601)):
        tokenizer = load_tokenizer(source, end)
        folder = tmp_path / f"hf{token}"
        folder.mkdir()
        write_tokenizer(tokenizer, folder, 64)
        assert check_encoding(folder, tokenizer, [*PROBES, "<stop></s><s>", *sample_documents[::40]]) > 100_000
        exported = AutoTokenizer.from_pretrained(folder)
        assert exported.eos_token_id == token == tokenizer.eod_id and exported.pad_token_id == 603
        assert (
            json.loads((folder / "tokenizer.json").read_text())["model"] == json.loads(source.read_text())["model"]
        )


def test_another_encoding_is_refused(tmp_path: Path, sample_tokenizer: Path, sample_documents: list[str]) -> None:
    tokenizer = load_tokenizer(sample_tokenizer)
    write_tokenizer(tokenizer, tmp_path, 64)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-20]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="encodes otherwise"):
        check_encoding(tmp_path, tokenizer, sample_documents)
