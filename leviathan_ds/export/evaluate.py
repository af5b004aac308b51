"""launchers/evaluate.py: held-out loss overall, by dataset and by token frequency, of one model or of two; tasks.

Works on checkpoints and exports alike; a domain is a dataset of its own (`data_prep.preprocess --split_by`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from rich.console import Console
from rich.table import Table

from data_prep.cli import open_console
from data_prep.errors import UserError
from data_prep.files import written_aside
from leviathan_ds import recipe as recipes
from leviathan_ds.config import ParallelConfig
from leviathan_ds.data.dataset import check_data
from leviathan_ds.data.loader import loader
from leviathan_ds.evaluation.frequency import NUM_DECILES
from leviathan_ds.evaluation.scores import (
    Score,
    TokenLosses,
    TokenTable,
    Uncounted,
    blended,
    evaluate,
    evaluating,
    total,
    trainer_losses,
    validation_batches,
)
from leviathan_ds.export.evaluation_options import EvaluationOptions
from leviathan_ds.export.held_out import HeldOut, check_tokenizer, data_of, held_out
from leviathan_ds.export.loaded import Export, export_losses, find_model
from leviathan_ds.parallel import topology
from leviathan_ds.parallel.launch import LaunchEnvironment
from leviathan_ds.trained_model import TrainedModel

_BOOTSTRAP_ITERS = 1000  # for standard errors that have no formula

Scores = Mapping[str, Sequence[Score]]
"""Of each dataset, by decile."""


@dataclass(frozen=True)
class Evaluation:
    """Checked options: models, data and tasks that exist and fit each other."""

    models: list[TrainedModel | Export]
    data: HeldOut | None
    options: EvaluationOptions

    @staticmethod
    def prepare(options: EvaluationOptions) -> Evaluation:
        """Look at everything before any model is built. Raises UserError; no process group may exist yet."""
        if not options.data and not options.tasks:
            raise UserError("name what to evaluate on: --data PREFIX, --tasks a,b or both")
        if options.json is not None and not options.json.absolute().parent.is_dir():
            raise UserError(f"--json {options.json}: there is no folder {options.json.parent}")
        paths = [path for path in (options.checkpoint, options.compare) if path is not None]
        models = [find_model(path, options.trust_remote_code) for path in paths]
        _check_ranks(models, options.tensor_model_parallel_size)
        if options.tasks:
            for model in models:
                if isinstance(model, Export):
                    raise UserError(
                        f"{model.folder} is an export; run tasks on it by the harness: lm_eval --model hf "
                        f"--model_args pretrained={model.folder},add_bos_token=True"
                    )
            from leviathan_ds.evaluation import harness

            harness.check_tasks(options.tasks, options.include_path)
        return Evaluation(models, _data(models, options) if options.data else None, options)

    def run(self) -> dict[str, Any]:
        """All figures, ready for JSON, on rank 0. Collective; needs `topology.initialize`."""
        result: dict[str, Any] = {"data": self.options.data, "split": self.options.split, "models": []}
        found = []
        for model in self.models:
            with _running(model) as (losses, module):
                entry: dict[str, Any] = {"model": str(name_of(model))}
                if self.data is not None:
                    found.append(self._scores(losses, vocabulary(model)))
                    entry |= report(found[-1], self.data)
                if self.options.tasks and isinstance(model, TrainedModel):
                    entry["tasks"] = self._tasks(module, model)
                result["models"].append(entry)
        if self.data is not None and len(found) > 1:
            result["difference"] = difference(found[0], found[1], self.data.shares)
        return result

    def _scores(self, losses: Any, vocab_size: int) -> Scores:
        data, options = self.data, self.options
        assert data is not None
        table = TokenTable.of(data.tokenizer, vocab_size, data.deciles, NUM_DECILES)
        samples = {name: Uncounted(each, min(options.samples, len(each))) for name, each in data.samples.items()}
        batches = {
            name: loader(each, validation_batches(len(each), options.micro_batch_size), num_workers=0)
            for name, each in samples.items()
        }
        return evaluate(losses, batches, table)

    def _tasks(self, module: Any, model: TrainedModel) -> dict[str, dict[str, float]]:
        from leviathan_ds.evaluation import harness

        options, length = self.options, sequence_length(model)
        adapter = harness.LeviathanLM(module, model.tokenizer, length, options.micro_batch_size)
        return harness.run_tasks(adapter, options.tasks, options.include_path, options.limit, _BOOTSTRAP_ITERS)

    def publish(self, result: dict[str, Any]) -> None:
        """Print tables, write the JSON file."""
        show(open_console(), result)
        if self.options.json is not None:
            with written_aside(self.options.json) as file:
                file.write(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def name_of(model: TrainedModel | Export) -> Path:
    return model.folder if isinstance(model, Export) else model.checkpoint


def sequence_length(model: TrainedModel | Export) -> int:
    """Of training, in tokens."""
    return model.sequence_length if isinstance(model, Export) else model.recipe.data.sequence_length


def vocabulary(model: TrainedModel | Export) -> int:
    return model.vocabulary if isinstance(model, Export) else model.recipe.model.vocabulary


def _check_ranks(models: Sequence[TrainedModel | Export], tensor_parallel: int) -> None:
    world_size = LaunchEnvironment.read().world_size
    if world_size % tensor_parallel:
        raise UserError(
            f"--tensor_model_parallel_size {tensor_parallel} does not divide the number of ranks, {world_size}; "
            f"start them by deepspeed --num_gpus {tensor_parallel} launchers/evaluate.py"
        )
    for model in models:
        if not isinstance(model, Export):
            replace(model.recipe, parallel=ParallelConfig(tensor_parallel))  # refuses sizes that do not divide
        elif tensor_parallel > 1:
            raise UserError(f"{model.folder} is an export, which one rank holds whole: tensor parallelism 1 only")


def _data(models: Sequence[TrainedModel | Export], options: EvaluationOptions) -> HeldOut:
    if options.config is not None:
        recipe = recipes.load(options.config).data
    else:
        own = (model.recipe.data for model in models if isinstance(model, TrainedModel))
        recipe = next(own, data_of(options.data))
    tokenizers = {model.tokenizer.fingerprint for model in models if isinstance(model, TrainedModel)}
    if len(tokenizers) > 1:
        raise UserError(f"{options.compare} has another tokenizer than {options.checkpoint}; compare what has one")
    config = replace(
        recipe,
        prefixes=(),
        weights=(),
        blend=None,
        validation_prefixes=(),
        sequence_length=min(sequence_length(model) for model in models),
        tokenizer_fingerprint=next(iter(tokenizers), None),
    )
    train_data = check_data(data_of(options.train_data) if options.train_data else recipe)
    data = held_out(options.data, options.split, config, train_data)
    for model in models:
        if isinstance(model, Export):
            check_tokenizer(model, data)
    return data


@contextmanager
def _running(model: TrainedModel | Export) -> Iterator[tuple[TokenLosses, Any]]:
    """The model in float32 on this rank's device, and its losses."""
    if isinstance(model, Export):
        module = model.build(torch.float32).to(topology.device())
        yield export_losses(module), module
    else:
        module = model.build()
        with evaluating(module):
            yield trainer_losses(module), module


# ---- what is printed and written ----


def figures(score: Score) -> dict[str, float]:
    """A score as numbers of its own; NaN where nothing was counted."""
    return {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "tokens": score.tokens,
        "bytes": score.bytes,
    }


def report(found: Scores, data: HeldOut) -> dict[str, Any]:
    """All figures of a model, ready for JSON."""
    by_decile = blended(list(found.values()), data.shares)
    ids, shares = _decile_sizes(data)
    counted = total(score for groups in found.values() for score in groups)
    return {
        "overall": {**figures(total(by_decile)), "tokens": counted.tokens, "bytes": counted.bytes},
        "datasets": {name: figures(total(groups)) for name, groups in found.items()},
        "deciles": [
            {
                "ids": ids[decile],
                "training_share": shares[decile],
                "share": score.tokens,
                "loss": score.loss,
            }
            for decile, score in enumerate(by_decile)
        ],
        "deciles_by_dataset": {name: [figures(score) for score in groups] for name, groups in found.items()},
    }


def difference(found: Scores, other: Scores, shares: Sequence[float]) -> dict[str, Any]:
    """Loss of `other` minus that of `found`, nats per token; the deciles' parts add up to the overall one."""
    ours, theirs = (blended(list(each.values()), shares) for each in (found, other))
    return {
        "overall": total(theirs).loss - total(ours).loss,
        "datasets": {name: total(other[name]).loss - total(groups).loss for name, groups in found.items()},
        "deciles": [
            {"loss": b.loss - a.loss, "part_of_overall": b.nats - a.nats}
            for a, b in zip(ours, theirs, strict=True)
        ],
    }


def _decile_sizes(data: HeldOut) -> tuple[list[int], list[float]]:
    """Number of ids of each decile, and its part of the training tokens."""
    of_id = data.deciles
    shares = np.bincount(of_id, weights=data.frequencies, minlength=NUM_DECILES)
    return np.bincount(of_id, minlength=NUM_DECILES).tolist(), (shares / shares.sum()).tolist()


def show(console: Console, result: dict[str, Any]) -> None:
    """The tables: by dataset, by decile, of tasks; of a second model too, with the difference."""
    models, change = result["models"], result.get("difference")
    for number, each in enumerate(models, start=1):
        console.print(f"model {number}: {each['model']}" if len(models) > 1 else each["model"], markup=False)
    suffixes = [f" {number}" for number in range(1, len(models) + 1)] if len(models) > 1 else [""]
    if "overall" in models[0]:
        console.print(_by_dataset(models, suffixes, change))
        console.print(_by_decile(models, suffixes, change))
    if "tasks" in models[0]:
        console.print(_by_task(models, suffixes))


def _by_dataset(models: Sequence[dict[str, Any]], suffixes: Sequence[str], change: Any) -> Table:
    keys = ("loss", "perplexity", "bits_per_byte")
    names = [f"{key}{suffix}" for suffix in suffixes for key in keys]
    table = _table("dataset", "tokens", "bytes", *names, *(["2 - 1"] if change else []))
    datasets = list(models[0]["datasets"])
    for name in [*(datasets if len(datasets) > 1 else []), None]:
        values = [each["overall"] if name is None else each["datasets"][name] for each in models]
        cells = [f"{each[key]:.4f}" for each in values for key in keys]
        if change:
            cells.append(f"{change['overall'] if name is None else change['datasets'][name]:+.4f}")
        table.add_row(name or "all", f"{values[0]['tokens']:,.0f}", f"{values[0]['bytes']:,.0f}", *cells)
    return table


def _by_decile(models: Sequence[dict[str, Any]], suffixes: Sequence[str], change: Any) -> Table:
    """Its first rows are the tokens that training saw most often."""
    names = [f"loss{suffix}" for suffix in suffixes]
    extra = ["2 - 1", "part of the whole"] if change else []
    table = _table("frequency decile", "ids", "of training", "of tokens", *names, *extra)
    for decile, row in enumerate(models[0]["deciles"]):
        name = {0: "1 (frequent)", NUM_DECILES - 1: f"{NUM_DECILES} (rare)"}.get(decile, str(decile + 1))
        cells = [f"{each['deciles'][decile]['loss']:.4f}" for each in models]
        if change:
            cells += [f"{value:+.4f}" for value in change["deciles"][decile].values()]
        table.add_row(name, f"{row['ids']:,}", f"{row['training_share']:.1%}", f"{row['share']:.1%}", *cells)
    return table


def _by_task(models: Sequence[dict[str, Any]], suffixes: Sequence[str]) -> Table:
    table = _table("task", "metric", *(f"value{suffix}" for suffix in suffixes))
    for task, metrics in models[0]["tasks"].items():
        for metric in metrics:
            table.add_row(task, metric, *(f"{each['tasks'][task][metric]:.4f}" for each in models))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
