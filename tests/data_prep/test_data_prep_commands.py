"""The command lines start fast and speak in one line."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import blend, merge, preprocess, train_tokenizer, verify

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "deepspeed", "megatron", "transformers", "sentencepiece", "rich")


@pytest.mark.parametrize("name", ["train_tokenizer", "preprocess", "merge", "blend", "verify"])
def test_help_is_fast_and_imports_nothing_heavy(name: str):
    command = [sys.executable, "-X", "importtime", "-m", f"data_prep.{name}", "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    cpu_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before  # other people's load left out
    assert cpu_s < 0.8
    assert f"usage: python -m data_prep.{name}" in result.stdout and "None" not in result.stdout
    imported = {line.rsplit("|")[-1].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "numpy" in imported or name in ("train_tokenizer", "blend")
    assert imported.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (train_tokenizer, ["--output", "x"]),
        (train_tokenizer, ["--input", "x", "--output", "y", "--vocab_size", "-5"]),
        (preprocess, ["--input", "x", "--tokenizer", "t", "--output_prefix", "p", "--workers", "0"]),
        (preprocess, ["--input", "x", "--tok", "t", "--output_prefix", "p"]),
        (verify, []),
        (merge, []),
        (blend, ["--datasets", "x", "--output", "y", "--blend_weights", "guess"]),
    ],
)
def test_wrong_options_are_one_line(module, arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        module.main(arguments)
    errors = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert len(errors) == 1 and errors[0].startswith("error: ")
