"""The training loop: step, log, evaluate, save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from data_prep.errors import UserError
from data_prep.tokenizers import load_tokenizer
from leviathan_ds import accounting, run_directory
from leviathan_ds.config import Recipe
from leviathan_ds.data.loader import loader
from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.doctor import examination, facts
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import ds_config, launch, registry, topology
from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel.gradients import component_norms
from leviathan_ds.parallel.watchdog import Watchdog
from leviathan_ds.training import checkpoint
from leviathan_ds.training.evaluate import Evaluation, evaluate, token_bytes, validation_batches
from leviathan_ds.training.faults import StepGuard
from leviathan_ds.training.generator_health import generator_health
from leviathan_ds.training.job import Job, without_damage, write_run_dir
from leviathan_ds.training.metrics import Metrics
from leviathan_ds.training.profiling import traced
from leviathan_ds.training.schedule import learning_rate
from leviathan_ds.training.starts import record_start
from leviathan_ds.training.step import train_step
from leviathan_ds.training.step_log import StepLog


def run(job: Job) -> int:
    """Train a job to its last step, from its last checkpoint if it has one. Collective over all ranks.

    Returns the exit code: 0, or EXIT_STOPPED or EXIT_DIVERGED of parallel/launch.py.
    """
    recipe = job.recipe
    topology.initialize(recipe.parallel.tensor_model_parallel_size, recipe.run.distributed_timeout_minutes)
    examination.require_fit(facts.Plan(recipe, job.run_dir, job.ds_config, tuple(job.data.fingerprints)))
    _check_same_start(job)
    if recipe.run.verify_checkpoints == "checksums":
        job = without_damage(job, checkpoint.damage)
    if job.finished:
        if topology.rank() == 0:
            print(f"{job.run_dir} is done: all {recipe.training.train_steps} steps were trained, nothing to do")
        return 0
    state = None if job.resume_from is None else run_directory.read_state(job.resume_from)
    if topology.rank() == 0:
        write_run_dir(job)
        record_start(job)
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
        with Watchdog(60 * recipe.run.distributed_timeout_minutes) as watchdog:
            code = _train(job, engine, metrics, num_parameters, watchdog)
    finally:
        metrics.close()
    topology.barrier()  # the launcher kills all ranks as soon as one has left with a code
    return code


def _check_same_start(job: Job) -> None:
    """Every rank must have found the same checkpoint. Collective; raises UserError on all ranks alike."""
    steps = torch.tensor([job.first_step, -job.first_step], device=topology.device())
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    if steps[0] != -steps[1]:
        raise UserError(
            f"the ranks see different checkpoints in {job.run_dir} (steps {-int(steps[1])} to {int(steps[0])}); "
            "put --run_dir on a disk that all nodes share"
        )


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


def _train(job: Job, engine: DeepSpeedEngine, metrics: Metrics, num_parameters: int, watchdog: Watchdog) -> int:
    training, every, device = job.recipe.training, job.recipe.run, topology.device()
    sampler = GlobalBatchSampler(
        job.first_step,
        training.train_steps,
        training.global_batch_size,
        training.micro_batch_size,
        topology.data_parallel_rank(),
        topology.data_parallel_size(),
    )
    batches = iter(loader(job.train_dataset, sampler, job.recipe.data.num_workers))
    validate = _validator(job, engine, metrics)
    checkpoints = checkpoint.Checkpoints(engine, job.run_dir, job.recipe, job.first_step, metrics.say)
    for reason in job.passed_over:
        metrics.say(f"passing over a checkpoint: {reason}")
    metrics.say(_headline(job, num_parameters))
    if job.recipe.model.vocabulary > job.data.vocab_size:
        metrics.say(
            f"note: model.vocab_size is {job.recipe.model.vocabulary:,}, the tokenizer has "
            f"{job.data.vocab_size:,} ids; the rows between them are never trained on"
        )
    if job.first_step == 0:
        with watchdog.paused():
            initial = validate(0)
        if topology.rank() == 0:
            run_directory.update_summary(job.run_dir, initial_val_loss=initial.loss, parameters=num_parameters)

    tokens_per_step = training.global_batch_size * job.recipe.data.sequence_length
    guard = StepGuard(
        job.recipe.faults,
        sampler,
        watchdog,
        every.exit_duration_minutes,
        job.run_dir,
        job.layout,
        metrics,
        {} if job.resume_from is None else run_directory.read_state(job.resume_from).guard,
    )
    log = StepLog(metrics, tokens_per_step, training.train_steps, _utilization(job.recipe))
    batches = log.waits_for(batches)

    def note_component_norms() -> None:
        log.add_component_norms(component_norms(engine))

    for step in range(job.first_step, training.train_steps):
        done = step + 1
        last, due = done == training.train_steps, done % every.save_interval == 0
        logs = last or due or done % every.log_interval == 0
        lr = learning_rate(step, training)
        with traced(job.run_dir, done, every.profile_steps, log):
            on_gradients = note_component_norms if logs else None
            loss = train_step(engine, batches, job.num_passes, lr, device, guard, on_gradients)
        log.add(loss, lr, engines.global_grad_norm(engine))
        guard.settle(engine, step)
        watchdog.beat(done)
        rolled_back = False
        if guard.gave_up:
            with watchdog.paused():
                checkpoints.wait()
                rolled_back = guard.roll_back(engine, done)
            if not rolled_back:
                log.flush(done, guard.skipped_steps)
                return launch.EXIT_DIVERGED
        stops = guard.stop_reason is not None and not last
        saves = due or last or stops or rolled_back
        if logs or saves:
            log.flush(done, guard.skipped_steps)
        if every.replica_check_interval and done % every.replica_check_interval == 0:
            with log.paused(), watchdog.paused():
                check_replicas(engine)
        if (done % every.eval_interval == 0 and not stops) or last:
            with log.paused(), watchdog.paused():
                evaluation = validate(done)
        if last and topology.rank() == 0:  # before the last checkpoint: its presence means finished
            run_directory.update_summary(
                job.run_dir,
                final_val_loss=evaluation.loss,
                bits_per_byte=evaluation.bits_per_byte,
                tokens_per_s=log.mean_tokens_per_s,
                data_wait_share=log.data_wait_share,
                skipped_steps=guard.skipped_steps,
                steps=done,
                consumed_tokens=done * tokens_per_step,
            )
        if saves:
            state = run_directory.TrainerState(
                done,
                done * training.global_batch_size,
                job.layout,
                job.data.fingerprints,
                metrics.wandb_id,
                guard.state(),
            )
            with log.paused(), watchdog.paused():
                checkpoints.save(state, rotates=not guard.consecutive_skips)
        if stops:
            with watchdog.paused():
                checkpoints.finish()
            metrics.say(f"stopping after step {done}: {guard.stop_reason}; saved, the same command goes on")
            return launch.EXIT_STOPPED
    with watchdog.paused():
        checkpoints.finish()
    return 0


def _utilization(recipe: Recipe) -> Callable[[float], float | None]:
    """Model FLOPs utilisation of all devices at a rate in tokens per second."""
    flops = accounting.flops_per_token(recipe.model, recipe.data.sequence_length).total
    peak = accounting.device_peak_flops(topology.device_name(), recipe.training.precision)
    return lambda tokens_per_s: accounting.mfu(flops, tokens_per_s, topology.world_size(), peak)


def _validator(job: Job, engine: DeepSpeedEngine, metrics: Metrics) -> Any:
    dataset = job.validation_dataset
    indices = validation_batches(job.recipe.run.eval_samples, len(dataset), job.recipe.training.micro_batch_size)
    lengths = token_bytes(load_tokenizer(job.data.tokenizer_path), job.recipe.model.vocabulary)

    def validate(step: int) -> Evaluation:
        result = evaluate(engine, loader(dataset, indices, num_workers=0), lengths, topology.device())
        values = {
            "val_loss": result.loss,
            "val_perplexity": result.perplexity,
            "bits_per_byte": result.bits_per_byte,
        }
        metrics.evaluation(step, values)
        if health := generator_health(engine):
            metrics.evaluation(step, health)
        return result

    return validate


def _headline(job: Job, num_parameters: int) -> str:
    recipe = job.recipe
    start = "starting" if job.resume_from is None else f"resuming at step {job.first_step}"
    if job.resume_from is not None and not job.resumes_same_layout:
        start += " on another layout"
    return (
        f"{start}: {recipe.model.embedding}, {num_parameters:,} parameters, "
        f"TP {topology.tensor_parallel_size()} × DP {topology.data_parallel_size()}, "
        f"ZeRO-{ds_config.zero_stage(job.ds_config)}, "
        f"{recipe.training.precision}, clipping {job.ds_config['gradient_clipping']:g}, "
        f"{recipe.training.train_steps} steps of {recipe.training.global_batch_size} × "
        f"{recipe.data.sequence_length} tokens → {job.run_dir}"
    )
