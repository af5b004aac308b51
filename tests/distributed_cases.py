"""What the ranks of a worker pool run (see workers.py), and the single-process run that they are compared with."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leviathan_ds.config import GeneratorConfig, ModelConfig, ParallelConfig, Recipe, TrainingConfig
from leviathan_ds.data.loader import Batch, collate
from leviathan_ds.data.sampler import GlobalBatchSampler
from leviathan_ds.parallel import topology

CONFIGS = Path(__file__).parent.parent / "ds_configs"
GLOBAL_BATCH, SEQUENCE = 8, 16

MODEL = ModelConfig(
    vocab_size=503,  # pads to 504 at TP 1 and 512 at TP 2
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    make_vocab_size_divisible_by=8,
    generator=GeneratorConfig(seed_size=8, num_heads=2, num_knots=6, rank=4, out_proj_std=0.3),
)


@dataclass(frozen=True)
class Case:
    """One way to train the same model on the same batches."""

    tp: int = 1
    zero: str = "zero0"
    accumulation: int = 1
    sequence_parallel: bool = False
    split_distinct_ids: bool = True
    embedding: str = "leviathan"
    precision: str = "fp32"
    recompute: str = "none"
    compile: bool = False
    documents: bool = False
    """Attention stays within documents, of which every sample has two or three."""
    steps: int = 5

    def recipe(self, data_parallel_size: int) -> Recipe:
        return Recipe(
            model=replace(MODEL, embedding=self.embedding),  # pyright: ignore[reportArgumentType]
            parallel=ParallelConfig(self.tp, self.sequence_parallel, self.split_distinct_ids),
            training=TrainingConfig(
                train_steps=100,
                micro_batch_size=GLOBAL_BATCH // (self.accumulation * data_parallel_size),
                global_batch_size=GLOBAL_BATCH,
                lr=1e-2,
                warmup_steps=0,
                clip_grad=0.5,  # below the norms of these steps: clipping is at work
                # Adam divides by the root of the second moment: with a tiny epsilon it would blow the
                # rounding noise of near-zero gradients up to full steps.
                adam_eps=1e-4,
                precision=self.precision,  # pyright: ignore[reportArgumentType]
                recompute=self.recompute,  # pyright: ignore[reportArgumentType]
                compile=self.compile,
                loss_chunk_tokens=24,
                generator_lr_scale=0.5,
                table_lr_scale=0.7,
                head_lr_scale=1.2,
            ),
        )


def samples(steps: int, documents: bool = False) -> list[dict[str, Tensor]]:
    """Random sequences, the same in every process; some tokens without loss in a fixed share of each.

    documents: with positions that begin anew, as GPTDataset's with reset_position_ids.
    """
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, MODEL.vocabulary, (steps * GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    mask = torch.ones(SEQUENCE)
    mask[3] = 0
    found = [{"tokens": row[:-1], "labels": row[1:], "loss_mask": mask} for row in tokens]
    if documents:
        for number, sample in enumerate(found):
            lengths = (5, 4, SEQUENCE - 9) if number % 3 else (1, SEQUENCE - 1)
            sample["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
    return found


def batches(case: Case) -> list[list[Batch]]:
    """This rank's micro-batches, step by step."""
    size = topology.data_parallel_size()
    micro = GLOBAL_BATCH // (case.accumulation * size)
    sampler = GlobalBatchSampler(0, case.steps, GLOBAL_BATCH, micro, topology.data_parallel_rank(), size)
    data = samples(case.steps, case.documents)
    return [
        [collate([data[i] for i in indices]) for indices in sampler.step_indices(s)] for s in range(case.steps)
    ]


def plain_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Mean over the unmasked tokens by torch's cross-entropy on whole logits, not by the trainer's own loss.

    Documents go through the model one by one.
    """
    if batch.cu_seqlens is None:
        logits = model(batch.tokens)
    else:
        documents = batch.tokens.flatten().split(batch.cu_seqlens.diff().tolist())
        logits = torch.cat([model(document[None])[0] for document in documents]).view(*batch.tokens.shape, -1)
    counted = batch.loss_mask.bool()
    return torch.nn.functional.cross_entropy(logits[counted], batch.labels[counted])


def single_process_run(case: Case) -> dict[str, Any]:
    """The reference: one process, plain cross-entropy, torch.optim.AdamW and clip_grad_norm_, no DeepSpeed."""
    from leviathan_ds.model.initialization import initialize_weights
    from leviathan_ds.model.language_model import LanguageModel
    from leviathan_ds.parallel import registry
    from leviathan_ds.training.schedule import learning_rate

    topology.initialize(1)
    recipe = case.recipe(1)
    training = recipe.training
    model = LanguageModel(recipe.model, recipe.parallel)
    initialize_weights(model, recipe.model, training.seed)
    groups = registry.optimizer_groups(model, training)
    optimizer = torch.optim.AdamW(groups, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_eps)
    losses, norms, grads = [], [], {}
    for step, micro_batches in enumerate(batches(case)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training) * group["lr_scale"]
        loss = sum(plain_loss(model, batch) for batch in micro_batches) / len(micro_batches)
        loss.backward()
        if step == 0:
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}


def build(
    case: Case,
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
    zero_optimization: dict[str, Any] | None = None,
) -> tuple[Any, Recipe]:
    """The engine of a case on this rank, and its recipe.

    Args:
        change: made to the case's recipe.
        zero_optimization: over what the case's DeepSpeed configuration says there.
    """
    from leviathan_ds.parallel import ds_config
    from leviathan_ds.training import loop

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    topology.initialize(case.tp)
    recipe = change(case.recipe(topology.data_parallel_size()))
    path = CONFIGS / f"{case.zero}.json"
    values = ds_config.read(path)
    values["zero_optimization"] |= zero_optimization or {}
    return loop.build_engine(recipe, ds_config.fill(values, recipe, topology.world_size(), path))[0], recipe


def seeded(recipe: Recipe, seed: int) -> Recipe:
    return replace(recipe, training=replace(recipe.training, seed=seed))


def deepspeed_run(case: Case) -> dict[str, Any]:
    """The same through the engine and `training.step`; grads and weights are this TP rank's."""
    from deepspeed.utils import safe_get_full_grad

    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.training.schedule import learning_rate
    from leviathan_ds.training.step import mean_loss, train_step

    engine, recipe = build(case)
    losses, norms, grads = [], [], {}
    for step, micro_batches in enumerate(batches(case)):
        lr = learning_rate(step, recipe.training)
        if step == 0:  # train_step, opened up to look at the gradients before the optimizer
            for group in engines.parameter_groups(engine):
                group["lr"] = lr * group["lr_scale"]
            total = torch.zeros(())
            for batch in micro_batches:
                loss = mean_loss(engine, batch)
                engine.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    grads = {n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters()}
                engine.step()
                total += loss.detach()
            loss = total / len(micro_batches)
        else:
            loss = train_step(engine, iter(micro_batches), len(micro_batches), lr, torch.device("cpu"))
        torch.distributed.all_reduce(loss, group=topology.parallel_state.get_data_parallel_group())
        losses.append(loss.item() / topology.data_parallel_size())
        norm = engines.global_grad_norm(engine)
        norms.append(None if norm is None else float(norm))
    weights = {name: whole.clone() for name, whole in engines.named_local_parameters(engine)}
    engine.destroy()
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "weights": weights,
        "tp_rank": topology.tensor_parallel_rank(),
        "dp_rank": topology.data_parallel_rank(),
    }


def component_norms_run(case: Case) -> dict[str, Any]:
    """Gradient norms by component and of the whole, by DeepSpeed, at every step; in one process by torch."""
    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.parallel.gradients import component_norms
    from leviathan_ds.training.step import train_step

    engine, _ = build(case)
    by_component, whole, operations = [], [], set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operations.add(str(function))
            return function(*args, **(kwargs or {}))

    def note() -> None:
        with Recorder():
            norms = component_norms(engine)
        by_component.append({name: norm.item() for name, norm in norms.items()})

    for micro_batches in batches(case):
        # A vanishing learning rate: the gradients of all steps are those of the initial weights.
        train_step(engine, iter(micro_batches), len(micro_batches), 1e-30, torch.device("cpu"), on_gradients=note)
        norm = engines.global_grad_norm(engine)
        whole.append(None if norm is None else float(norm))
    engine.destroy()
    return {"by_component": by_component, "whole": whole, "operations": operations}


def single_process_component_norms(case: Case) -> list[dict[str, float]]:
    """The same of the initial weights by plain autograd in one process."""
    from leviathan_ds.model.initialization import initialize_weights
    from leviathan_ds.model.language_model import LanguageModel
    from leviathan_ds.parallel import registry

    topology.initialize(1)
    recipe = case.recipe(1)
    model = LanguageModel(recipe.model, recipe.parallel)
    initialize_weights(model, recipe.model, recipe.training.seed)
    norms = []
    for micro_batches in batches(case):
        model.zero_grad()
        (sum(plain_loss(model, batch) for batch in micro_batches) / len(micro_batches)).backward()
        squares: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            component = registry.rule_for(name).component
            squares[component] = squares.get(component, 0.0) + float(parameter.grad.double().square().sum())
        norms.append({component: square**0.5 for component, square in squares.items()})
    return norms


def replica_run(case: Case) -> dict[str, list[int]]:
    """Train; return the parameters whose replicas then differ, with the ranks."""
    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.training.step import train_step

    engine, _ = build(case)
    for micro_batches in batches(case):
        train_step(engine, iter(micro_batches), len(micro_batches), 1e-2, torch.device("cpu"))
    return engines.differing_replicas(engine)


def memory_run(case: Case, marks: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes of all living tensors, and bytes of resident memory, after the steps of `marks`."""
    import gc

    from leviathan_ds.training.step import train_step

    engine, _ = build(case)
    data, sizes = batches(case), []
    for step in range(1, max(marks) + 1):
        micro_batches = data[step % len(data)]
        train_step(engine, iter(micro_batches), len(micro_batches), 1e-3, torch.device("cpu"))
        if step in marks:
            gc.collect()
            storages = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in gc.get_objects()
                if type(tensor) in (Tensor, torch.nn.Parameter)
            }
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            sizes.append((sum(storages.values()), resident))
    return sizes


def counted_run(case: Case, zero_optimization: dict[str, Any]) -> tuple[Recipe, list[int], Counter]:
    """The recipe, of sizes that divide badly; of its last step distinct ids of each micro-batch and the bytes."""
    from fault_cases import guard_of

    from leviathan_ds.config import FaultsConfig
    from leviathan_ds.parallel.collectives import CountCollectives
    from leviathan_ds.parallel.watchdog import Watchdog
    from leviathan_ds.training.step import train_step

    def odd_sizes(recipe: Recipe) -> Recipe:
        sizes = GeneratorConfig(seed_size=7, num_heads=1, num_knots=5, rank=3, residual=True)
        data = replace(recipe.data, sequence_length=SEQUENCE)
        return replace(recipe, model=replace(recipe.model, generator=sizes), data=data)

    engine, recipe = build(case, odd_sizes, zero_optimization)
    guard, _ = guard_of(case, Path("not written"), FaultsConfig(), Watchdog(600))
    found, ids = Counter(), []
    for step, micro_batches in enumerate(batches(case)):
        with CountCollectives() as counted:
            train_step(engine, iter(micro_batches), len(micro_batches), 1e-2, torch.device("cpu"), guard)
            guard.settle(engine, step)
        found, ids = counted.bytes, [len(batch.distinct_ids) for batch in micro_batches]
    engine.destroy()
    return recipe, ids, found


def counted_log(case: Case) -> tuple[int, Counter]:
    """Number of components, and the bytes that the norms by component and the log of case.steps steps take."""
    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.parallel.collectives import CountCollectives
    from leviathan_ds.parallel.gradients import component_norms
    from leviathan_ds.training.step import train_step
    from leviathan_ds.training.step_log import StepLog

    class Unheard:
        def steps(self, *_: Any) -> None: ...

    engine, _ = build(case)
    log = StepLog(Unheard(), GLOBAL_BATCH * SEQUENCE, case.steps)  # pyright: ignore[reportArgumentType]
    counted, norms = Counter(), {}

    def note() -> None:
        with CountCollectives() as collectives:
            norms.update(component_norms(engine))
        counted.clear()
        counted.update(collectives.bytes)

    for micro_batches in batches(case):
        loss = train_step(
            engine, iter(micro_batches), len(micro_batches), 1e-2, torch.device("cpu"), on_gradients=note
        )
        log.add(loss, 1e-2, engines.global_grad_norm(engine))
    log.add_component_norms(norms)
    with CountCollectives() as collectives:
        log.flush(case.steps)
    engine.destroy()
    return len(norms), counted + collectives.bytes


def counted_collectives(_: int) -> list[Counter]:
    """What `CountCollectives` makes of single calls by this rank, tensor-parallel size 2."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from leviathan_ds.parallel.collectives import CountCollectives

    topology.initialize(2)
    whole, part = torch.zeros(6), torch.zeros(3, dtype=torch.bfloat16)
    calls = [
        lambda: dist.all_reduce(whole),
        lambda: dist.all_gather_into_tensor(torch.zeros(6, dtype=torch.bfloat16), part),
        lambda: dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(3)),
        lambda: dist.reduce_scatter_tensor(torch.zeros(3), whole),
        lambda: dist.broadcast(part, 0),
        lambda: dist.reduce(whole, 0),
        lambda: dist.all_reduce(whole, group=parallel_state.get_data_parallel_group()),  # of one rank
    ]
    found = []
    for call in calls:
        with CountCollectives() as counted:
            call()
        found.append(counted.bytes)
    with CountCollectives(), pytest.raises(RuntimeError, match="alltoall"):
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2))
    return found


def counted_over_a_strange_group(case: Case) -> None:
    """Three of four ranks."""
    import torch.distributed as dist

    from leviathan_ds.parallel.collectives import CountCollectives

    topology.initialize(case.tp)
    group = dist.new_group([0, 1, 2])
    if topology.rank() < 3:
        with CountCollectives(), pytest.raises(RuntimeError, match=r"ranks \[0, 1, 2\], no group"):
            dist.all_reduce(torch.zeros(1), group=group)


def resumed_run(case: Case, folder: Path, async_save: bool = True) -> tuple[list[float], list[float], bool]:
    """Losses of the steps after a checkpoint: without a stop, and from the checkpoint in a new engine.

    Also whether all weights, this TP rank's, end bitwise equal, and equal the checkpoint's safetensors in between.
    With async_save the steps after the checkpoint are done before its first byte is written.
    """
    from threading import Event

    from leviathan_ds import run_directory
    from leviathan_ds.config import RunConfig
    from leviathan_ds.model.weights import full_weights
    from leviathan_ds.parallel import engine as engines
    from leviathan_ds.parallel import registry
    from leviathan_ds.training import checkpoint
    from leviathan_ds.training.step import train_step

    engine, recipe = build(case)
    steps = batches(case)
    before, after = steps[:2], steps[2:]

    def train(engine, some) -> list[float]:
        return [train_step(engine, iter(micro), len(micro), 1e-2, torch.device("cpu")).item() for micro in some]

    recipe = replace(recipe, run=RunConfig(keep_checkpoints=1, async_save=async_save))
    checkpoints = checkpoint.Checkpoints(engine, folder, recipe)
    may_write = Event()
    may_write.set()
    really_write = checkpoint.writer.write_pickle
    checkpoint.writer.write_pickle = lambda *file: (may_write.wait(100), really_write(*file))[1]
    for step in (1, 2):
        train(engine, before[step - 1 : step])
        if step == 2 and async_save:
            checkpoints.wait()
            may_write.clear()
        checkpoints.save(run_directory.TrainerState(step, step * GLOBAL_BATCH, {}, [], None))
    at_save = {name: whole.clone() for name, whole in engines.named_local_parameters(engine)}
    undisturbed = train(engine, after)
    may_write.set()
    checkpoints.finish()
    checkpoint.writer.write_pickle = really_write
    saved = folder / run_directory.CHECKPOINTS / run_directory.checkpoint_name(2)
    expected = {name: whole.clone() for name, whole in engines.named_local_parameters(engine)}
    engine.destroy()

    rank, size = topology.tensor_parallel_rank(), topology.tensor_parallel_size()
    written = {name: registry.rule_for(name).shard(full, rank, size) for name, full in full_weights(saved)}
    equal = written.keys() == at_save.keys() and all(torch.equal(written[name], at_save[name]) for name in written)

    engine, _ = build(case, lambda recipe: seeded(recipe, 99))  # what is loaded must not matter
    checkpoint.load(engine, saved, same_layout=True)
    resumed = train(engine, after)
    found = dict(engines.named_local_parameters(engine))
    equal = equal and all(torch.equal(found[name], expected[name]) for name in expected)
    engine.destroy()
    return undisturbed, resumed, equal


def _saving_engine(case: Case, **run: Any) -> tuple[Any, Recipe]:
    from leviathan_ds.config import RunConfig

    return build(case, lambda recipe: replace(recipe, run=RunConfig(**run)))


def full_disk_run(case: Case, folder: Path, async_save: bool, stop: bool) -> dict[str, Any]:
    """Saves of steps 1 to 4, of which those of 2 and 4 find no room on rank 1's disk, and what comes of them."""
    import resource

    from leviathan_ds import run_directory
    from leviathan_ds.training import checkpoint

    said: list[str] = []
    engine, recipe = _saving_engine(case, keep_checkpoints=1, async_save=async_save, stop_on_failed_save=stop)
    checkpoints = checkpoint.Checkpoints(engine, folder, recipe, said.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    error, steps = None, []
    try:
        for step in range(1, 5):
            full = topology.rank() == 1 and step % 2 == 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if full else limits[0], limits[1]))
            checkpoints.save(run_directory.TrainerState(step, step * GLOBAL_BATCH, {}, [], None))
            checkpoints.wait()
            topology.barrier()
            names = [path.name for path in (folder / run_directory.CHECKPOINTS).iterdir()]
            topology.barrier()
            steps.append(sorted(names))
        checkpoints.finish()
    except ValueError as raised:
        error = str(raised)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        engine.destroy()
    return {"said": said, "error": error, "steps": steps}


def saved_steps(case: Case, folder: Path, steps: int = 1) -> list[str]:
    """Checkpoints of the first steps, all to be kept; what rank 0 says of them."""
    from leviathan_ds import run_directory
    from leviathan_ds.training import checkpoint

    said: list[str] = []
    engine, recipe = _saving_engine(case, keep_checkpoints=steps)
    checkpoints = checkpoint.Checkpoints(engine, folder, recipe, said.append)
    for step in range(1, steps + 1):
        checkpoints.save(run_directory.TrainerState(step, step * GLOBAL_BATCH, {}, [], None))
        checkpoints.wait()
    engine.destroy()
    return said


def damage_found(folder: Path) -> str | None:
    from leviathan_ds.training import checkpoint

    topology.initialize(1)
    return checkpoint.damage(folder)


def last_good_found(
    case: Case, run_dir: Path, blind_rank: int | None = None, failing_rank: int | None = None
) -> tuple[str | None, tuple[str, ...]] | str:
    """Name of the checkpoint to go on from, and why later ones are not; or the error.

    Args:
        blind_rank: sees no checkpoint.
        failing_rank: cannot read what it is to verify.
    """
    from unittest import mock

    from leviathan_ds import run_directory
    from leviathan_ds.training import checkpoint

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error", "manifest.json")

    topology.initialize(case.tp)
    breaks = {"read_state": blind_rank, "damage_of_share": failing_rank}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(checkpoint, "_VISIBLE_WITHIN_S", 0.3))
        for name, rank in breaks.items():
            if rank == topology.rank():
                stack.enter_context(mock.patch.object(run_directory, name, fail))
        try:
            path, passed_over = checkpoint.last_good(run_dir, verify=True)
        except ValueError as error:
            return str(error)
    return path and path.name, passed_over


def refusal_of_load(case: Case, folder: Path) -> str | None:
    """What `load` says of a checkpoint that it refuses; None if it loads it."""
    from leviathan_ds.training import checkpoint

    engine, _ = _saving_engine(case)
    try:
        checkpoint.load(engine, folder, same_layout=True)
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return None


def evaluation_run(data_parallel_size: int, num_samples: int) -> Any:
    """`evaluate` over random samples, as many passes on every rank as `validation_batches` says; by 3 groups."""
    from leviathan_ds.evaluation import scores
    from leviathan_ds.model.initialization import initialize_weights
    from leviathan_ds.model.language_model import LanguageModel

    topology.initialize(1)
    assert topology.data_parallel_size() == data_parallel_size
    model = LanguageModel(MODEL, ParallelConfig())
    initialize_weights(model, MODEL, seed=1)
    data = samples(steps=2)
    counted = scores.Uncounted(data, num_samples)
    indices = scores.validation_batches(num_samples, micro_batch_size=4)
    ids = torch.arange(MODEL.vocabulary)
    batches = [collate([counted[i] for i in each]) for each in indices]
    with scores.evaluating(model):
        return scores.evaluate(
            scores.trainer_losses(model), {"": batches}, scores.TokenTable(ids % 7, ids % 3, 3)
        )[""]


def logged_run(_: int) -> dict[str, Any]:
    """What `StepLog` records of two steps whose losses differ over the data-parallel ranks."""
    from leviathan_ds.training.step_log import StepLog

    class Recorder:
        def steps(self, records: list[dict[str, Any]], summary: dict[str, Any], remaining_s: float) -> None:
            self.records, self.summary, self.remaining_s = records, summary, remaining_s

    topology.initialize(1)
    recorder: Any = Recorder()
    log = StepLog(recorder, tokens_per_step=100, train_steps=12)
    ours = 1.0 + topology.rank()
    log.add(torch.tensor(ours), 0.1, torch.tensor(3.0))
    log.add(torch.tensor(2 * ours), 0.2, None)
    log.flush(8)
    return vars(recorder)


def examined(
    run_dirs: list[Path], wrong_rank: int | None = None, clock_ahead_s: float = 0.0, starting: bool = False
) -> Any:
    """The doctor's findings where each rank plays a node of its own, and sees its own run directory.

    Args:
        wrong_rank: gets sums with one element off.
        clock_ahead_s: of rank 1.
    """
    import os
    from types import SimpleNamespace
    from unittest import mock

    from leviathan_ds.doctor import examination
    from leviathan_ds.doctor.facts import Plan
    from leviathan_ds.parallel import ds_config

    topology.initialize(1)
    rank = topology.rank()
    recipe = Case(zero="zero1").recipe(topology.data_parallel_size())
    path = CONFIGS / "zero1.json"
    config = ds_config.fill(ds_config.read(path), recipe, topology.world_size(), path)

    all_reduce_right = torch.distributed.all_reduce

    def all_reduce(values: Tensor) -> None:
        all_reduce_right(values)
        values[5] += rank == wrong_rank

    def now() -> float:
        return time.time() + clock_ahead_s * rank

    clock = SimpleNamespace(time=now, monotonic=time.monotonic, perf_counter=time.perf_counter, sleep=time.sleep)
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_SIZE": "1"}),
        mock.patch.object(examination, "_PROBE_VISIBLE_WITHIN_S", 0.5),
        mock.patch.object(examination.dist, "all_reduce", all_reduce) if wrong_rank is not None else nullcontext(),
        mock.patch.object(examination, "time", clock),
        mock.patch.object(examination, "_BANDWIDTH_BYTES", 1 << 20),
    ):
        return examination.examination(Plan(recipe, run_dirs[rank], config, ("f" * 64,)), starting)


def examined_with_trouble(run_dirs: list[Path]) -> str:
    """What the doctor raises on this rank where rank 1's node cannot tell its facts."""
    from unittest import mock

    from data_prep.errors import UserError
    from leviathan_ds.doctor import facts

    trouble = PermissionError("no packages to be seen") if topology.rank() == 1 else None
    with (
        mock.patch.object(facts, "versions", side_effect=trouble, return_value={}),
        pytest.raises(UserError) as told,
    ):
        examined(run_dirs)
    return str(told.value)
