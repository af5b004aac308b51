"""A training tokenizer as the files that `AutoTokenizer` loads, encoding exactly as in training.

transformers' own conversions differ: of a bare tokenizer.model (it takes control tokens out of the text, among
other things), and of tiktoken's ranks (it puts end-of-text one id too low). So tokenizer.json is built here piece
by piece, and `check_encoding` compares the two on real text before an export is published.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers

from data_prep.errors import UserError
from data_prep.files import TokenizerKind
from data_prep.indexed import IndexedReader
from data_prep.tokenizers import Tokenizer
from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer
from data_prep.tokenizers.tiktoken_ranks import TiktokenTokenizer
from leviathan_ds.run_directory import TOKENIZERS

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TRAINING_TOKENIZERS: dict[TokenizerKind, str] = {**TOKENIZERS, "huggingface": "training_tokenizer.json"}
"""The training tokenizer's own file in an export: an imported model knows its training datasets by it.

What `AutoTokenizer` reads, tokenizer.json, is not it even of that kind: it has no post-processor."""

_SPACE = "▁"  # SentencePiece's picture of a space
# Fields of sentencepiece_model.proto
_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_PROBED_DOCUMENTS = 8
# Text that looks like control tokens, byte pieces or nothing but space: what conversions get wrong.
PROBES = (
    "",
    " ",
    "\n",
    "  two  spaces  ",
    "\n\n\tindented\r\n    more\n",
    "<|endoftext|>",
    "a<|endofprompt|>b <pad>[SEP]<eos>",
    "I'll 'S it'ſ 1234567 CamelCASE ǅ e\u0301 x²³\u00a0\u2003\u3000 \x85.\r\n/\n\n//",
    "a literal <s> and </s> and <unk> in text",
    "</s>",
    "<s>",
    "<unk>",
    "</s></s>\n<s>",
    "<0x41><0x0A>",
    "▁ ▁▁",
    "naïve 中文 🙂👩‍👩‍👧 \x00\x7f\u200b\ufeff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0000000000000 ----------------",
    " " * 37 + "x" + " " * 64,
)


def check_convertible(tokenizer: Tokenizer) -> None:
    """Raise UserError, naming the way out, for a tokenizer whose encoding cannot be rebuilt exactly."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        _convertible_proto(tokenizer)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, and beside them the training tokenizer's file.

    Raises UserError as `check_convertible` does.
    """
    config = {
        # By name, or AutoTokenizer takes the class of model_type "llama", which builds its own normaliser.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        # A literal `</s>` in a text is encoded as ordinary pieces, as in training.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
    }
    if isinstance(tokenizer, SentencePieceTokenizer):
        proto = _convertible_proto(tokenizer)
        _build(proto).save(str(folder / TOKENIZER_JSON))
        unknown = proto.trainer_spec.unk_id
        # llama.cpp reads tokenizer.model, and of its dummy prefix only what stands here.
        config["add_prefix_space"] = proto.normalizer_spec.add_dummy_prefix
        names = {index: piece.piece for index, piece in enumerate(proto.pieces)}
    else:
        description = (
            _byte_level_bpe(tokenizer)
            if isinstance(tokenizer, TiktokenTokenizer)
            else json.loads(tokenizer.content)
        )
        # What it may put around a text was not there in training.
        description |= {"post_processor": None, "truncation": None, "padding": None}
        (folder / TOKENIZER_JSON).write_text(json.dumps(description, ensure_ascii=False))
        names = {token["id"]: token["content"] for token in description["added_tokens"]}
        unknown = None
    (folder / TRAINING_TOKENIZERS[tokenizer.kind]).write_bytes(tokenizer.content)
    # A document follows the end of the one before: this is what the model saw in front of a text.
    config["bos_token"] = config["eos_token"] = names[tokenizer.eod_id]
    if unknown is not None:
        config["unk_token"] = names[unknown]
    if tokenizer.pad_id is not None:
        config["pad_token"] = names[tokenizer.pad_id]
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def check_encoding(folder: Path, tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Encode texts with the exported tokenizer as users load it, and with the training tokenizer.

    Returns the number of tokens compared. Raises UserError with the first text on which ids or decoded text
    differ.
    """
    from transformers import AutoTokenizer

    exported: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if exported.eos_token_id != tokenizer.eod_id or exported.bos_token_id != tokenizer.eod_id:
        raise UserError(
            f"the exported tokenizer's end of document is {exported.eos_token_id}, not {tokenizer.eod_id}"
        )
    num_tokens = 0
    for text in texts:
        expected = tokenizer.encode(text)
        found = exported.encode(text, verbose=False)  # texts longer than the model's context are no mistake here
        if found != expected:
            place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), -1)
            around = tokenizer.decode(expected[max(0, place - 5) : place + 5])
            raise UserError(
                f"the exported tokenizer encodes otherwise than the training tokenizer near {around!r}"
            )
        # SentencePiece shows an unknown piece as " ⁇ ": its text is lost in either program.
        if exported.unk_token_id not in found and exported.decode(found) != tokenizer.decode(expected):
            raise UserError(f"the exported tokenizer decodes otherwise than the training tokenizer: {text[:60]!r}")
        num_tokens += len(expected)
    return num_tokens


class Encoder(Protocol):
    """Any tokenizer, ours or an export's."""

    def encode(self, text: str) -> list[int]: ...


def encodes_alike(prefix: Path, tokenizer: Tokenizer, other: Encoder) -> bool:
    """Whether the first documents of a dataset, which `tokenizer` encoded, have the same ids by another one."""
    documents = itertools.islice(IndexedReader(prefix), _PROBED_DOCUMENTS)
    texts = (tokenizer.decode(document.tolist()) for document in documents)
    return all(other.encode(text) == tokenizer.encode(text) for text in texts)


def _convertible_proto(tokenizer: SentencePieceTokenizer) -> Any:
    proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(tokenizer.content)
    normalizer = proto.normalizer_spec
    user_defined = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]
    whole = [piece for piece in user_defined if len(piece) > 1]
    retrain = "train the tokenizer by data_prep.train_tokenizer to export it"
    for problem, reason in (
        (
            proto.trainer_spec.model_type != _BPE,
            "of SentencePiece's models only BPE has an exact counterpart; train one with --model_type bpe",
        ),
        (bool(normalizer.precompiled_charsmap), f"its Unicode normalisation has no exact counterpart; {retrain}"),
        (normalizer.remove_extra_whitespaces, f"it removes whitespace, which has no exact counterpart; {retrain}"),
        (not normalizer.escape_whitespaces, f"it does not escape spaces; {retrain}"),
        (proto.trainer_spec.treat_whitespace_as_suffix, f"it marks the ends of words; {retrain}"),
        (
            any(" " in piece or _SPACE in piece for piece in user_defined),
            f"user-defined pieces that hold spaces have no exact counterpart; {retrain}",
        ),
        (
            normalizer.add_dummy_prefix and bool(whole),
            f"user-defined pieces ({whole[:1]}) together with a dummy prefix have no exact counterpart; {retrain}",
        ),
    ):
        if problem:
            raise UserError(f"{tokenizer.path}: {reason}")
    return proto


def _build(proto: Any) -> tokenizers.Tokenizer:
    pieces = [piece.piece for piece in proto.pieces]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=_merges(proto),
            unk_token=pieces[proto.trainer_spec.unk_id],
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )
    prefix = proto.normalizer_spec.add_dummy_prefix
    tokenizer.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        ([normalizers.Prepend(_SPACE)] if prefix else []) + [normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    for piece in proto.pieces:
        if piece.type in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(piece.piece, normalized=False, special=True)])
        elif piece.type == _USER_DEFINED and len(piece.piece) > 1:
            # One character needs no such entry: no merge holds it, so it stays by itself.
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=True, special=False)])
    return tokenizer


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two, best score first.

    SentencePiece joins the pair whose union scores best; pieces of other kinds never take part.
    """
    normal = {piece.piece: (-piece.score, i) for i, piece in enumerate(proto.pieces) if piece.type == _NORMAL}
    ranked = []
    for piece, rank in normal.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                ranked.append((rank, normal[left][1], normal[right][1], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _byte_level_bpe(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """tokenizer.json of tiktoken's ranks.

    tiktoken joins the neighbours whose union has the lowest rank: so every way to make a token of two others is a
    merge, in the order of the token's rank; and it takes a whole word that is a token at once (ignore_merges). The
    special tokens stand in the vocabulary, because an added token that does not is given the first free id.
    """
    ranks = tokenizer.ranks
    characters = _byte_characters()

    def written(token: bytes) -> str:
        return token.decode("latin-1").translate(characters)

    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": name, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for name, index in tokenizer.special_tokens.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": tokenizer.split_pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", **byte_level},
            ],
        },
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {written(token): rank for token, rank in ranks.items()} | tokenizer.special_tokens,
            "merges": [(written(left), written(right)) for *_, left, right in sorted(merges)],
        },
    }


def _byte_characters() -> dict[int, str]:
    """Byte → the character by which byte-level vocabularies write it: printable ones by themselves."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or (byte >= 161 and byte != 173)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
