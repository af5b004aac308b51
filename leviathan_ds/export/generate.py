"""Text from a trained model, by transformers' own `generate` on its Llama form (KV cache, sampling)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from data_prep.errors import UserError
from data_prep.tokenizers import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Raises UserError naming the option that cannot work."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 0
    """Draw among the k likeliest; 0: among all."""
    top_p: float = 1.0
    """Draw among the likeliest that together have this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", -(2**63) <= self.seed < 2**63, "a number of 64 bits"),
        ):
            if not holds:
                raise UserError(f"--{name} must be {wanted}, got {getattr(self, name)}")

    def generate_options(self) -> dict[str, Any]:
        """The keyword arguments of transformers' `generate`."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return options


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a document's beginning: in training every document followed an end-of-document.

    Raises UserError for a prompt that is no text.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not UTF-8: {error.object[error.start :]!r}") from None
    return [tokenizer.eod_id, *tokenizer.encode(prompt)]


def generate(llama: Any, tokenizer: Tokenizer, prompt: str, sampling: Sampling, stream: bool = False) -> str:
    """The prompt and its continuation up to the end of the document or `max_new_tokens`.

    llama: of `to_llama`. stream: print the text while it comes, too. The same seed gives the same text.
    """
    from transformers import TextStreamer

    torch.manual_seed(sampling.seed)
    tokens = torch.tensor([prompt_ids(tokenizer, prompt)], device=llama.device)
    # The streamer calls nothing but decode(ids), which is ours too.
    streamer = TextStreamer(tokenizer) if stream else None  # pyright: ignore[reportArgumentType]
    output = llama.generate(
        tokens, attention_mask=torch.ones_like(tokens), streamer=streamer, **sampling.generate_options()
    )
    return tokenizer.decode(output[0].tolist())
