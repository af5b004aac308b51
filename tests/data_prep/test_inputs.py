"""What the user may name as input: files, directories, globs, standard input, datasets; and what is refused."""

import gzip
import io
import lzma
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import orjson
import pytest
import zstandard
from pile_texts import TINY

from data_prep.errors import UserError
from data_prep.files import bin_path, idx_path
from data_prep.manifest import load_manifest
from data_prep.preprocess import preprocess
from data_prep.sources import Document, ReadOptions, expand_inputs, iter_documents, plan_shards, read_shard

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.jsonl", "sub/.hidden.jsonl", ".git/d.jsonl", "sub/notes.md"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "tree"


def names(folder: Path, inputs: list[Any]) -> list[str]:
    return [str(Path(source.path).relative_to(folder)) for source in expand_inputs(inputs)]


def test_directories_and_globs_are_sorted(tree: Path):
    assert names(tree, [tree]) == ["a.jsonl.gz", "b.jsonl", "sub/c.jsonl"]
    assert names(tree, [f"{tree}/*.jsonl", tree / "a.jsonl.gz"]) == ["b.jsonl", "a.jsonl.gz"]
    assert names(tree, [f"{tree}/**/*.jsonl"]) == ["b.jsonl", "sub/c.jsonl"]
    assert names(tree, [f"{tree}/s*"]) == ["sub/c.jsonl"]
    (tree / "x[1].jsonl").touch()  # a name that looks like a glob
    assert names(tree, [tree / "x[1].jsonl"]) == ["x[1].jsonl"]


def test_what_is_refused(tree: Path):
    (tree / "README.txt").touch()
    (tree / "empty").mkdir()
    for name, message in [
        (tree / "none.jsonl", r"none\.jsonl: no such file"),
        (f"{tree}/*.parquet", r"\*\.parquet: matches no file"),
        (tree / "sub" / "notes.md", r"notes\.md: unknown suffix, expected one of \.jsonl, \.jsonl\.gz"),
        (f"{tree}/sub/*", r"notes\.md: unknown suffix"),
        (tree / "empty", "empty: no file in this directory ends with"),
        (tree, r"several formats, .*README\.txt.*; name a glob"),
        ("-", "standard input"),
    ]:
        with pytest.raises(UserError, match=message):
            expand_inputs([name])


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress, lzma.compress])
def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any):
    """Whatever its compression."""
    expected = list(iter_documents([TINY]))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pack(TINY.read_bytes()))))
    shards = plan_shards(expand_inputs(["-"], tmp_path), shard_bytes=10_000)
    assert len(shards) > 5
    assert [parsed for shard in shards for _, parsed in read_shard(shard, ReadOptions())] == expected


def test_standard_input_of_one_process_leaves_nothing():
    code = "from data_prep.sources import *; print(sum(1 for _ in iter_documents(['-'])))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=TINY.read_bytes(), capture_output=True, cwd=ROOT, check=True)
    assert done.stdout == b"35\n"


# --- Hugging Face datasets ---


@pytest.fixture
def hub_folder(tmp_path: Path, tiny_records: list[Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset as on the hub: train of two parquet files, validation of one; a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    for name, part in (
        ("train-0", tiny_records[:20]),
        ("train-1", tiny_records[20:30]),
        ("validation-0", tiny_records[30:]),
    ):
        datasets.Dataset.from_list(part).to_parquet(str(folder / f"{name}.parquet"))
    return folder


@pytest.mark.parametrize("prefix", ["hf:", "hf-stream:"])
def test_dataset_by_path(hub_folder: Path, prefix: str):
    expected = list(iter_documents([TINY]))
    assert list(iter_documents([f"{prefix}{hub_folder}@train"])) == expected[:30]
    assert list(iter_documents([f"{prefix}{hub_folder}@validation", f"{prefix}{hub_folder}:default@train"])) == [
        *expected[30:],
        *expected[:30],
    ]
    for name, message in [("", "name one of its splits: @train, @validation"), ("@tset", "@train, @validation")]:
        with pytest.raises(UserError, match=f"{prefix}{hub_folder}{name}: .*{message}"):
            list(iter_documents([f"{prefix}{hub_folder}{name}"]))


def test_streamed_files_are_shards_of_their_own(hub_folder: Path):
    shards = plan_shards(expand_inputs([f"hf-stream:{hub_folder}@train"]))
    read = [[parsed for _, parsed in read_shard(shard, ReadOptions())] for shard in shards]
    assert [len(part) for part in read] == [20, 10]
    assert [*read[0], *read[1]] == list(iter_documents([TINY]))[:30]


def test_saved_dataset(tmp_path: Path, tiny_records: list[Any]):
    dataset = datasets.Dataset.from_list(tiny_records)
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "dict")
    expected = list(iter_documents([TINY]))
    assert len(expand_inputs([f"hf:{tmp_path}/saved"])) == 3
    for name in (f"hf:{tmp_path}/saved", f"hf:{tmp_path}/dict", f"hf:{tmp_path}/dict@train", tmp_path / "saved"):
        assert list(iter_documents([name])) == expected
    with pytest.raises(UserError, match=f"read it as hf:{tmp_path}/saved"):
        list(iter_documents([f"hf-stream:{tmp_path}/saved"]))


def test_every_kind_of_input_gives_the_same_dataset(
    hub_folder: Path, tiny_dataset: Path, tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The whole command: workers read what the parent planned, spooled or loaded."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.xz").write_bytes(lzma.compress(TINY.read_bytes()))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=TINY.open("rb")))
    for number, inputs in enumerate(
        [
            ["-"],
            [f"{tmp_path}/i*"],
            [f"{hub_folder}/train-*.parquet", f"{hub_folder}/validation-0.parquet"],
            [f"hf:{hub_folder}@train", f"hf-stream:{hub_folder}@validation"],
        ]
    ):
        prefix = tmp_path / "out" / str(number)
        manifest = preprocess(inputs, tokenizer_path, prefix, workers=2)
        for make in (bin_path, idx_path):
            assert make(prefix).read_bytes() == make(tiny_dataset).read_bytes(), inputs
        assert manifest.domains == load_manifest(tiny_dataset).domains
    assert not list((tmp_path / "out").glob("*.parts"))


def test_a_selection_of_a_dataset_is_refused(hub_folder: Path, tiny_records: list[Any], monkeypatch: Any):
    whole = datasets.load_dataset(str(hub_folder), split="train")
    for part in (whole.select(range(5)), whole.select(list(reversed(range(30)))), whole.shuffle(seed=0)):
        monkeypatch.setattr("data_prep.sources.hub._load", lambda name, streaming, part=part: part)
        with pytest.raises(UserError, match="hf:x: is a selection of a dataset"):
            expand_inputs(["hf:x"])


@pytest.mark.parametrize("prefix", ["hf:", "hf-stream:"])
def test_offline_is_said_in_one_line(prefix: str, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=rf"{prefix}some/dataset@train: .*hub cannot be reached.*HF_HUB_OFFLINE"
    ) as e:
        plan_shards(expand_inputs([f"{prefix}some/dataset@train"]))
    assert "\n" not in str(e.value)


def test_a_dataset_that_cannot_be_loaded_is_named(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: datasets cannot load it"):
        expand_inputs([f"hf:{tmp_path}/empty"])
    with pytest.raises(UserError, match=r"hf:: expected hf:NAME"):
        expand_inputs(["hf:"])


# --- the user's filter ---


@pytest.fixture
def filters_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "choose.py"
    path.write_text(
        "def short(text, domain, record): return len(text) < 3\n"
        "def by_record(text, domain, record): return record['score'] > 1\n"
        "def of_domain(text, domain, record): return domain == 'A'\n"
        "def broken(text, domain, record): raise RuntimeError('oh')\n"
        "number = 1\n"
    )
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    return path


RECORDS = [
    {"text": "a", "score": 2, "meta": {"pile_set_name": "A"}},
    {"text": "long", "score": 3},
    {"text": "b", "score": 0},
    {"text": ""},
]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("choose.py:short", ["a", "b"]),
        ("choose:by_record", ["a", "long"]),
        ("choose:of_domain", ["a"]),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_filter_chooses(filters_file: Path, write_jsonl: Any, name: str, kept: list[str], form: str):
    path = write_jsonl(RECORDS)
    if form == "parquet":
        path = path.with_suffix(".parquet")
        datasets.Dataset.from_list(RECORDS).to_parquet(str(path))
    skipped = Counter[str]()
    documents = list(iter_documents([path], ReadOptions(filter=name), skipped))
    assert [document.text for document in documents] == kept
    assert skipped == {"filtered": 3 - len(kept), "empty_text": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("choose", "expected module:function or path.py:function"),
        ("choose:", "expected module:function"),
        ("choose:none", "has no function 'none'"),
        ("choose:number", "has no function 'number'"),
        ("no_module:f", "importing it failed: ModuleNotFoundError"),
        ("none.py:f", r"none\.py: no such file"),
        ("bad.py:f", "importing it failed: ModuleNotFoundError: .*nothing_of_this_name"),
        ("choose.py:broken", r"--filter choose\.py:broken: failed at .*in\.jsonl: line 1: RuntimeError: oh"),
    ],
)
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_filter_mistakes_are_named(filters_file: Path, write_jsonl: Any, name: str, message: str, on_error: Any):
    path = write_jsonl(RECORDS)
    with pytest.raises(UserError, match=message):
        list(iter_documents([path], ReadOptions(filter=name, on_error=on_error)))


def test_a_document_is_plain_text():
    assert next(iter_documents([TINY])) == Document(
        orjson.loads(TINY.open().readline())["text"], orjson.loads(TINY.open().readline())["meta"]["pile_set_name"]
    )
