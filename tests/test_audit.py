"""An audit against the tokens that loaders really gave; indices that are built ahead."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from data_prep.files import dataset_tokenizer_path
from data_prep.indexed import IndexedReader
from data_prep.tokenizers import load_tokenizer
from launchers import audit as command
from launchers import build_index
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import DataConfig, Recipe, TrainingConfig
from leviathan_ds.data.audit import Audit, sample_pieces
from leviathan_ds.data.dataset import build_datasets, check_data, num_train_samples
from leviathan_ds.data.loader import loader
from leviathan_ds.data.sampler import GlobalBatchSampler

LENGTH = 64


@pytest.fixture
def recipe(corpus_copy: Callable[..., Path]) -> Recipe:
    """A blend of two copies of the corpus, more than one epoch of them."""
    data = DataConfig(
        prefixes=(str(corpus_copy("one")), str(corpus_copy("other"))),
        weights=(3.0, 1.0),
        sequence_length=LENGTH,
        validation_fraction=0.2,
    )
    return Recipe(data=data, training=TrainingConfig(train_steps=200, micro_batch_size=2, global_batch_size=8))


def leave_run(folder: Path, recipe: Recipe, *starts: tuple[int, int], steps: int = 200) -> Path:
    """What a run leaves of itself: recipe, starts (first step, data-parallel size), losses up to a step."""
    folder.mkdir()
    (folder / run_directory.RECIPE).write_text(recipes.to_yaml(recipe))
    fingerprints = [{"fingerprint": each} for each in check_data(recipe.data).fingerprints]
    for first_step, size in starts:
        start = {"first_step": first_step, "layout": {"data_parallel_size": size}, "micro_batch_size": 2}
        with (folder / run_directory.STARTS).open("a") as file:
            file.write(json.dumps(start | {"data": fingerprints}) + "\n")
    (folder / run_directory.METRICS).write_text(json.dumps({"step": steps, "loss": 1.0}) + "\n")
    return folder


def add_fault(run: Path, **fault: Any) -> None:
    with (run / run_directory.FAULTS).open("a") as file:
        file.write(json.dumps(fault) + "\n")


def test_audit_names_the_tokens_that_the_loaders_gave(recipe: Recipe, tmp_path: Path) -> None:
    """Of both starts of a run: one rank, from step 101 on two."""
    train, _ = build_datasets(recipe.data, check_data(recipe.data), num_train_samples(recipe))
    audit = Audit(leave_run(tmp_path / "run", recipe, (0, 1), (100, 2)))
    readers = [IndexedReader(prefix) for prefix in audit.prefixes]
    datasets = set()
    for step, size in ((1, 1), (100, 1), (101, 2), (200, 2)):
        pieces = audit.pieces(step)
        datasets |= {piece.dataset for piece in pieces}
        assert {piece.rank for piece in pieces} == set(range(size))
        for rank in range(size):
            sampler = GlobalBatchSampler(step - 1, step, 8, 2, rank, size)
            for pass_index, batch in enumerate(loader(train, sampler, 0)):
                mine = [piece for piece in pieces if (piece.rank, piece.pass_index) == (rank, pass_index)]
                samples = list(dict.fromkeys(piece.sample for piece in mine))
                assert len(samples) == 2
                for row, sample in enumerate(samples):
                    parts = [
                        readers[piece.dataset][piece.document][piece.start : piece.stop]
                        for piece in mine
                        if piece.sample == sample
                    ]
                    ids = np.concatenate(parts)
                    assert ids[:-1].tolist() == batch.tokens[row].tolist()
                    assert ids[1:].tolist() == batch.labels[row].tolist()
    assert datasets == {0, 1}
    assert any(len({piece.document for piece in audit.pieces(step)}) > 8 for step in range(1, 200))


def test_fates_of_steps(recipe: Recipe, tmp_path: Path) -> None:
    """Skipped 18 to 20 and rolled back after 20 to the weights of step 15: 16 and 17 are undone."""
    run = leave_run(tmp_path / "run", recipe, (0, 1), steps=30)
    for step in (3, 18, 19, 20):
        add_fault(run, kind="skip", step=step)
    add_fault(run, kind="rollback", step=20, weights_of_step=15)
    audit = Audit(run)
    fates = {step: audit.fate(step) for step in (2, 3, 15, 16, 17, 18, 20, 21, 30, 31)}
    undone = "undone by the rollback after step 20"
    assert fates == {2: "trained", 3: "skipped", 15: "trained", 16: undone, 17: undone} | {
        **{18: "skipped", 20: "skipped", 21: "trained", 30: "trained", 31: "not reached"}
    }


def test_command_lists_decodes_and_compares(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = leave_run(tmp_path / "run", recipe, (0, 1))
    assert command.main([str(run), "--step", "7", "--json", "--text"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["sample"] for line in lines} == set(range(48, 56))
    prefix = Path(lines[0]["dataset"])
    ids = IndexedReader(prefix)[lines[0]["document"]][lines[0]["from"] : lines[0]["to"]]
    assert lines[0]["text"] == load_tokenizer(dataset_tokenizer_path(prefix, "sentencepiece")).decode(ids.tolist())
    assert command.main([str(run), "--steps", "7-8"]) == 0
    out = capsys.readouterr().out
    assert "step 7: trained, 8 samples" in out and "step 8: trained" in out and "rank 0 pass 3 sample 62: " in out

    # Another layout, and prefixes elsewhere: the same. Another seed, or another outcome: not.
    other = leave_run(tmp_path / "two_ranks", recipe, (0, 2))
    assert command.main([str(run), str(other), "--steps", "1-20"]) == 0
    seeded = replace(recipe, data=replace(recipe.data, seed=5))
    assert command.main([str(run), str(leave_run(tmp_path / "seeded", seeded, (0, 1))), "--step", "1"]) == 1
    assert "differs, first at" in capsys.readouterr().out
    add_fault(other, kind="skip", step=3)
    assert command.main([str(run), str(other), "--step", "3"]) == 1
    assert command.main([str(run), "--step", "201"]) == 2
    assert "the steps 1 to 200" in capsys.readouterr().err
    assert command.main([str(tmp_path), "--step", "1"]) == 2


def test_data_that_have_changed_are_refused(recipe: Recipe, tmp_path: Path, corpus: Path) -> None:
    run = leave_run(tmp_path / "run", recipe, (0, 1))
    text = (run / run_directory.STARTS).read_text()
    (run / run_directory.STARTS).write_text(text.replace(check_data(recipe.data).fingerprints[0], "0" * 64))
    assert command.main([str(run), "--step", "1"]) == 2


class Computed:
    """An array that is a function of the index."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function

    def __getitem__(self, index: int) -> Any:
        return self._function(index)


def test_positions_past_2_to_the_31() -> None:
    """Samples, and epochs × documents: as functions, since arrays of that length would fill the memory."""

    documents, samples_each = (
        3_000_000_011,
        4,
    )  # of 64 tokens
    dataset = SimpleNamespace(
        shuffle_index=Computed(lambda index: index),
        sample_index=Computed(lambda place: divmod(place * LENGTH, samples_each * LENGTH)),
        document_index=Computed(lambda position: position % 1000),
        dataset=SimpleNamespace(sequence_lengths=Computed(lambda document: samples_each * LENGTH)),
    )
    sample = 2 * 2**31 + 5  # past 2^32
    assert list(sample_pieces(dataset, sample)) == [(0, sample // 4 % 1000, LENGTH, 2 * LENGTH + 1)]
    last = documents * samples_each - 1  # in document 3,000,000,010, and into the next
    found = list(sample_pieces(dataset, last))
    assert found == [(0, (documents - 1) % 1000, 3 * LENGTH, 4 * LENGTH), (0, documents % 1000, 0, 1)]
    sampler = GlobalBatchSampler(2**31, 2**33, 1024, 8, 3, 4)
    assert next(iter(sampler)) == list(range(2**41 + 24, 2**41 + 32))
    assert sampler.step_indices(2**33 - 1)[-1][-1] == 2**43 - 1


def test_index_is_built_ahead_and_found(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(recipe, data=replace(recipe.data, index_cache=str(tmp_path / "cache")))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(recipes.to_yaml(recipe))))
    assert build_index.main(["--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["built", "built", "built", "built", "found"]  # equal validation
    assert "blend of 2 datasets: 1,600 samples" in lines[2]
    monkeypatch.setattr("leviathan_ds.data.index._build_aside", None)
    build_datasets(recipe.data, check_data(recipe.data), num_train_samples(recipe))
    assert build_index.main(["--config", str(path)]) == 0
    assert all(line.startswith("found") for line in capsys.readouterr().out.splitlines())
    assert build_index.main(["--config", str(path), "--data.index_cache="]) == 2
