"""Text from a trained model, by transformers' own `generate` (KV cache, batches, stopping) on its Llama form."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from data_prep.errors import UserError

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # of bytes whose character is not whole yet

FinishReason = Literal["end", "stop", "length"]


class TextTokenizer(Protocol):
    """A `data_prep.tokenizers.Tokenizer`, or an export's."""

    eod_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn, and when to stop. Raises UserError naming the option that cannot work."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 0
    """Draw among the k likeliest; 0: among all."""
    top_p: float = 1.0
    """Draw among the likeliest that together have this probability."""
    repetition_penalty: float = 1.0
    """Divides the logits of ids that occurred (multiplies negative ones); 1: none."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are cut off."""

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("seed", 0 <= self.seed < 2**63, "a number from 0 of 63 bits"),
            ("stop", all(self.stop), "a text that is not empty"),
        ):
            if not holds:
                raise UserError(f"--{name} must be {wanted}, got {getattr(self, name)}")

    def processors(self, numbers: Sequence[int]) -> LogitsProcessorList:
        """What transformers' sampling does to the logits; seed and number of a prompt alone decide the draw."""
        if self.temperature == 0:
            return LogitsProcessorList()
        steps: list[Any] = [TemperatureLogitsWarper(self.temperature)] if self.temperature != 1 else []
        steps += [TopKLogitsWarper(self.top_k)] if self.top_k else []
        steps += [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
        return LogitsProcessorList([*steps, _Draw(self.seed, numbers)])


class _Draw(LogitsProcessor):
    """Adds Gumbel noise, so that the largest logit is a draw from the softmax.

    Each prompt has a generator of its own: `torch.multinomial` would make a text depend on its neighbours in the
    batch.
    """

    def __init__(self, seed: int, numbers: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed((seed + number) % 2**63) for number in numbers]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        uniform = torch.stack([torch.rand(scores.shape[1], generator=each) for each in self._generators])
        smallest = torch.finfo(uniform.dtype).tiny
        noise = -(-uniform.clamp(min=smallest).log()).clamp(min=smallest).log()
        return scores.float() + noise.to(scores.device)


class _StopStrings(StoppingCriteria):
    """Ends each text at a stop string, whatever the tokenizer: transformers' own wants a tokenizer of its kind."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str], prompt_length: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, stop, prompt_length
        # No id but a control token stands for less than a byte of text; one more, whose space decoding may drop.
        self._tail = max(len(text.encode()) for text in stop) + 1

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        tails = input_ids[:, max(self._start, input_ids.shape[1] - self._tail) :].tolist()
        texts = [self._tokenizer.decode(ids) for ids in tails]
        found = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(found, device=input_ids.device)


class _Printer(BaseStreamer):
    """Prints one prompt and its text while it comes, but for what may yet become a stop string or a character."""

    def __init__(self, tokenizer: TextTokenizer, prompt: str, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._held_back = max(map(len, stop), default=1) - 1
        self._ids: list[int] = []
        self._prompt_ids = 0
        self._printed = 0
        print(prompt, end="", flush=True)

    def put(self, value: Any) -> None:
        """The prompt's ids first [1, s], then each new one [1]."""
        self._prompt_ids = self._prompt_ids or value.numel()
        self._ids += value.flatten().tolist()
        text = _new_text(self._tokenizer, self._ids, self._prompt_ids)
        shown = cut(text, self._stop)
        if shown == text:
            shown = text[: len(text) - self._held_back].rstrip(_INCOMPLETE)
        self._print(shown)

    def end(self) -> None:
        self._print(cut(_new_text(self._tokenizer, self._ids, self._prompt_ids), self._stop))
        print(flush=True)

    def _print(self, shown: str) -> None:
        print(shown[self._printed :], end="", flush=True)
        self._printed = max(self._printed, len(shown))


def _new_text(tokenizer: TextTokenizer, ids: list[int], prompt_length: int) -> str:
    """Of the ids after the prompt's. Decoded with them: by itself SentencePiece's text loses its first space."""
    return tokenizer.decode(ids)[len(tokenizer.decode(ids[:prompt_length])) :]


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


@dataclass(frozen=True)
class Generated:
    """A prompt and what came of it. tokens: new ones, the end of the document included."""

    prompt: str
    text: str
    tokens: int
    finish_reason: FinishReason


def check_text(prompt: str) -> str:
    """The prompt. Raises UserError when a command line's bytes were no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not UTF-8: {error.object[error.start :]!r}") from None
    return prompt


def prompt_ids(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """The ids of a document's beginning: in training every document followed an end-of-document."""
    return [tokenizer.eod_id, *tokenizer.encode(prompt)]


@torch.no_grad()
def generate(
    llama: Any,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    stream: bool = False,
    first_number: int = 0,
) -> list[Generated]:
    """Continue prompts together, each up to the end of the document, a stop string or `max_new_tokens`.

    Args:
        llama: of `to_llama` or of an export.
        stream: print the one prompt and its text while it comes.
        first_number: of the prompts among all; with the seed it decides what is drawn.
    """
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    width = max(map(len, ids))
    if width > llama.config.max_position_embeddings:
        print(
            f"note: a prompt of {width} tokens is longer than the {llama.config.max_position_embeddings} of a "
            "training sequence; the text may be poor",
            file=sys.stderr,
        )
    tokens = torch.tensor([[tokenizer.eod_id] * (width - len(each)) + each for each in ids])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in ids])
    stops = [_StopStrings(tokenizer, sampling.stop, width)] if sampling.stop else []
    penalty = {} if sampling.repetition_penalty == 1 else {"repetition_penalty": sampling.repetition_penalty}
    output = llama.generate(
        tokens.to(llama.device),
        attention_mask=mask.to(llama.device),
        do_sample=False,  # the processors have drawn
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=tokenizer.eod_id,
        pad_token_id=tokenizer.eod_id,
        logits_processor=sampling.processors(range(first_number, first_number + len(prompts))),
        stopping_criteria=StoppingCriteriaList(stops),
        streamer=_Printer(tokenizer, prompts[0], sampling.stop) if stream else None,
        **penalty,
    )
    return [
        _generated(prompt, new, tokenizer, sampling)
        for prompt, new in zip(prompts, output[:, width:].tolist(), strict=True)
    ]


def _generated(prompt: str, new: list[int], tokenizer: TextTokenizer, sampling: Sampling) -> Generated:
    ended = tokenizer.eod_id in new  # by itself, or padded after a stop string
    if ended:
        new = new[: new.index(tokenizer.eod_id)]
    start = prompt_ids(tokenizer, prompt)
    text = _new_text(tokenizer, [*start, *new], len(start))
    shown = cut(text, sampling.stop)
    if shown != text:
        return Generated(prompt, shown, len(new), "stop")
    return Generated(prompt, shown, len(new) + ended, "end" if ended else "length")


# ---- prompts from files and terminals ----


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, blank ones passed over; of a .jsonl file the `text` of each object.

    Raises UserError naming file and line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--prompts {path}: {error.strerror}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(orjson.loads(line)["text"] if path.suffix == ".jsonl" else line.decode())
        except (UnicodeDecodeError, orjson.JSONDecodeError):
            wanted = "a JSON object" if path.suffix == ".jsonl" else "UTF-8 text"
            raise UserError(f"--prompts {path}: line {number} is not {wanted}") from None
        except (KeyError, TypeError):
            raise UserError(f'--prompts {path}: line {number} has no "text"') from None
        if not isinstance(prompts[-1], str):
            raise UserError(f'--prompts {path}: line {number}: "text" is no string')
    if not prompts:
        raise UserError(f"--prompts {path}: holds no prompt")
    return prompts


def typed_prompts(terminal: Iterable[bytes]) -> Iterator[str]:
    """Lines of a terminal until its end (Ctrl-D), each asked for; one that is not UTF-8 is passed over."""
    lines = iter(terminal)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = next(lines, None)
        if line is None:
            return
        try:
            yield line.rstrip(b"\r\n").decode()
        except UnicodeDecodeError:
            print("that line is not UTF-8; type it again", file=sys.stderr)


def json_line(generated: Generated) -> str:
    """One object with prompt, text, tokens and finish_reason."""
    return orjson.dumps(asdict(generated)).decode()
