"""A SentencePiece BPE model as the files that `AutoTokenizer` loads, encoding exactly as SentencePiece does.

transformers' own conversion of a bare tokenizer.model differs (it takes control tokens out of the text, among
other things), so tokenizer.json is built here piece by piece, and `check_encoding` compares the two on real
text before an export is published.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers

from data_prep.errors import UserError
from data_prep.tokenizers import Tokenizer

TOKENIZER_JSON, TOKENIZER_CONFIG, SENTENCEPIECE_MODEL = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
)

_SPACE = "▁"  # SentencePiece's picture of a space
# Fields of sentencepiece_model.proto
_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Text that looks like control tokens, byte pieces or nothing but space: what conversions get wrong.
PROBES = (
    "",
    " ",
    "\n",
    "  two  spaces  ",
    "\n\n\tindented\r\n    more\n",
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
    _convertible_proto(tokenizer)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and a copy of tokenizer.model into `folder`.

    Raises UserError as `check_convertible` does.
    """
    proto = _convertible_proto(tokenizer)
    _build(proto).save(str(folder / TOKENIZER_JSON))
    pieces = [piece.piece for piece in proto.pieces]
    config = {
        # By name, or AutoTokenizer takes the class of model_type "llama", which builds its own normaliser.
        "tokenizer_class": "PreTrainedTokenizerFast",
        # A document follows the end of the one before: this is what the model saw in front of a text.
        "bos_token": pieces[tokenizer.eod_id],
        "eos_token": pieces[tokenizer.eod_id],
        "unk_token": pieces[proto.trainer_spec.unk_id],
        "add_bos_token": False,
        "add_eos_token": False,
        # A literal `</s>` in a text is encoded as ordinary pieces, as in training.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
    }
    if tokenizer.pad_id is not None:
        config["pad_token"] = pieces[tokenizer.pad_id]
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    shutil.copyfile(tokenizer.path, folder / SENTENCEPIECE_MODEL)


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


def _convertible_proto(tokenizer: Tokenizer) -> Any:
    if tokenizer.kind != "sentencepiece":
        raise UserError(
            f"{tokenizer.path}: a {tokenizer.kind} tokenizer cannot be exported yet, only SentencePiece"
        )
    proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(tokenizer.path.read_bytes())
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
