"""The training loop: step, log, evaluate, save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from leviathan_ds import accounting, run_directory
from leviathan_ds.config import Recipe
from leviathan_ds.data.loader import loader
from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.doctor import examination, facts
from leviathan_ds.evaluation.scores import Score
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import ds_config, launch, registry, topology
from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel.agreement import of_all_ranks, on_rank_0
from leviathan_ds.parallel.gradients import component_norms
from leviathan_ds.parallel.watchdog import Watchdog
from leviathan_ds.training import checkpoint
from leviathan_ds.training.faults import StepGuard
from leviathan_ds.training.job import Job, going_on_from, write_run_dir
from leviathan_ds.training.metrics import Metrics
from leviathan_ds.training.profiling import traced
from leviathan_ds.training.schedule import learning_rate
from leviathan_ds.training.starts import record_start
from leviathan_ds.training.step import train_step
from leviathan_ds.training.step_log import StepLog
from leviathan_ds.training.validation import Validation


def run(job: Job) -> int:
    """Train a job to its last step, from its last checkpoint if it has one. Collective over all ranks.

    Returns the exit code: 0, or EXIT_STOPPED or EXIT_DIVERGED of parallel/launch.py.
    """
    recipe = job.recipe
    topology.initialize(recipe.parallel.tensor_model_parallel_size, recipe.run.distributed_timeout_minutes)
    if topology.rank() == 0:  # for launchers/supervise.py
        with suppress(OSError):  # a full disk is the doctor's to name
            run_directory.write_text(job.run_dir / run_directory.MET, f"{topology.world_size()} ranks\n")
    plan = facts.Plan(recipe, job.run_dir, job.ds_config, tuple(job.data.fingerprints))
    seems_finished = all(of_all_ranks(job.finished))
    if not seems_finished:
        examination.require_fit(plan)
    # Anew, now that this job holds the run directory: another one may just have saved there.
    job = going_on_from(job, *checkpoint.last_good(job.run_dir, recipe.run.verify_checkpoints == "checksums"))
    if job.finished:
        if topology.rank() == 0:
            print(f"{job.run_dir} is done: all {recipe.training.train_steps} steps were trained, nothing to do")
        return 0
    if seems_finished:  # but its last checkpoint is damaged
        examination.require_fit(plan)
    state = None if job.resume_from is None else run_directory.read_state(job.resume_from)
    on_rank_0(lambda: _begin(job), f"{job.run_dir} cannot be written; make room and start the same command again")
    engine, num_parameters = build_engine(recipe, job.ds_config)
    if job.resume_from is not None:
        checkpoint.load(engine, job.resume_from, job.resumes_same_layout)
    check_replicas(engine)
    metrics = Metrics(
        job.run_dir,
        recipe.run,
        recipe.training.train_steps,
        job.first_step,
        state.wandb_id if state else None,
        enabled=topology.rank() == 0,
        settings={**dataclasses.asdict(recipe), "ds_config": job.ds_config, "parameters": num_parameters},
    )
    try:
        stop_file = job.run_dir / run_directory.STOP if topology.rank() == 0 else None
        with Watchdog(60 * recipe.run.distributed_timeout_minutes, stop_file) as watchdog:
            code = _Training(job, engine, metrics, num_parameters, watchdog).run()
        # Whatever launched this run: a study must know a diverged one (studies/runner.py).
        metrics.summarize(exit_code=code)
    finally:
        metrics.close()
    topology.barrier()  # the launcher kills all ranks as soon as one has left with a code
    return code


def _begin(job: Job) -> None:
    """Describe the start in the run directory, and take the records of steps that are run again out of it."""
    write_run_dir(job)
    record_start(job)
    run_directory.update_summary(job.run_dir, exit_code=None)  # an earlier start's says nothing of this one
    for name in (run_directory.METRICS, run_directory.FAULTS):
        run_directory.drop_later_lines(job.run_dir / name, job.first_step)


def build_engine(recipe: Recipe, config: dict[str, Any]) -> tuple[DeepSpeedEngine, int]:
    """The model with its initial weights under DeepSpeed, and its number of parameters (padding included)."""
    training = recipe.training
    model = LanguageModel(
        recipe.model, recipe.parallel, training.recompute, training.loss_chunk_tokens, training.compile
    )
    initialize_weights(model, recipe.model, training.seed)
    num_parameters = sum(
        parameter.numel() * (1 if rule.shard_dim is None else topology.tensor_parallel_size())
        for _, parameter, rule in registry.named_rules(model)
    )
    model.to(topology.device())
    return engines.initialize(model, training, recipe.parallel, config), num_parameters


def check_replicas(engine: DeepSpeedEngine) -> None:
    """Stop, on all ranks alike, when what should be equal over ranks is not. Collective."""
    differing = engines.differing_replicas(engine)
    if differing:
        name, ranks = next(iter(differing.items()))
        raise RuntimeError(
            f"replicas differ: {name} on rank {', '.join(map(str, ranks))}, and {len(differing) - 1} other "
            "parameters; this checkpoint or this machine is not to be trusted"
        )


class _Training:
    """The steps of one start, and what happens between them. All methods are collective.

    No phase but the steps themselves may look like a hang to the watchdog or like slow training in the log: such
    phases run inside `_between_steps`.
    """

    def __init__(
        self, job: Job, engine: DeepSpeedEngine, metrics: Metrics, num_parameters: int, watchdog: Watchdog
    ) -> None:
        training = job.recipe.training
        self._job, self._engine, self._metrics, self._watchdog = job, engine, metrics, watchdog
        self._num_parameters = num_parameters
        self._steps, self._every = training.train_steps, job.recipe.run
        self._tokens_per_step = training.global_batch_size * job.recipe.data.sequence_length
        sampler = GlobalBatchSampler(
            job.first_step,
            training.train_steps,
            training.global_batch_size,
            training.micro_batch_size,
            topology.data_parallel_rank(),
            topology.data_parallel_size(),
        )
        state = None if job.resume_from is None else run_directory.read_state(job.resume_from)
        self._imported_from = None if state is None else state.imported_from
        self._guard = StepGuard(
            job.recipe.faults,
            sampler,
            watchdog,
            self._every,
            job.run_dir,
            job.layout,
            metrics,
            {} if state is None else state.guard,
        )
        self._log = StepLog(metrics, self._tokens_per_step, self._steps, _utilization(job.recipe))
        self._batches = self._log.waits_for(iter(loader(job.train_dataset, sampler, job.recipe.data.num_workers)))
        self._validate = Validation(job, engine, metrics)
        self._checkpoints = checkpoint.Checkpoints(engine, job.run_dir, job.recipe, metrics.say)

    def run(self) -> int:
        """Train to the end, or until the guard says stop; returns the exit code."""
        self._announce()
        if self._job.first_step == 0:
            with self._between_steps():
                initial = self._validate(0)
            self._metrics.summarize(initial_val_loss=initial.loss, parameters=self._num_parameters)
        for step in range(self._job.first_step, self._steps):
            done = step + 1
            last, save_due = done == self._steps, done % self._every.save_interval == 0
            logs = last or save_due or done % self._every.log_interval == 0
            self._step(step, logs)
            rolled_back = self._guard.gave_up and self._roll_back(done)
            if self._guard.gave_up:  # still
                self._log.flush(done, self._guard.skipped_steps)
                return launch.EXIT_DIVERGED
            stops = self._guard.stop_reason is not None and not last
            saves = save_due or last or stops or rolled_back
            if logs or saves:
                self._log.flush(done, self._guard.skipped_steps)
            if self._every.replica_check_interval and done % self._every.replica_check_interval == 0:
                with self._between_steps():
                    check_replicas(self._engine)
            if last or (done % self._every.eval_interval == 0 and not stops):
                with self._between_steps():
                    evaluation = self._validate(done)
            if last:  # before the last checkpoint: its presence means finished
                self._summarize_end(evaluation)
            if saves:
                self._save(done)
            if stops:
                self._finish_saving()
                reason = self._guard.stop_reason
                self._metrics.say(f"stopping after step {done}: {reason}; saved, the same command goes on")
                return launch.EXIT_STOPPED
        self._finish_saving()
        return 0

    def _step(self, step: int, logs: bool) -> None:
        engine, log = self._engine, self._log
        lr = learning_rate(step, self._job.recipe.training)
        on_gradients = (lambda: log.add_component_norms(component_norms(engine))) if logs else None
        with traced(self._job.run_dir, step + 1, self._every.profile_steps, log):
            loss = train_step(
                engine, self._batches, self._job.num_passes, lr, topology.device(), self._guard, on_gradients
            )
        log.add(loss, lr, engines.global_grad_norm(engine))
        self._guard.settle(engine, step)
        self._watchdog.beat(step + 1)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        with self._log.paused(), self._watchdog.paused():
            yield

    def _roll_back(self, done: int) -> bool:
        with self._between_steps():
            self._checkpoints.wait()
            return self._guard.roll_back(self._engine, done)

    def _save(self, done: int) -> None:
        state = run_directory.TrainerState(
            done,
            done * self._job.recipe.training.global_batch_size,
            self._job.layout,
            self._job.data.fingerprints,
            self._metrics.wandb_id,
            self._guard.state(),
            self._imported_from,
        )
        with self._between_steps():
            # In a row of skipped steps the weights are doubtful: they push no healthy checkpoint out.
            self._checkpoints.save(state, rotates=not self._guard.consecutive_skips)

    def _finish_saving(self) -> None:
        with self._between_steps():
            self._checkpoints.finish()

    def _announce(self) -> None:
        for reason in self._job.passed_over:
            self._metrics.say(f"passing over a checkpoint: {reason}")
        for change in self._job.changes:
            self._metrics.say(f"the run's recipe changes: {change} from step {self._job.first_step}")
        self._metrics.say(_headline(self._job, self._num_parameters))
        rows, ids = self._job.recipe.model.vocabulary, self._job.data.vocab_size
        if rows > ids:
            self._metrics.say(
                f"note: model.vocab_size is {rows:,}, the tokenizer has {ids:,} ids; the rows between them are "
                "never trained on"
            )

    def _summarize_end(self, evaluation: Score) -> None:
        self._metrics.summarize(
            final_val_loss=evaluation.loss,
            bits_per_byte=evaluation.bits_per_byte,
            tokens_per_s=self._log.mean_tokens_per_s,
            data_wait_share=self._log.data_wait_share,
            skipped_steps=self._guard.skipped_steps,
            steps=self._steps,
            consumed_tokens=self._steps * self._tokens_per_step,
        )


def _utilization(recipe: Recipe) -> Callable[[float], float | None]:
    """Model FLOPs utilisation of all devices at a rate in tokens per second."""
    flops = accounting.flops_per_token(recipe.model, recipe.data.sequence_length).total
    peak = accounting.device_peak_flops(topology.device_name(), recipe.training.precision)
    return lambda tokens_per_s: accounting.mfu(flops, tokens_per_s, topology.world_size(), peak)


def _headline(job: Job, num_parameters: int) -> str:
    recipe = job.recipe
    start = "starting" if job.resume_from is None else f"resuming at step {job.first_step}"
    if job.resume_from is not None and run_directory.read_state(job.resume_from).weights_only:
        source = run_directory.read_state(job.resume_from).imported_from
        start = f"starting with the weights of {source}, without optimizer states"
    elif job.resume_from is not None and not job.resumes_same_layout:
        start += " on another layout"
    return (
        f"{start}: {recipe.model.embedding}, {num_parameters:,} parameters, "
        f"TP {topology.tensor_parallel_size()} × DP {topology.data_parallel_size()}, "
        f"ZeRO-{ds_config.zero_stage(job.ds_config)}, "
        f"{recipe.training.precision}, clipping {job.ds_config['gradient_clipping']:g}, "
        f"{recipe.training.train_steps} steps of {recipe.training.global_batch_size} × "
        f"{recipe.data.sequence_length} tokens → {job.run_dir}"
    )
