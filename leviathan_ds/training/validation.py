"""What a run measures of its model between steps: held-out loss, tasks, the generator's health."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from data_prep.tokenizers import load_tokenizer
from leviathan_ds.data.index import shares
from leviathan_ds.data.loader import loader
from leviathan_ds.evaluation.frequency import NUM_DECILES, deciles, training_frequencies
from leviathan_ds.evaluation.scores import (
    Score,
    TokenTable,
    Uncounted,
    blended,
    evaluate,
    evaluating,
    total,
    trainer_losses,
    validation_batches,
)
from leviathan_ds.training.generator_health import generator_health
from leviathan_ds.training.job import Job
from leviathan_ds.training.metrics import Metrics


class Validation:
    """Call it with the number of steps done: it measures, records, and returns the held-out score. Collective."""

    def __init__(self, job: Job, engine: DeepSpeedEngine, metrics: Metrics) -> None:
        self._recipe, self._engine, self._metrics = job.recipe, engine, metrics
        self._tokenizer = load_tokenizer(job.data.tokenizer_path)
        self._shares = shares(job.data.validation)
        wanted = max(1, job.recipe.run.eval_samples // len(job.validation_datasets))  # of each, whatever its share
        datasets = job.validation_datasets
        self._samples = {name: Uncounted(each, min(wanted, len(each))) for name, each in datasets.items()}
        groups, num_groups = None, 1
        if job.recipe.evaluation.deciles:
            groups, num_groups = deciles(training_frequencies(job.data.train)), NUM_DECILES
        self._table = TokenTable.of(self._tokenizer, job.recipe.model.vocabulary, groups, num_groups)

    def __call__(self, step: int) -> Score:
        engine = self._engine
        with evaluating(engine):
            domains = evaluate(trainer_losses(engine), self._batches(), self._table)
            tasks = self._tasks() if self._tasks_due(step) else {}
        by_group = blended(list(domains.values()), self._shares)
        score = total(by_group)
        self._metrics.evaluation(
            step,
            {
                "val_loss": score.loss,
                "val_perplexity": score.perplexity,
                "bits_per_byte": score.bits_per_byte,
            },
        )
        more: list[dict[str, float]] = []
        if len(domains) > 1:
            more.append({f"val_loss/{name}": total(groups).loss for name, groups in domains.items()})
        if len(by_group) > 1:
            more.append({f"val_loss_decile/{place:02d}": group.loss for place, group in enumerate(by_group, 1)})
        for values in (*more, tasks, generator_health(engine)):
            if values:
                self._metrics.evaluation(step, values)
        return score

    def _batches(self) -> dict[str, Any]:
        micro = self._recipe.training.micro_batch_size
        return {
            name: loader(samples, validation_batches(len(samples), micro), num_workers=0)
            for name, samples in self._samples.items()
        }

    def _tasks_due(self, step: int) -> bool:
        """At the intervals, before the first step and after the last."""
        settings = self._recipe.evaluation
        interval = settings.tasks_interval or self._recipe.run.eval_interval
        return bool(settings.tasks) and (step % interval == 0 or step == self._recipe.training.train_steps)

    def _tasks(self) -> dict[str, float]:
        from leviathan_ds.evaluation import harness

        settings, recipe = self._recipe.evaluation, self._recipe
        model = harness.LeviathanLM(
            self._engine, self._tokenizer, recipe.data.sequence_length, recipe.training.micro_batch_size
        )
        found = harness.run_tasks(model, settings.tasks, settings.include_path, settings.tasks_limit)
        return {f"task/{task}/{metric}": value for task, each in found.items() for metric, value in each.items()}
