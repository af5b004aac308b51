"""What the ranks of a worker pool run for the tests of evaluation: commands and harness requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from leviathan_ds.parallel import topology


@dataclass(frozen=True)
class Layout:
    """Named `tp` so that a pool of ranks is kept for each size."""

    tp: int


def requests_of(arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def answers(layout: Layout, run: Path, batch_size: int, asked: dict[str, list[tuple[Any, ...]]]) -> dict[str, Any]:
    """Of the native adapter, by the name of its method."""
    from leviathan_ds.evaluation.harness import LeviathanLM
    from leviathan_ds.evaluation.scores import evaluating
    from leviathan_ds.trained_model import find_trained_model

    topology.initialize(layout.tp)
    trained = find_trained_model(run)
    model = trained.build()
    adapter = LeviathanLM(model, trained.tokenizer, trained.recipe.data.sequence_length, batch_size)
    with evaluating(model):
        return {name: getattr(adapter, name)(requests_of(arguments)) for name, arguments in asked.items()}


def evaluated(layout: Layout, arguments: list[str]) -> dict[str, Any]:
    """The figures of launchers/evaluate.py in a world that lives on."""
    from launchers.evaluate import parse
    from leviathan_ds.export.evaluate import Evaluation

    evaluation = Evaluation.prepare(parse(arguments))
    topology.initialize(layout.tp)
    return evaluation.run()
