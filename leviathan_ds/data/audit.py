"""Which documents an optimizer step consumed, from the indices alone: training records nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from data_prep.errors import UserError
from data_prep.indexed import IndexedReader
from data_prep.tokenizers import load_tokenizer
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.data.dataset import check_data, num_train_samples
from leviathan_ds.data.index import open_blend
from leviathan_ds.data.sampler import GlobalBatchSampler


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document in one sample: [start, stop), counted from the document's first.

    A sample has sequence_length + 1 tokens: its last one, a label only, is the first of the sample that follows it
    in the shuffled documents. `rank` is data-parallel; `sample` counts in the order of training.
    """

    step: int
    rank: int
    pass_index: int
    sample: int
    dataset: int
    document: int
    start: int
    stop: int


def sample_pieces(dataset: Any, index: int) -> Iterator[tuple[int, int, int, int]]:
    """(number of the dataset in the blend, document, start, stop) of a sample's pieces, in order."""
    number = 0
    if isinstance(dataset, BlendedDataset):
        number, index = int(dataset.dataset_index[index]), int(dataset.dataset_sample_index[index])
        dataset = dataset.datasets[number]
    for document, start, stop in _pieces(dataset, index):
        yield number, document, start, stop


def _pieces(dataset: GPTDataset, index: int) -> Iterator[tuple[int, int, int]]:
    # As GPTDataset reads them: places in the shuffled documents, and offsets there, of this sample and the next.
    place = int(dataset.shuffle_index[index])
    first, start = map(int, dataset.sample_index[place])
    last, stop = map(int, dataset.sample_index[place + 1])
    for position in range(first, last + 1):
        document = int(dataset.document_index[position])
        end = stop + 1 if position == last else int(dataset.dataset.sequence_lengths[document])  # pyright: ignore
        yield document, start if position == first else 0, end


class Audit:
    """The training data of a run, step by step. Steps count from 1, as in its log."""

    def __init__(self, run_dir: Path) -> None:
        """Raises UserError: no run, or its data are missing or no longer what it was trained on."""
        if not (run_dir / run_directory.RECIPE).is_file():
            raise UserError(f"{run_dir} is no run directory; give one that launchers/pretrain.py has made")
        self._run_dir = run_dir
        self._recipe = recipes.load(run_dir / run_directory.RECIPE)
        self._starts = run_directory.read_lines(run_dir / run_directory.STARTS)
        if not self._starts:
            raise UserError(f"{run_dir / run_directory.STARTS} names no start: this run has not begun")
        data = check_data(self._recipe.data)
        fingerprints = [manifest.fingerprint for manifest in data.manifests]
        if [part["fingerprint"] for part in self._starts[-1]["data"]] != fingerprints:
            raise UserError(
                f"{run_dir} was trained on other data than {', '.join(map(str, data.prefixes))} hold now"
            )
        self.prefixes, self.fingerprints = data.prefixes, fingerprints
        self._dataset = open_blend(self._recipe.data, data.train, num_train_samples(self._recipe), Split.train)
        self._tokenizer = load_tokenizer(data.tokenizer_path)
        self._readers = [IndexedReader(prefix) for prefix in data.prefixes]

    def fate(self, step: int) -> str:
        """What came of a step: trained, skipped, undone by a rollback, or not reached."""
        records = run_directory.read_lines(self._run_dir / run_directory.METRICS)
        if step > max((record["step"] for record in records if "loss" in record), default=0):
            return "not reached"
        faults = run_directory.read_lines(self._run_dir / run_directory.FAULTS)
        if any(fault["kind"] == "skip" and fault["step"] == step for fault in faults):
            return "skipped"
        for fault in faults:
            if fault["kind"] == "rollback" and fault["weights_of_step"] < step <= fault["step"]:
                return f"undone by the rollback after step {fault['step']}"
        return "trained"

    def pieces(self, step: int) -> list[Piece]:
        """Of all data-parallel ranks and passes, by rank, pass and sample. Raises UserError beyond its steps.

        The samples of a step depend on its number alone: skipped steps and rollbacks pass over their data.
        """
        training = self._recipe.training
        if not 1 <= step <= training.train_steps:
            raise UserError(f"--step {step}: {self._run_dir} has the steps 1 to {training.train_steps}")
        start = next(each for each in reversed(self._starts) if each["first_step"] < step)
        ranks = start["layout"]["data_parallel_size"]
        micro_batch_size = start.get("micro_batch_size", training.micro_batch_size)
        found = []
        for rank in range(ranks):
            sampler = GlobalBatchSampler(0, step, training.global_batch_size, micro_batch_size, rank, ranks)
            for pass_index, samples in enumerate(sampler.step_indices(step - 1)):
                for sample in samples:
                    pieces = sample_pieces(self._dataset, sample)
                    found += [Piece(step, rank, pass_index, sample, *piece) for piece in pieces]
        return found

    def text(self, piece: Piece) -> str:
        """The piece, decoded."""
        ids = self._readers[piece.dataset][piece.document][piece.start : piece.stop]
        return self._tokenizer.decode(ids.tolist())

    def content(self, step: int) -> list[tuple[Any, ...]]:
        """What a step trained on, whatever the layout and wherever the data lie: to compare two runs by."""
        pieces = sorted(self.pieces(step), key=lambda piece: piece.sample)
        return [
            (piece.sample, self.fingerprints[piece.dataset], piece.document, piece.start, piece.stop)
            for piece in pieces
        ]
