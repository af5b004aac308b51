"""Makes the task files in `tasks/` of the sample corpus: `python -m leviathan_ds.evaluation.sample_tasks`.

They show that scoring works where no hub can be reached, and say little of a model: a model trained on the sample
corpus has read most of the passages. Everything follows from the corpus and a fixed seed.

sample_last_word (as LAMBADA): four consecutive sentences; the last word is to be guessed, and occurs earlier in
    the passage, so that reading it helps.
sample_next_sentence (as HellaSwag): three consecutive sentences, and four to choose the next one from; the wrong
    ones are sentences of the same document that stand elsewhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from data_prep.files import written_aside
from data_prep.sample import sample_corpus_path
from data_prep.sources import iter_documents

TASKS = Path(__file__).parent / "tasks"
_DOMAINS = ("Gutenberg (PG-19)", "State of the Union")  # prose in sentences
_EXAMPLES = 100
_SEED = 1234
_SENTENCE_CHARACTERS = range(40, 240)
_CHOICES = 4
_WORD = re.compile(r"[A-Za-z]{4,}")


def prose() -> list[list[str]]:
    """The sentences of each document, in order."""
    documents = (each for each in iter_documents([sample_corpus_path()]) if each.domain in _DOMAINS)
    return [re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(document.text.split())) for document in documents]


def passages(sentences: list[str], length: int) -> Iterator[tuple[int, list[str]]]:
    """Runs of `length` sentences of usual size that do not overlap, with the place of each."""
    place = 0
    while place + length <= len(sentences):
        run = sentences[place : place + length]
        if all(len(sentence) in _SENTENCE_CHARACTERS for sentence in run):
            yield place, run
            place += length
        else:
            place += 1


def last_word(documents: list[list[str]], draw: random.Random) -> list[dict[str, Any]]:
    """{"text"}: without its last word's full stop, as LAMBADA's."""
    found = []
    for sentences in documents:
        for _, run in passages(sentences, 4):
            *before, word = " ".join(run).rstrip(".").split(" ")
            if run[-1].endswith(".") and _WORD.fullmatch(word) and word in _WORD.findall(" ".join(before)):
                found.append({"text": " ".join([*before, word])})
    return draw.sample(found, _EXAMPLES)


def next_sentence(documents: list[list[str]], draw: random.Random) -> list[dict[str, Any]]:
    """{"context", "choices", "label"}."""
    found = []
    for sentences in documents:
        usual = [place for place, each in enumerate(sentences) if len(each) in _SENTENCE_CHARACTERS]
        for place, run in passages(sentences, 4):
            *context, right = run
            elsewhere = [sentences[each] for each in usual if not place <= each < place + len(run)]
            if len(set(elsewhere) - {right}) < _CHOICES - 1:
                continue
            choices = [right, *draw.sample(sorted(set(elsewhere) - {right}), _CHOICES - 1)]
            draw.shuffle(choices)
            found.append({"context": " ".join(context), "choices": choices, "label": choices.index(right)})
    return draw.sample(found, _EXAMPLES)


def lines(examples: list[dict[str, Any]]) -> bytes:
    """As JSON lines."""
    return b"".join(orjson.dumps(example, option=orjson.OPT_APPEND_NEWLINE) for example in examples)


def made() -> dict[str, bytes]:
    """The content of every data file, by name."""
    documents, draw = prose(), random.Random(_SEED)
    return {
        "sample_last_word.jsonl": lines(last_word(documents, draw)),
        "sample_next_sentence.jsonl": lines(next_sentence(documents, draw)),
    }


if __name__ == "__main__":
    for name, content in made().items():
        with written_aside(TASKS / name) as file:
            file.write(content)
