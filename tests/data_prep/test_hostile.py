"""Names, inputs and neighbours that nobody means, and that all occur."""

import errno
import io
import os
import shutil
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pile_texts import TINY

from data_prep.blend import load_blend
from data_prep.errors import UserError
from data_prep.files import manifest_path
from data_prep.parts import PartWriter, anything_finished, claim_parts, load_plan, locked_parts, parts_folder
from data_prep.preprocess import main, plan_job, prepare
from data_prep.sources import ReadOptions, expand_inputs
from data_prep.splits import slugs
from data_prep.tokenizers import load_tokenizer


def command(tokenizer: Path, prefix: Path, *options: str) -> list[str]:
    return ["--tokenizer", str(tokenizer), "--output_prefix", str(prefix), "--workers", "1", *options]


# --- names ---


def test_slugs_fit_into_a_file_name():
    names = ["日本語" * 30, "日本語" * 31, "x" * 300, "é" * 80]
    found = slugs(names)
    assert len(set(found.values())) == len(names)
    for slug in found.values():
        assert len(f"{slug}.validation.token_counts.npy.partial".encode()) < 140


def test_any_domain_becomes_a_blend_that_can_be_read(tmp_path: Path, tokenizer_path: Path, write_jsonl: Any):
    domains = ["A/B", "a-b", "", " ", "null", "train", "../../x", "a\x85\x00\u2028b", "語" * 90]
    source = write_jsonl([{"text": f"text {name}", "meta": {"pile_set_name": name}} for name in domains])
    options = ("--input", str(source), "--split_by", "meta.pile_set_name")
    assert main(command(tokenizer_path, tmp_path / "out dir" / "d", *options)) == 0
    entries = load_blend(tmp_path / "out dir" / "d.blend.yaml").entries
    assert {entry.name for entry in entries} == {*domains, "unknown"} - {""}
    assert all(manifest_path(entry.train).parent == tmp_path / "out dir" for entry in entries)
    assert all(manifest_path(entry.train).is_file() for entry in entries)


def test_names_that_are_no_utf8_are_refused(tmp_path: Path, tokenizer_path: Path):
    name = os.fsdecode(b"\xff.jsonl")
    shutil.copyfile(TINY, tmp_path / name)
    with pytest.raises(UserError, match="no UTF-8"):
        expand_inputs([tmp_path])
    with pytest.raises(UserError, match="no UTF-8"):
        plan_job([TINY], tokenizer_path, tmp_path / os.fsdecode(b"\xff"), ReadOptions())


# --- inputs ---


def test_no_file_of_a_directory_is_left_out(tmp_path: Path):
    """Links are how a shared disk's shards are put together."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "in"
    elsewhere.mkdir()
    folder.mkdir()
    shutil.copyfile(TINY, elsewhere / "b.jsonl")
    shutil.copyfile(TINY, folder / "a.jsonl")
    (folder / "sub").symlink_to(elsewhere)
    assert [source.path for source in expand_inputs([folder])] == [
        str(folder / "a.jsonl"),
        str(folder / "sub" / "b.jsonl"),
    ]
    (folder / "c.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for name in (folder, folder / "*.jsonl", folder / "**" / "*.jsonl"):
        with pytest.raises((UserError, OSError), match=r"c\.jsonl"):
            expand_inputs([name])


def test_a_file_named_twice_is_refused(tmp_path: Path):
    file, link = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    shutil.copyfile(TINY, file)
    for inputs in ([file, file], [tmp_path, file], [f"{tmp_path}/../{tmp_path.name}/a.jsonl", file], ["-", "-"]):
        with pytest.raises(UserError, match=r"twice|one standard input"):
            expand_inputs(inputs, tmp_path / "spool")
    link.symlink_to(file)
    with pytest.raises(UserError, match=r"b\.jsonl: is among the inputs twice, also as .*a\.jsonl"):
        expand_inputs([tmp_path])
    link.unlink()
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"loop: is the directory .* once more"):
        expand_inputs([tmp_path])


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


def test_standard_input_leaves_nothing_behind(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    prefix = tmp_path / "d"
    for options, status in ((["--dry_run"], 0), (["--filter", "no:thing"], 2)):
        feed(monkeypatch, TINY.read_bytes())
        assert main(command(tokenizer_path, prefix, "--input", "-", *options)) == status
        assert list(tmp_path.iterdir()) == []
    feed(monkeypatch, TINY.read_bytes())
    job = plan_job(["-"], tokenizer_path, prefix, ReadOptions())
    claim_parts(job.folder, job.plan, job.tokenizer.content, overwrite=False)
    feed(monkeypatch, b"")  # a second one would take the first one's copy away
    with pytest.raises(UserError, match="standard input cannot go on; pass --overwrite"):
        plan_job(["-"], tokenizer_path, prefix, ReadOptions())
    (manifest,) = prepare(job).values()
    assert manifest.documents == 35


# --- splits ---


def test_an_overwritten_split_goes_though_nothing_replaces_it(tmp_path: Path, tokenizer_path: Path):
    """Else it holds documents that are trained on now."""
    prefix, source = tmp_path / "d", ("--input", str(TINY))
    for by in ((), ("--split_by", "meta.pile_set_name")):
        assert main(command(tokenizer_path, prefix, *source, *by, "--split", "0.4,0.3,0.3")) == 0
        assert list(tmp_path.glob("*.validation.*"))
        assert main(command(tokenizer_path, prefix, *source, *by, "--split", "1,0,0", "--overwrite")) == 0
        assert list(tmp_path.glob("*.train.manifest.json"))
        assert not list(tmp_path.glob("*.validation.*")) and not list(tmp_path.glob("*.test.*"))


# --- several runs in one folder ---


def test_shares_may_begin_at_once(tmp_path: Path, tokenizer_path: Path):
    job = plan_job([TINY], tokenizer_path, tmp_path / "d", ReadOptions())
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        try:
            for _ in range(10):
                barrier.wait()
                claim_parts(job.folder, job.plan, job.tokenizer.content, overwrite=True)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and load_plan(job.folder) == job.plan


def test_a_share_that_fails_leaves_the_folder_of_another(tmp_path: Path, tokenizer_path: Path):
    folder = parts_folder(tmp_path / "d")
    with locked_parts(folder, 0, 2):
        with pytest.raises(ValueError, match="mine"), locked_parts(folder, 1, 2):
            raise ValueError("mine")
        assert folder.is_dir()
        with pytest.raises(UserError, match="another run is working on it"), locked_parts(folder, 0, 1):
            pass  # all of the work, beside a share of it
    assert not anything_finished(folder)
    with pytest.raises(ValueError, match="alone"), locked_parts(folder, 1, 2):
        raise ValueError("alone")
    assert not folder.exists()


# --- a full disk ---


def test_a_disk_that_is_full_at_the_last_byte_is_named(tmp_path: Path):
    """What a part's writer has buffered reaches the disk as it is closed."""

    class Full(io.BytesIO):
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    for finish in (True, False):
        with pytest.raises(OSError, match=r"000003\.part\.partial"):
            with PartWriter(tmp_path, 3, "plan", 600, 2) as writer:
                writer._file = Full()  # pyright: ignore[reportAttributeAccessIssue]
                if finish:
                    writer.finish(Counter(), "", [])
        assert list(tmp_path.iterdir()) == []


# --- tokenizers ---


def test_a_tokenizer_trained_with_dropout_encodes_the_same_text_alike(tmp_path: Path):
    from tokenizers import AddedToken, Tokenizer, models

    merges = [("a", "b"), ("ab", "ab"), ("abab", "abab")]
    vocabulary = {token: number for number, token in enumerate(["a", "b", "ab", "abab", "abababab"])}
    trained = Tokenizer(models.BPE(vocabulary, merges, dropout=0.5))
    trained.add_special_tokens([AddedToken("</s>", special=True)])
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert all(ids.tolist() == [4] * 8 for ids in tokenizer.encode_batch(["abababab" * 8] * 20))
