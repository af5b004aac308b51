"""Does an export compute what the trainer computes? Real text, every position, before anything is published.

Both models run layer by layer from their files, so that no more of either than one module is in memory.
n positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from data_prep.errors import UserError
from data_prep.files import bin_path
from data_prep.indexed import IndexedReader
from data_prep.sample import sample_corpus_path
from data_prep.sources import iter_documents
from leviathan_ds.config import ParallelConfig
from leviathan_ds.data.dataset import training_prefixes
from leviathan_ds.export.llama import ExportWeights, empty_model
from leviathan_ds.export.names import EMBED_TOKENS, LM_HEAD
from leviathan_ds.model.embedding import GeneratorEmbedding
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.model.tensor_files import TensorFiles
from leviathan_ds.model.weights import CheckpointWeights
from leviathan_ds.trained_model import TrainedModel

LOGIT_TOLERANCE, KL_TOLERANCE = 1e-4, 1e-6
"""Largest difference of any logit, and nats, between trainer and export that hold the same numbers."""
ROUNDING_KL_TOLERANCE = 0.02
"""Nats that rounding the weights to the export's dtype may cost."""
NUM_SEQUENCES = 4
"""Sequences of the training length whose logits are compared."""
TEXT_CHARACTERS = 2_000_000
"""Text whose encoding is compared."""

_LOGITS_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Parity:
    """How far an export's logits are from a reference's, both computed in float32.

    Attributes:
        max_logit_difference: over all positions and ids; infinite where either side has a NaN.
        kl_divergence: KL(reference ‖ export) in nats, the mean over the positions.
    """

    positions: int
    max_logit_difference: float
    kl_divergence: float

    def holds(self, logit_tolerance: float, kl_tolerance: float) -> bool:
        return self.max_logit_difference <= logit_tolerance and self.kl_divergence <= kl_tolerance


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


def sequences(trained: TrainedModel, texts: list[str]) -> Tensor:
    """At most NUM_SEQUENCES inputs [b, s] as in training: each document after an end-of-document id.

    A text that is too short for one gives a shorter one.
    """
    tokenizer, length = trained.tokenizer, trained.recipe.data.sequence_length
    stream = itertools.chain.from_iterable([tokenizer.eod_id, *tokenizer.encode(text)] for text in texts)
    ids = torch.tensor(list(itertools.islice(stream, NUM_SEQUENCES * length)))
    whole = len(ids) // length
    return ids[: whole * length].view(whole, length) if whole else ids[None]


def parity(
    trained: TrainedModel, weights: ExportWeights, folder: Path, texts: list[str]
) -> tuple[Parity, Parity | None]:
    """The export in a folder against the trainer's own model, on the CPU. Needs `topology.initialize(1)`.

    First against the trainer with the numbers that the export can hold: its weights, and the output of a
    generator that is not exported, rounded to the export's dtype. Then, where that rounds at all, against the
    trainer as it is.
    """
    files = exported_files(folder)
    tokens = sequences(trained, texts)
    with torch.no_grad():
        exported = _exported_side(folder, files, tokens)
        references = [_trainer_side(trained, weights, tokens, files)]
        if weights.rounds:
            references.append(_trainer_side(trained, weights, tokens, None))
        first, *second = _compare(references, exported, trained.recipe.model.vocabulary)
    return first, second[0] if second else None


def exported_files(folder: Path) -> TensorFiles:
    """The weights of an export. Raises UserError when there are none."""
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise UserError(f"{folder} holds no model*.safetensors")
    return TensorFiles(paths)


@dataclass(frozen=True)
class _Side:
    """A model's last hidden states [n, D], and how to read rows [start, stop) of its head [V, D], in float32."""

    hidden: Float[Tensor, "n D"]
    head: Callable[[int, int], Float[Tensor, "rows D"]]


def _exported_side(folder: Path, files: TensorFiles, tokens: Tensor) -> _Side:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = empty_model(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # computed, so it is no stranger to the CPU
    model.model.embed_tokens.train()  # a generator then runs on the ids that occur, without a table
    _stream(model, lambda name: files.tensor(name).float())
    head = EMBED_TOKENS if config.tie_word_embeddings else LM_HEAD
    return _Side(
        model.model(tokens, use_cache=False).last_hidden_state.flatten(0, 1),
        lambda start, stop: files.rows(head, start, stop).float(),
    )


def _trainer_side(
    trained: TrainedModel, weights: ExportWeights, tokens: Tensor, exported: TensorFiles | None
) -> _Side:
    """exported: round all numbers as the files have them; None: no rounding."""
    checkpoint, dtype = CheckpointWeights(trained.checkpoint), weights.dtype

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.float() if exported is None else tensor.to(dtype).float()

    def fetch(name: str) -> Tensor:
        # The table of a plain Llama is rounded once, at its end.
        in_table = weights.computes_table and name.startswith("embedding.")
        return checkpoint.tensor(name).float() if in_table else rounded(checkpoint.tensor(name))

    with torch.device("meta"):
        model = LanguageModel(trained.recipe.model, ParallelConfig()).eval()
    if exported is not None and weights.computes_table and isinstance(model.embedding, GeneratorEmbedding):
        model.embedding.generator.register_forward_hook(
            lambda *call: _as_written(call[-1], exported.tensor(EMBED_TOKENS)[call[1][0]], dtype)
        )
    _stream(model, fetch)
    hidden = model.decoder(
        hidden_states=model.embedding(tokens), attention_mask=None, rotary_pos_emb=model.rotary(tokens.shape[1])
    )
    tied = trained.recipe.model.embedding == "dense_tied"
    head = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    return _Side(
        hidden.transpose(0, 1).flatten(0, 1),
        lambda start, stop: rounded(checkpoint.rows(head, start, stop)),
    )


def _as_written(rows: Float[Tensor, "n D"], written: Float[Tensor, "n D"], dtype: torch.dtype) -> Tensor:
    """The generator's output rounded to the export's dtype.

    A number in the middle of two roundings may take either, since the sums behind it depend on how many ids are
    computed together: there the one that was written.
    """
    if dtype == torch.float32:
        return rows
    half_step = torch.finfo(dtype).eps / 2 * rows.abs() + 1e-6 * rows.abs().max()
    return torch.where((rows - written.float()).abs() <= half_step, written.float(), rows.to(dtype).float())


def _stream(model: nn.Module, fetch: Callable[[str], Tensor]) -> None:
    """Let every module of an empty model read its own parameters when it is called, and drop them afterwards."""

    def load(module: nn.Module, names: dict[str, str]) -> None:
        for name, whole_name in names.items():
            setattr(module, name, nn.Parameter(fetch(whole_name), requires_grad=False))

    def drop(module: nn.Module, names: dict[str, str]) -> None:
        for name in names:
            setattr(module, name, nn.Parameter(torch.empty(0, device="meta"), requires_grad=False))

    for path, module in model.named_modules():
        names = {name: f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        if names:
            module.register_forward_pre_hook(lambda module, _, names=names: load(module, names))
            module.register_forward_hook(lambda module, *_, names=names: drop(module, names))


def _compare(references: Sequence[_Side], exported: _Side, vocabulary: int) -> list[Parity]:
    """Every reference with the export, over all positions; the logits of a few rows of the heads at a time.

    With l and m the logits of reference and export, KL is the mean under softmax(l) of l - m, less the
    difference of their log-sum-exps; all of it is summed up row block by row block.
    """
    positions = len(exported.hidden)
    rows = max(1, _LOGITS_AT_ONCE // positions)
    largest = [torch.zeros(()) for _ in references]
    log_sum, own_log_sum, gap = (
        [torch.full((positions,), start, dtype=torch.float64) for _ in references]
        for start in (-math.inf, -math.inf, 0.0)
    )
    for start in range(0, vocabulary, rows):
        stop = min(start + rows, vocabulary)
        own = exported.hidden @ exported.head(start, stop).T
        own_block_sum = own.logsumexp(-1).double()
        for i, reference in enumerate(references):
            logits = reference.hidden @ reference.head(start, stop).T
            difference = logits - own
            largest[i] = torch.maximum(largest[i], difference.abs().max())  # a NaN stays
            total = torch.logaddexp(log_sum[i], logits.logsumexp(-1).double())
            share = (logits - total[:, None].float()).exp()
            gap[i] = gap[i] * (log_sum[i] - total).exp() + (share * difference).sum(-1).double()
            log_sum[i], own_log_sum[i] = total, torch.logaddexp(own_log_sum[i], own_block_sum)
    found = []
    for biggest, mean_gap, theirs, ours in zip(largest, gap, log_sum, own_log_sum, strict=True):
        divergence = (mean_gap - (theirs - ours)).mean().item()
        numbers = (biggest.item(), max(0.0, divergence))
        found.append(Parity(positions, *(math.inf if math.isnan(number) else number for number in numbers)))
    return found


def check_parameters(folder: Path, config: Any) -> None:
    """The files hold exactly the parameters of the configured model. Raises UserError."""
    expected = {name: list(p.shape) for name, p in empty_model(config).named_parameters()}
    found = exported_files(folder).shapes
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UserError(f"{name} is {found.get(name)} in {folder}, its configuration says {expected.get(name)}")
