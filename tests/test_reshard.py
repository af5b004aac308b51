"""A run goes on in any other layout as if it had gone on in its own."""

from __future__ import annotations

import dataclasses
import math
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert_by_deepspeed
from distributed_cases import MODEL, Case
from reshard_cases import (
    SAVED_AT,
    loaded_by_deepspeed,
    resaved,
    resharded_run,
    restored_random_numbers,
    undisturbed_run,
)
from torch import Tensor
from workers import WorkerPool

from data_prep.errors import UserError
from leviathan_ds import run_directory
from leviathan_ds.model.weights import full_weights as written_weights
from leviathan_ds.parallel import registry
from leviathan_ds.training import universal
from leviathan_ds.training.whole_state import STATE_KEYS, open_state

TOLERANCE = 1e-5  # relative, in fp32
Saved = tuple[Path, list[float], dict[str, Tensor]]  # the checkpoint, losses after it, weights in the end


Shape = tuple[int, int]  # tensor-parallel and data-parallel size


@pytest.fixture(scope="session")
def alone() -> Iterator[WorkerPool]:
    pool = WorkerPool(1)
    yield pool
    pool.close()


class Pools:
    """pools[tp, dp]: the session's pool of so many ranks, started when first asked for."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def __getitem__(self, shape: Shape) -> WorkerPool:
        return self._request.getfixturevalue({1: "alone", 2: "two_ranks", 4: "four_ranks"}[math.prod(shape)])


class FreshPools:
    """The same with a pool for each shape, one alive at a time: asking for another closes it.

    A world keeps every process group that it ever made, with threads and sockets: in a pool that goes to and fro
    between tensor-parallel sizes they pile up, until its ranks stand still.
    """

    def __init__(self) -> None:
        self._shape: Shape | None = None
        self._pool: WorkerPool | None = None

    def __getitem__(self, shape: Shape) -> WorkerPool:
        if self._pool is None or self._shape != shape:
            self.close()
            self._shape, self._pool = shape, WorkerPool(math.prod(shape))
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@pytest.fixture(scope="session")
def pools(request) -> Pools:
    return Pools(request)


@pytest.fixture(scope="module")
def fresh_pools() -> Iterator[FreshPools]:
    pools = FreshPools()
    yield pools
    pools.close()


def case_of(layout: str, **kept: Any) -> tuple[Shape, Case, bool]:
    """ "tp2 dp1 zero3" → (2, 1), the case, and whether ZeRO-3's groups are small ("zero3_small")."""
    tp, dp, zero = layout.split()
    small = zero.endswith("_small")
    case = Case(tp=int(tp[2:]), zero=zero.removesuffix("_small"), **kept)
    return (case.tp, int(dp[2:])), case, small


def full_weights(results: list[tuple[list[float], Any]]) -> dict[str, Tensor]:
    shards = [shard for _, (dp, _, shard) in sorted(results, key=lambda result: result[1][1]) if dp == 0]
    full = {}
    for name in shards[0]:
        rule = registry.rule_for(name)
        tensor = rule.unshard([shard[name] for shard in shards])
        full[name] = tensor[: MODEL.vocabulary] if rule.is_vocabulary else tensor
    return full


class Runs:
    """runs(layout): the checkpoint of a run there, with its losses and weights after it; each is run once."""

    def __init__(self, pools: Pools | FreshPools, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._pools, self._folders = pools, tmp_path_factory
        self._runs: dict[Any, Saved] = {}

    def __call__(self, layout: str, **kept: Any) -> Saved:
        key = (layout, *kept.items())
        if key not in self._runs:
            shape, case, small = case_of(layout, **kept)
            folder = self._folders.mktemp("run")
            results = self._pools[shape].run(undisturbed_run, case, folder, small)
            (checkpoint,) = run_directory.complete_checkpoints(folder)
            self._runs[key] = checkpoint, results[0][0], full_weights(results)
        return self._runs[key]


@pytest.fixture(scope="session")
def saved(pools, tmp_path_factory) -> Runs:
    return Runs(pools, tmp_path_factory)


@pytest.fixture(scope="module")
def saved_afresh(fresh_pools, tmp_path_factory) -> Runs:
    return Runs(fresh_pools, tmp_path_factory)


def check(pools, expected: Saved, after: str, tolerance: float = TOLERANCE, **kept: Any) -> None:
    checkpoint, losses, weights = expected
    shape, case, small = case_of(after, **kept)
    results = pools[shape].run(resharded_run, case, checkpoint, small)
    for found, _ in results:
        assert found == pytest.approx(losses, rel=tolerance)
    found = full_weights(results)
    assert found.keys() == weights.keys()
    for name, wanted in weights.items():
        difference = (found[name] - wanted).norm() / wanted.norm().clamp(min=1e-12)
        assert difference < 10 * tolerance, name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp1 dp2 zero1", "tp2 dp1 zero2"),
        ("tp2 dp1 zero2", "tp1 dp4 zero3_small"),
        ("tp1 dp4 zero3_small", "tp2 dp2 zero1"),
        ("tp2 dp2 zero3", "tp1 dp2 zero1"),
        ("tp1 dp2 zero1", "tp2 dp2 zero3_small"),
        ("tp2 dp1 zero2", "tp1 dp1 zero0"),
        ("tp1 dp1 zero0", "tp2 dp1 zero1"),
        ("tp1 dp1 zero0", "tp1 dp2 zero2_offload"),
        ("tp1 dp2 zero2_offload", "tp2 dp1 zero3"),
        ("tp2 dp1 zero2", "tp1 dp2 zero3_offload"),
    ],
)
def test_goes_on_in_another_layout(pools, saved, before, after):
    check(pools, saved(before), after)


def test_dense_tied_goes_on_in_another_layout(pools, saved):
    """The table is the head's weight and is sharded over the vocabulary, whose padding changes with it."""
    dense = {"embedding": "dense_tied"}
    check(pools, saved("tp1 dp2 zero3", **dense), "tp2 dp1 zero2", **dense)


def test_bf16_goes_on_in_another_layout(pools, saved):
    """From float32 weights and moments; the sums of bf16 products differ with the layout."""
    bf16 = {"precision": "bf16"}
    check(pools, saved("tp1 dp2 zero1", **bf16), "tp2 dp1 zero3", tolerance=8e-4, **bf16)


SHAPES = ("tp1 dp1", "tp1 dp2", "tp2 dp1", "tp2 dp2", "tp1 dp4")
ZEROS = ("zero1", "zero2", "zero3")
# In an order in which pools change seldom.
PAIRS = [
    (f"{before} {zero_before}", f"{after} {zero_after}")
    for after in SHAPES
    for before in SHAPES
    for zero_before in ZEROS
    for zero_after in ZEROS
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), PAIRS, ids=["from_" + "_to_".join(pair).replace(" ", "_") for pair in PAIRS]
)
def test_every_pair(fresh_pools, saved_afresh, before, after):
    """In parts: `-k from_tp1_dp4`, of 45 pairs."""
    shape = before.rpartition(" ")[0]
    for zero in ZEROS:  # together: the pool of another shape closes theirs
        saved_afresh(f"{shape} {zero}")
    check(fresh_pools, saved_afresh(before), after)


def test_there_and_back_is_bitwise(pools, saved, tmp_path):
    """Taken over and saved at once: every element of weights and moments is where it was."""
    checkpoint, _, _ = saved("tp2 dp2 zero3")
    shape, case, _ = case_of("tp1 dp2 zero1")
    pools[shape].run(resaved, case, checkpoint, tmp_path)
    (there,) = run_directory.complete_checkpoints(tmp_path)
    before, after = open_state(checkpoint), open_state(there)
    assert after.adam_steps == before.adam_steps == SAVED_AT
    assert sorted(after.names) == sorted(before.names)
    for name in before.names:
        for key in STATE_KEYS:
            wanted, found = before.tensor(name, key), after.tensor(name, key)
            if registry.rule_for(name).is_vocabulary:
                assert wanted.shape[0] > found.shape[0], "the padding should differ"
                wanted = wanted[: found.shape[0]]
            assert torch.equal(found, wanted), (name, key)
            assert key != "exp_avg_sq" or found.any(), "moments should be at work"


def test_new_ranks_take_random_states_in_turn(pools, saved):
    checkpoint, _, _ = saved("tp1 dp2 zero1")
    for path in checkpoint.glob("random_states_rank*.pt"):  # what nothing in training does: ranks that differ
        states = torch.load(path, weights_only=True)
        states["torch"] = torch.Generator().manual_seed(int(path.stem[-1])).get_state()
        torch.save(states, path)
    shape, case, _ = case_of("tp2 dp2 zero1")
    expected = [torch.rand((), generator=torch.Generator().manual_seed(seed)).item() for seed in (0, 1, 0, 1)]
    assert pools[shape].run(restored_random_numbers, case, checkpoint) == list(enumerate(expected))


# ---- DeepSpeed's universal format ----


@pytest.fixture(scope="module")
def converted(saved, tmp_path_factory) -> tuple[Path, Saved]:
    """The universal form of a checkpoint of TP 2 × DP 2, and that run."""
    run = saved("tp2 dp2 zero1")
    return universal.convert(run[0], tmp_path_factory.mktemp("universal") / "run"), run


def test_a_failed_conversion_leaves_nothing_and_a_killed_one_does_not_matter(saved, tmp_path, monkeypatch):
    checkpoint, _, _ = saved("tp2 dp2 zero1")
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(universal, "_write_states", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(OSError, match="disk full"):
            universal.convert(checkpoint, output)
    assert list(tmp_path.iterdir()) == []
    leftover = tmp_path / "run.partial" / "checkpoints"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("of a kill")
    universal.convert(checkpoint, output)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not list(output.rglob("half")) and not list(output.rglob("*.partial"))
    with pytest.raises(UserError, match=r"--output .*run exists"):
        universal.convert(checkpoint, output)


def test_a_damaged_checkpoint_is_not_converted(saved, tmp_path):
    """What is written gets checksums of its own, and nobody would see the damage any more."""
    checkpoint, _, _ = saved("tp2 dp2 zero1")
    run = tmp_path / "run"
    copy = Path(shutil.copytree(checkpoint, run / run_directory.CHECKPOINTS / checkpoint.name))
    path = next(copy.glob("*optim_states.pt"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for source, message in (
        (copy, f"{path.name}: its content has changed"),
        (run, "holds no complete checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            universal.convert(source, tmp_path / "output")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_converted_run_keeps_its_records_and_is_another_wandb_run(saved, tmp_path):
    checkpoint, _, _ = saved("tp2 dp2 zero1")
    run = Path(shutil.copytree(run_directory.run_of(checkpoint), tmp_path / "run"))
    copy = run / run_directory.CHECKPOINTS / checkpoint.name
    records = ("recipe.yaml", "ds_config.json", "tokenizer.model", "starts.jsonl", "metrics.jsonl", "faults.jsonl")
    for name in (*records, "summary.json", "wandb_id"):
        (run / name).write_text(f"{name} of the run")
    state = dataclasses.replace(run_directory.read_state(copy), wandb_id="12345678")
    (copy / run_directory.TRAINER_STATE).write_text(state.to_json())
    (copy / run_directory.MANIFEST).unlink()
    files = [path for path in copy.rglob("*") if path.is_file()]
    described = {path.name: (path.stat().st_size, run_directory.checksum(path)) for path in files}
    run_directory.write_manifest(copy, described)
    written = universal.convert(run, tmp_path / "output")
    kept = {path.name for path in (tmp_path / "output").iterdir()}
    assert kept == {*records, "summary.json", "checkpoints"}
    assert all((tmp_path / "output" / name).read_text() == f"{name} of the run" for name in records)
    assert run_directory.read_state(written).wandb_id is None
    assert run_directory.damage(written) is None


def test_goes_on_from_the_universal_format(pools, converted):
    written, (checkpoint, losses, weights) = converted
    assert run_directory.incompleteness(written) is None
    check(pools, (written, losses, weights), "tp1 dp2 zero3")
    there = dict(written_weights(checkpoint))
    assert all(torch.equal(weight, there[name]) for name, weight in written_weights(written))


def test_deepspeed_reads_our_universal_format(pools, converted):
    """At TP 2 DeepSpeed's own loader cuts each tensor as the registry does."""
    written, _ = converted
    shape, case, _ = case_of("tp2 dp1 zero1")
    whole = open_state(written)
    for rank, states in enumerate(pools[shape].run(loaded_by_deepspeed, case, written)):
        assert sorted(states) == sorted(whole.names)
        for name, found in states.items():
            rule = registry.rule_for(name)
            for key in STATE_KEYS:
                full = whole.tensor(name, key)
                wanted = rule.shard(rule.padded(full, rule.full_shape(found[key].shape, 2)), rank, 2)
                assert torch.equal(found[key], wanted), (name, key)


def patterns() -> dict[str, Any]:
    """What DeepSpeed's converter must be told of the model, from the registry."""

    def of(wanted: Callable[[registry.ParameterRule], bool]) -> list[str]:
        # Of the generator's model: a pattern without a parameter is an error of the converter's.
        return [rule.pattern for rule in registry.RULES if rule.component != "embedding" and wanted(rule)]

    return {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": MODEL.vocabulary,
        "vocabulary_parameter_patterns": of(lambda rule: rule.is_vocabulary),
        "tp_replicated_parameter_patterns": of(lambda rule: rule.shard_dim is None),
        "parameter_with_row_parallelism_patterns": of(lambda rule: rule.shard_dim == 1),
        "parameter_with_2_sub_params_cat_dim_0": of(lambda rule: rule.num_stacked == 2),
        "parameter_to_average_patterns": [],
        "pipeline_replicated_parameter_patterns": [],
    }


@pytest.mark.parametrize("layout", ["tp2 dp2 zero1", "tp2 dp2 zero3"])
def test_deepspeeds_converter_writes_the_same(saved, tmp_path, layout):
    checkpoint, _, _ = saved(layout)
    ours = universal.convert(checkpoint, tmp_path / "ours")
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    for path in copy.glob("*_model_states.pt"):
        states = torch.load(path, weights_only=False)
        states |= {"universal_checkpoint_info": patterns(), "iteration": SAVED_AT}
        states["module"] = {k: v for k, v in (states["module"] or {}).items() if v is not None}
        torch.save(states, path)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    theirs = tmp_path / "theirs"
    convert_by_deepspeed(
        Namespace(input_folder=str(copy), output_folder=str(theirs), inject_missing_state=False, **options)
    )
    folders = sorted(path.parent.name for path in theirs.glob("zero/*/fp32.pt"))
    assert folders == sorted(path.name for path in (ours / "zero").iterdir())
    for name in folders:
        for key in STATE_KEYS:
            found = torch.load(ours / "zero" / name / f"{key}.pt")
            wanted = torch.load(theirs / "zero" / name / f"{key}.pt", weights_only=False)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(torch.as_tensor(found[k]), torch.as_tensor(wanted[k])) for k in found), name
        step = theirs / "zero" / name / "step.pt"
        if step.is_file():
            assert torch.load(step) == torch.load(ours / "zero" / name / "step.pt") == SAVED_AT
