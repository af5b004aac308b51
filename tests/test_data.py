"""Samples, splits, blends and their caches, against data_prep's own reader."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from data_prep.adopt import adopt
from data_prep.errors import UserError
from data_prep.files import bin_path, idx_path
from data_prep.indexed import IndexedReader
from data_prep.manifest import load_manifest
from data_prep.preprocess import preprocess
from data_prep.train_tokenizer import train_tokenizer
from leviathan_ds.config import DataConfig
from leviathan_ds.data import index
from leviathan_ds.data.dataset import build_datasets, check_data
from leviathan_ds.data.index import validation_documents
from leviathan_ds.data.loader import collate, loader
from leviathan_ds.data.sampler import GlobalBatchSampler

LENGTH = 64
CopyCorpus = Callable[..., Path]


def configure(*prefixes: Path, **values: Any) -> DataConfig:
    values = {"sequence_length": LENGTH, "validation_fraction": 0.2, "seed": 7, "num_workers": 0} | values
    return DataConfig(prefixes=tuple(map(str, prefixes)), **values)


def build_domains(config: DataConfig, num_train_samples: int = 100) -> tuple[Any, dict[str, Any]]:
    return build_datasets(config, check_data(config), num_train_samples)


def build(config: DataConfig, num_train_samples: int = 100) -> tuple[Any, Any]:
    """Training and validation samples of a recipe with one domain."""
    train, domains = build_domains(config, num_train_samples)
    (validation,) = domains.values()
    return train, validation


def caches(prefix: Path) -> list[str]:
    """Names of what is built, or being built, beside a dataset."""
    folder = prefix.with_name(prefix.name + ".index_cache")
    return sorted(path.name for path in folder.iterdir() if path.name != "build.lock")


def rows(dataset: Any) -> np.ndarray:
    """[samples, s + 1]: every sample's tokens and its last label."""
    samples = [dataset[i] for i in range(len(dataset))]
    return np.stack([np.append(sample["tokens"].numpy(), sample["labels"].numpy()[-1]) for sample in samples])


# ---- sampler ----


def global_order(data_parallel_size: int, first_step: int = 0) -> list[list[int]]:
    """The samples of each step, passes and ranks in order."""
    samplers = [
        GlobalBatchSampler(first_step, 6, 24, 3, rank, data_parallel_size) for rank in range(data_parallel_size)
    ]
    steps = []
    for step in range(first_step, 6):
        passes = zip(*(sampler.step_indices(step) for sampler in samplers), strict=True)
        steps.append([index for ranks in passes for micro_batch in ranks for index in micro_batch])
    return steps


def test_global_order_is_the_same_on_any_number_of_ranks_and_covers_everything() -> None:
    for size in (1, 2, 4, 8):
        assert list(itertools.chain(*global_order(size))) == list(range(6 * 24))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_resume_at_any_step_is_the_tail(size: int) -> None:
    for rank in range(size):
        whole = GlobalBatchSampler(0, 6, 24, 3, rank, size)
        for first in range(7):
            rest = replace(whole, first_step=first)
            assert list(rest) == list(whole)[first * whole.passes_per_step :]
            assert len(rest) == len(list(rest))
        assert whole.passes_per_step == 8 // size
        assert all(len(micro_batch) == 3 for micro_batch in whole)


# ---- split ----


def test_samples_go_on_in_order_on_another_number_of_ranks() -> None:
    """Four steps on one rank, the rest on four with other micro-batches: every sample once, in the run's order."""

    def consumed(first_step: int, num_steps: int, micro_batch: int, size: int) -> list[int]:
        ranks = [GlobalBatchSampler(first_step, num_steps, 16, micro_batch, rank, size) for rank in range(size)]
        passes = zip(*ranks, strict=True)  # all ranks' micro-batches of one forward pass, in rank order
        return [index for one_pass in passes for micro in one_pass for index in micro]

    assert consumed(0, 4, 8, 1) + consumed(4, 10, 2, 4) == list(range(160))


def test_validation_documents_depend_on_their_index_alone() -> None:
    for fraction in (0.001, 0.02, 0.5):
        long = validation_documents(200_000, fraction)
        assert np.array_equal(validation_documents(1000, fraction), long[:1000])
        expected = 200_000 * fraction
        assert abs(long.sum() - expected) < 5 * np.sqrt(expected)
        halves = long[:100_000].sum(), long[100_000:].sum()
        assert abs(halves[0] - halves[1]) < 7 * np.sqrt(expected)
    few, many = validation_documents(10_000, 0.1), validation_documents(10_000, 0.3)
    assert not (few & ~many).any()  # a larger fraction only adds
    # splitmix64's first outputs for seed 0 (its authors' reference): 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4,
    # 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B, as fractions .883, .432, .026, .971, .106
    assert validation_documents(5, 0.43).tolist() == [False, False, True, False, True]
    assert validation_documents(5, 0.44).tolist() == [False, True, True, False, True]


# ---- samples ----


def test_samples_are_contiguous_runs_of_the_shuffled_documents_of_their_split(corpus: Path) -> None:
    config = configure(corpus)
    train, validation = build(config, num_train_samples=400)
    reader = IndexedReader(corpus)
    held_out = validation_documents(len(reader), config.validation_fraction)
    assert 0 < held_out.sum() < len(reader)
    assert len(train) >= 400
    for dataset, members in ((train, np.flatnonzero(~held_out)), (validation, np.flatnonzero(held_out))):
        # The order of the documents is the one thing taken from the dataset; each epoch is a permutation.
        order = np.asarray(dataset.document_index)
        epochs, remainder = divmod(len(order), len(members))
        assert remainder == 0
        assert Counter(order.tolist()) == dict.fromkeys(members.tolist(), epochs)
        stream = np.concatenate([reader[document] for document in order])
        runs = np.stack(
            [stream[i : i + LENGTH + 1] for i in range(0, len(stream) - LENGTH, LENGTH)]
        )  # consecutive samples share one token: the last label is the next first token
        found = rows(dataset)
        wanted = Counter(map(bytes, runs.astype(np.int64)))
        got = Counter(map(bytes, found.astype(np.int64)))
        assert got <= wanted
        assert sum((wanted - got).values()) <= 1
    assert len(set(np.asarray(train.document_index).tolist()) & set(np.flatnonzero(held_out).tolist())) == 0


def test_labels_are_the_tokens_shifted_by_one_and_nothing_is_masked(corpus: Path) -> None:
    train, validation = build(configure(corpus))
    for dataset in (train, validation):
        for number in range(len(dataset)):
            sample = dataset[number]
            assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
            assert sample["tokens"].shape == sample["labels"].shape == (LENGTH,)
            assert torch.equal(sample["loss_mask"], torch.ones(LENGTH))


def test_order_depends_on_the_seed_and_survives_the_cache(corpus: Path) -> None:
    first, again, other = (rows(build(configure(corpus, seed=seed))[0]) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_rebuilt_dataset_under_the_same_name_does_not_reuse_the_stale_index(
    corpus_copy: CopyCorpus, corpus_tokenizer: Path, tmp_path: Path
) -> None:
    prefix = corpus_copy()
    old = rows(build(configure(prefix))[0])
    before = caches(prefix)
    source = tmp_path / "other.jsonl"
    lines = (Path(__file__).parent / "data_prep" / "minipile_tiny.jsonl").read_text().splitlines()
    source.write_text("\n".join(reversed(lines)) + "\n")  # the same documents: the same sizes of all files
    sizes = bin_path(prefix).stat().st_size, idx_path(prefix).stat().st_size
    preprocess([source], corpus_tokenizer, prefix, overwrite=True)
    assert sizes == (bin_path(prefix).stat().st_size, idx_path(prefix).stat().st_size)

    rebuilt = rows(build(configure(prefix))[0])
    assert not np.array_equal(old, rebuilt)
    assert set(before) < set(caches(prefix))
    shutil.rmtree(prefix.with_name(prefix.name + ".index_cache"))
    assert np.array_equal(rebuilt, rows(build(configure(prefix))[0]))


KILLED_BUILD = """
import os, signal, sys
import numpy
real, calls = numpy.save, []
def save(*arguments, **options):  # the third of the index files is cut short by a kill
    calls.append(1)
    if len(calls) == 3:
        with open(arguments[0], "wb") as file:
            file.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments, **options)
numpy.save = save
sys.path.insert(0, {tests!r})
import test_data
from pathlib import Path
test_data.build(test_data.configure(Path({prefix!r})))
"""


def test_half_built_cache_is_not_trusted(corpus_copy: CopyCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(build(configure(corpus_copy("whole")))[0])
    prefix = corpus_copy("killed")
    script = KILLED_BUILD.format(tests=str(Path(__file__).parent), prefix=str(prefix))
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    (left,) = caches(prefix)
    # The next build has the process id of the killed one, as happens in containers.
    monkeypatch.setattr("os.getpid", lambda: int(left.rsplit(".", 1)[1]))
    assert np.array_equal(rows(build(configure(prefix))[0]), expected)
    assert all("." not in name for name in caches(prefix))


def test_blend_has_its_proportions_and_its_members(corpus_copy: CopyCorpus) -> None:
    one, other = corpus_copy("one"), corpus_copy("other")
    train, domains = build_domains(configure(one, other, weights=(3.0, 1.0)), num_train_samples=200)
    assert len(train) == 200
    members = [int(train[i]["dataset_id"]) for i in range(200)]
    assert Counter(members) == {0: 150, 1: 50}
    assert max(abs(members[:n].count(0) - 0.75 * n) for n in range(1, 201)) <= 1  # evenly from the start
    alone = rows(build(configure(one))[1])
    assert list(domains) == [str(one), str(other)]  # their last parts are the same
    for validation in domains.values():
        assert np.array_equal(rows(validation), alone)
    by_tokens, _ = build_domains(configure(one, other), num_train_samples=100)
    assert Counter(int(by_tokens[i]["dataset_id"]) for i in range(100)) == {0: 50, 1: 50}


def test_blends_index_is_kept_and_read_back(corpus_copy: CopyCorpus) -> None:
    config = configure(corpus_copy("one"), corpus_copy("other"), weights=(3.0, 1.0))
    built: list[index.Index] = []

    def samples() -> np.ndarray:
        return rows(build_datasets(config, check_data(config), 50, built.append)[0])

    first, again = samples(), samples()
    assert np.array_equal(first, again)
    assert [each.built for each in built] == [True] * 5 + [False] * 5  # two datasets, their blend, two validations
    blend = built[2]
    assert blend.title == "blend of 2 datasets"
    assert blend.samples == 50
    assert blend.bytes == sum(path.stat().st_size for path in blend.folder.iterdir()) > 50 * 10


def write_blend(folder: Path, *entries: dict[str, Any]) -> DataConfig:
    path = folder / "blend.yaml"
    path.write_text(yaml.safe_dump({"datasets": list(entries)}))
    return configure(blend=str(path))


def test_blend_file_trains_on_whole_datasets_and_validates_by_domain(
    corpus_copy: CopyCorpus, corpus_tokenizer: Path, tmp_path: Path
) -> None:
    """One entry has a validation set of its own: the other is too small for one, and trained on whole as well.
    Without any, a fraction of each is held out."""
    corpus_copy("one"), corpus_copy("other")
    source = tmp_path / "held_out.jsonl"
    source.write_text('{"text": "Another text, of some length. "}\n' * 40)
    preprocess([source], corpus_tokenizer, tmp_path / "held_out")

    def documents(dataset: Any) -> set[int]:
        return set(np.asarray(dataset.document_index).tolist())

    one = {"name": "A", "train": "one/tiny", "weight": 3}
    other = {"name": "B", "train": "other/tiny", "weight": 1}
    train, domains = build_domains(write_blend(tmp_path, one | {"validation": "held_out"}, other), 200)
    assert Counter(int(train[i]["dataset_id"]) for i in range(200)) == {0: 150, 1: 50}
    assert [documents(part) for part in train.datasets] == [set(range(35))] * 2
    assert {name: documents(part) for name, part in domains.items()} == {"A": set(range(40))}

    train, domains = build_domains(write_blend(tmp_path, one, other), 200)
    held_out = set(np.flatnonzero(validation_documents(35, 0.2)).tolist())
    assert [documents(part) for part in train.datasets] == [set(range(35)) - held_out] * 2
    assert {name: documents(part) for name, part in domains.items()} == {"A": held_out, "B": held_out}


def test_validation_prefixes_of_a_recipe_without_a_blend_file(
    corpus: Path, corpus_tokenizer: Path, tmp_path: Path
) -> None:
    source = tmp_path / "held_out.jsonl"
    source.write_text('{"text": "Another text, of some length. "}\n' * 40)
    preprocess([source], corpus_tokenizer, tmp_path / "held_out")
    train, domains = build_domains(configure(corpus, validation_prefixes=(str(tmp_path / "held_out"),)))
    assert set(np.asarray(train.document_index).tolist()) == set(range(35))
    assert set(np.asarray(domains["held_out"].document_index).tolist()) == set(range(40))


def test_fingerprints_follow_the_validation_and_a_blends_weights(corpus_copy: CopyCorpus, tmp_path: Path) -> None:
    corpus_copy("one")

    def fingerprints(weight: float) -> list[str]:
        return check_data(write_blend(tmp_path, {"name": "A", "train": "one/tiny", "weight": weight})).fingerprints

    assert fingerprints(1.0) == fingerprints(1.0)
    assert fingerprints(1.0)[0] == fingerprints(2.0)[0] == load_manifest(tmp_path / "one" / "tiny").fingerprint
    assert fingerprints(1.0)[1] != fingerprints(2.0)[1]


def test_training_data_are_not_validated_on(corpus_copy: CopyCorpus, corpus: Path) -> None:
    copy = corpus_copy()
    with pytest.raises(UserError, match=rf"{copy} is validated on and has the content of {corpus}"):
        check_data(configure(corpus, validation_prefixes=(str(copy),)))


def test_prefix_that_stands_twice(corpus: Path) -> None:
    with pytest.raises(UserError, match=rf"data\.prefixes has {corpus} twice"):
        check_data(configure(corpus, corpus))


def test_indices_in_a_folder_of_the_users(corpus_copy: CopyCorpus, tmp_path: Path) -> None:
    """Datasets of one content share an index; where all are found, nothing is written."""
    cache, one, other = tmp_path / "cache", corpus_copy("one"), corpus_copy("other")
    expected = rows(build(configure(one, index_cache=str(cache)))[0])
    assert not one.with_name("tiny.index_cache").exists()
    cache.chmod(0o555)
    (cache / "build.lock").unlink()
    assert np.array_equal(rows(build(configure(other, index_cache=str(cache)))[0]), expected)
    assert not (cache / "build.lock").exists()


@pytest.mark.parametrize("left", [0, 60, -8])
def test_a_damaged_index_is_named(corpus_copy: CopyCorpus, left: int) -> None:
    prefix = corpus_copy()
    build(configure(prefix))
    (path,) = prefix.parent.glob("*.index_cache/*/*-train-sample_index.npy")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UserError, match=rf"index {path.parent} is damaged .*remove it"):
        build(configure(prefix))
    shutil.rmtree(path.parent)
    build(configure(prefix))


def test_a_build_that_fails_leaves_nothing(corpus_copy: CopyCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk what it left would be in the way of the next."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    prefix = corpus_copy()
    monkeypatch.setattr("megatron.core.datasets.gpt_dataset.numpy.save", full)
    with pytest.raises(UserError, match="No space left on device; make room"):
        build(configure(prefix))
    assert caches(prefix) == []


def test_empty_split_says_what_to_change(corpus: Path) -> None:
    with pytest.raises(UserError, match=r"the validation split has 0 of 35 documents and 0 tokens.*fraction"):
        build(configure(corpus, validation_fraction=1e-6))
    with pytest.raises(UserError, match="the training split has 0 of 35 documents"):
        build(configure(corpus, validation_fraction=0.999999))
    with pytest.raises(UserError, match=r"too few for one sample of 10000000"):
        build(configure(corpus, sequence_length=10_000_000))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_samples_of_a_dataset_that_megatrons_builder_wrote(
    corpus: Path, corpus_tokenizer: Path, tmp_path: Path, dtype: type
) -> None:
    prefix = tmp_path / "theirs"
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    for document in IndexedReader(corpus):
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(idx_path(prefix)))
    adopt(prefix, corpus_tokenizer)
    ours, theirs = (build(configure(each, seed=11)) for each in (corpus, prefix))
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(rows(one), rows(other))


# ---- what is refused ----


def test_no_prefixes() -> None:
    with pytest.raises(UserError, match=r"data\.prefixes is empty"):
        check_data(configure())


@pytest.mark.parametrize("suffix", ["bin", "idx", "manifest.json"])
def test_missing_file_is_named(corpus_copy: CopyCorpus, suffix: str) -> None:
    path = Path(f"{corpus_copy()}.{suffix}")
    path.unlink()
    with pytest.raises(UserError, match=rf"data\.prefixes: {path}: no such file"):
        check_data(configure(path.with_name("tiny")))


@pytest.mark.parametrize(("suffix", "lost"), [("bin", 1), ("bin", 2), ("idx", 8), ("idx", 1)])
def test_truncated_file_is_named(corpus_copy: CopyCorpus, suffix: str, lost: int) -> None:
    path = Path(f"{corpus_copy()}.{suffix}")
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(UserError, match=rf"{path}: has \d+ bytes, .* describes \d+"):
        check_data(configure(path.with_name("tiny")))


def test_files_of_another_dataset_than_the_manifests(
    corpus_copy: CopyCorpus, corpus_tokenizer: Path, tmp_path: Path
) -> None:
    prefix, other = corpus_copy(), tmp_path / "other" / "tiny"
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "Another text."}\n' * 40)
    preprocess([source], corpus_tokenizer, other)
    for suffix in ("bin", "idx"):
        shutil.copyfile(f"{other}.{suffix}", f"{prefix}.{suffix}")
    with pytest.raises(UserError, match=r"tiny\.bin: has \d+ bytes, .*manifest\.json describes"):
        check_data(configure(prefix))


def test_other_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    source = Path(__file__).parent / "data_prep" / "minipile_tiny.jsonl"
    train_tokenizer([source], tmp_path / "other.model", vocab_size=500)
    preprocess([source], tmp_path / "other.model", tmp_path / "other")
    one, other = (load_manifest(prefix).tokenizer.fingerprint for prefix in (corpus, tmp_path / "other"))
    with pytest.raises(UserError) as raised:
        check_data(configure(corpus, tmp_path / "other"))
    assert str(tmp_path / "other") in str(raised.value)
    assert one[:12] in str(raised.value)
    assert other[:12] in str(raised.value)
    with pytest.raises(UserError, match=rf"data\.tokenizer_fingerprint is {other[:12]}"):
        check_data(configure(corpus, tokenizer_fingerprint=other))
    assert check_data(configure(corpus, tokenizer_fingerprint=one)).vocab_size == 600


@pytest.mark.parametrize("bad_id", [600, 65_535])
def test_id_outside_the_vocabulary_names_dataset_and_document(corpus_copy: CopyCorpus, bad_id: int) -> None:
    prefix = corpus_copy()
    lengths = IndexedReader(prefix).lengths.tolist()
    ids = np.fromfile(bin_path(prefix), dtype="<u2")
    ids[sum(lengths[:17])] = bad_id  # the first of document 17
    ids.tofile(bin_path(prefix))
    with pytest.raises(UserError, match=rf"tiny\.bin: document 17 holds the id {bad_id}, .* of 600"):
        build(configure(prefix))
    ids[sum(lengths[:17])] = 599
    ids.tofile(bin_path(prefix))
    build(configure(prefix))


# ---- loader ----


def test_collate_finds_the_distinct_ids(corpus: Path) -> None:
    train, _ = build(configure(corpus))
    batch = collate([train[3], train[5], train[8]])
    assert batch.tokens.shape == batch.labels.shape == batch.inverse.shape == (3, LENGTH)
    assert batch.distinct_ids.tolist() == sorted(set(batch.tokens.flatten().tolist()))
    assert torch.equal(batch.distinct_ids[batch.inverse], batch.tokens)
    assert torch.equal(batch.tokens[1], train[5]["tokens"])
    assert torch.equal(batch.to(torch.device("cpu")).labels, batch.labels)


def test_documents_end_with_their_end_of_document(corpus: Path) -> None:
    """Bounds in the flattened batch; none where attention is not restricted, or every sample is one document."""
    train, _ = build(configure(corpus, reset_attention_mask=True))
    samples = [train[i] for i in range(40)]
    eod = load_manifest(corpus).tokenizer.eod_id
    expected = [0]
    for sample in samples:
        ends = [i + 1 for i, token in enumerate(sample["tokens"].tolist()) if token == eod]
        start = expected[-1]
        expected += [start + end for end in ends if end < LENGTH] + [start + LENGTH]
    found = collate(samples).cu_seqlens
    assert len(expected) > 1 + len(samples)  # documents end within samples
    assert found is not None and found.dtype is torch.int32
    assert found.tolist() == expected
    unbroken = [sample for sample in samples if eod not in sample["tokens"][:-1]]
    assert unbroken and collate(unbroken).cu_seqlens is None
    unrestricted, _ = build(configure(corpus))
    assert collate([unrestricted[i] for i in range(40)]).cu_seqlens is None
    assert all(torch.equal(unrestricted[i]["tokens"], sample["tokens"]) for i, sample in enumerate(samples))


def test_loader_processes_change_nothing(corpus: Path) -> None:
    train, _ = build(configure(corpus, reset_attention_mask=True))
    sampler = GlobalBatchSampler(2, 8, 8, 4, 1, 2)
    plain, forked = list(loader(train, sampler, 0)), list(loader(train, sampler, 1))
    assert len(plain) == len(forked) == 6
    for one, other, indices in zip(plain, forked, sampler, strict=True):
        assert torch.equal(one.tokens, torch.stack([train[i]["tokens"] for i in indices]))
        for name, tensor in vars(one).items():
            again = getattr(other, name)
            assert torch.equal(tensor, again) if tensor is not None else again is None, name
