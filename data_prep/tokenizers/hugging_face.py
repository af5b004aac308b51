"""Hugging Face's tokenizer.json, read by the `tokenizers` library alone."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.files import TokenizerKind

_END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
_WORD_BOUNDARY = "▁"


class HuggingFaceTokenizer:
    """A tokenizer.json. Its special tokens are recognised nowhere in a text.

    End-of-document is the token that --eod_token names, or that its post-processor puts behind a text, or the one
    of the usual names that it has. `content` is the file, whose post-processor is replaced by one that puts
    --eod_token behind a text where the file alone would have meant another.
    """

    kind: TokenizerKind = "huggingface"

    def __init__(self, path: Path, content: bytes, eod_token: str | None) -> None:
        """Raises UserError as load_tokenizer does."""
        from tokenizers import Tokenizer

        try:
            description = orjson.loads(content)
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{path}: is truncated or no tokenizer.json ({error})") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if hasattr(self._tokenizer.model, "dropout"):
            self._tokenizer.model.dropout = None  # of its training: the same text has the same ids
        self.path = path
        self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._special = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._description = description
        found = self._end_of_document(eod_token)
        if eod_token is not None and found != eod_token:
            description["post_processor"] = _appending(eod_token, self._special[eod_token])
            content = orjson.dumps(description)
        self.content = content
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(self._vocabulary.values()) + 1
        self.eod_id = self._special[eod_token or found]
        self.pad_id = next((self._special[name] for name in _PAD_NAMES if name in self._special), None)
        self._refuse_control_tokens_from_text()

    def _end_of_document(self, wanted: str | None) -> str:
        """What the file alone says ends a document, "" where that is nothing and `wanted` is given."""
        if wanted is not None and wanted not in self._special:
            problem = (
                "is no special token of it, so that a text could produce it"
                if wanted in self._vocabulary
                else "is not in it"
            )
            raise UserError(
                f"--eod_token {wanted}: {problem}: {self.path}; it has {', '.join(self._special) or 'none'}"
            )
        appended = _appended(self._description.get("post_processor"))
        names = [appended] if appended in self._special else [name for name in _END_NAMES if name in self._special]
        if len(names) == 1:
            return names[0]
        if wanted is not None:
            return ""
        if names:
            raise UserError(f"{self.path}: {' and '.join(names)} could end documents; choose by --eod_token")
        raise UserError(
            f"{self.path}: has no end-of-document token among its special tokens "
            f"({', '.join(self._special) or 'none'}); name one by --eod_token"
        )

    def _refuse_control_tokens_from_text(self) -> None:
        unknown = (self._description.get("model") or {}).get("unk_token")
        for name, number in self._special.items():
            if name != unknown and any(number in self.encode(text) for text in (name, f"a{name}b", f" {name} ")):
                raise UserError(
                    f"{self.path}: the text {name!r} gives its control token {number}; take another tokenizer"
                )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        # One by one: the library's own batches start a thread for each core in each process.
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_byte_lengths(self) -> NDArray[np.int32]:
        """[vocab_size] int32. In a byte-level vocabulary a character is a byte; elsewhere a word boundary counts
        as one space, `<0x0A>` as one byte where byte fallback is on, and a continuation's prefix as nothing."""
        model = self._description["model"]
        byte_level = "ByteLevel" in _types(self._description.get("decoder"))
        prefix = model.get("continuing_subword_prefix") or ""
        added = self._tokenizer.get_added_tokens_decoder()
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, number in self._vocabulary.items():
            if number in added:
                lengths[number] = 0 if added[number].special else len(token.encode())
            elif token == model.get("unk_token"):
                continue
            elif byte_level:
                lengths[number] = len(token)
            elif model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
                lengths[number] = 1
            else:
                lengths[number] = len(token.removeprefix(prefix).replace(_WORD_BOUNDARY, " ").encode())
        return lengths


def _types(part: Any) -> set[str]:
    """The names of a part of the pipeline and of those nested in it."""
    if isinstance(part, list):
        return set[str]().union(*map(_types, part))
    if not isinstance(part, dict):
        return set()
    return {part.get("type", "")}.union(*(_types(value) for value in part.values()))


def _appended(processor: Any) -> str | None:
    """The special token that a post-processor puts behind a single text."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        return next(filter(None, map(_appended, processor["processors"])), None)
    if processor.get("type") != "TemplateProcessing":
        return None
    return processor["single"][-1].get("SpecialToken", {}).get("id")


def _appending(token: str, number: int) -> dict[str, Any]:
    """The post-processor that puts `token` behind a text, as `_appended` reads it."""
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [text, end],
        "pair": [text, end, second, end],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
