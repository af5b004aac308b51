"""Does an export compute what the trainer computes? Real text, every position, before anything is published."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.files import bin_path
from data_prep.indexed import IndexedReader
from data_prep.sample import sample_corpus_path
from data_prep.sources import iter_documents
from leviathan_ds.data.dataset import training_prefixes
from leviathan_ds.model.embedding import GeneratorEmbedding
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import topology
from leviathan_ds.trained_model import TrainedModel

LOGIT_TOLERANCE = 1e-4
"""Largest difference of any logit, both models computing in float32."""
NUM_SEQUENCES = 4
"""Sequences of the training length whose logits are compared."""
TEXT_CHARACTERS = 2_000_000
"""Text whose encoding is compared."""


def real_text(trained: TrainedModel, text: Path | None) -> Iterator[str]:
    """Documents to check with: a text file, or the run's own dataset, or the sample corpus if it has moved.

    Raises UserError when the file cannot be read as UTF-8 text or is empty.
    """
    if text is not None:
        try:
            content = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {text}: {error}") from None
        if not content.strip():
            raise UserError(f"--text {text}: holds no text")
        return iter([content])
    prefixes: tuple[Path, ...] = ()
    with suppress(UserError):  # the blend file has moved
        prefixes = training_prefixes(trained.recipe.data)
    for prefix in prefixes:
        if bin_path(prefix).is_file():
            return (trained.tokenizer.decode(ids.tolist()) for ids in IndexedReader(prefix))
    return (document.text for document in iter_documents([sample_corpus_path()]))


def limited(documents: Iterator[str]) -> list[str]:
    """The first TEXT_CHARACTERS of the documents."""
    texts, left = [], TEXT_CHARACTERS
    while left > 0 and (document := next(documents, None)) is not None:
        texts.append(document[:left])
        left -= len(document)
    return texts


def sequences(trained: TrainedModel, texts: list[str]) -> Iterator[Tensor]:
    """At most NUM_SEQUENCES inputs [1, s] as in training: each document after an end-of-document id."""
    tokenizer, length = trained.tokenizer, trained.recipe.data.sequence_length
    stream = itertools.chain.from_iterable([tokenizer.eod_id, *tokenizer.encode(text)] for text in texts)
    for _ in range(NUM_SEQUENCES):
        if ids := list(itertools.islice(stream, length)):
            yield torch.tensor([ids], device=topology.device())


def trainer_model(trained: TrainedModel, dtype: torch.dtype) -> LanguageModel:
    """The trainer's own model (`TrainedModel.build`), rounding what an export has to round.

    dtype: of the checkpoint. Below float32 the generator's output is rounded to it, because the exported
    table is: the two models then differ in nothing that either of them stores.
    """
    model = trained.build()
    if dtype != torch.float32 and isinstance(model.embedding, GeneratorEmbedding):
        model.embedding.generator.register_forward_hook(lambda *call: call[-1].to(dtype).float())
        model.embedding.cache_table()  # in the same chunks as the exported one, or roundings would differ
    return model


def max_logit_difference(
    trained: TrainedModel, llama: Any, dtype: torch.dtype, texts: list[str]
) -> tuple[float, int]:
    """Largest difference between the trainer's logits and those of a float32 Llama, and over how many positions.

    dtype: of the exported weights. A NaN on either side counts as infinite.
    """
    reference, largest, positions = trainer_model(trained, dtype), 0.0, 0
    llama.to(topology.device()).eval()
    with torch.no_grad():
        for tokens in sequences(trained, texts):
            difference = (reference(tokens) - llama(tokens, use_cache=False).logits).abs().max().item()
            largest = max(largest, float("inf") if math.isnan(difference) else difference)
            positions += tokens.numel()
    return largest, positions
