"""Export and import at the paper's 1.2B shape: seconds, and the most memory that it took. JSON lines.

Random weights, made on the fly (recipes/leviathan_1200m.yaml; 5 GB of disk in float32, and 6.5 GB for the export).
Each stage runs in a process of its own, whose peak counts pages mapped from files, too.

    python -W ignore benchmarks/export.py [--dtype fp32] [--format llama] [--folder /tmp/export]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from data_prep.sample import sample_corpus_path
from data_prep.train_tokenizer import train_tokenizer
from launchers import export_hf, import_hf
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import Recipe
from leviathan_ds.export.llama import hugging_face_config
from leviathan_ds.export.names import correspondences
from leviathan_ds.model.tensor_files import write_tensors
from leviathan_ds.model.weights import shard_file

RECIPE = Path(__file__).parent.parent / "recipes" / "leviathan_1200m.yaml"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_run(run: Path, recipe: Recipe, dtype: torch.dtype) -> None:
    """A run directory with one checkpoint of random weights, written one parameter at a time."""
    from leviathan_ds.hf import LeviathanForCausalLM
    from leviathan_ds.trained_model import TrainedModel

    checkpoint = run / run_directory.CHECKPOINTS / run_directory.checkpoint_name(1)
    checkpoint.mkdir(parents=True)
    tokenizer = run / run_directory.TOKENIZERS["sentencepiece"]
    train_tokenizer([sample_corpus_path()], tokenizer, 2000, sample_bytes=200_000)
    from data_prep.tokenizers import load_tokenizer

    trained = TrainedModel(checkpoint, recipe, load_tokenizer(tokenizer))
    with torch.device("meta"):
        model = LeviathanForCausalLM(hugging_face_config(trained, "leviathan", dtype))
    empty = dict(model.named_parameters())
    shapes = {
        name: entry.join([empty[part] for part in entry.hugging_face], recipe.model).shape
        for name, entry in correspondences(recipe.model).items()
    }
    draw = torch.Generator().manual_seed(0)

    def weight(name: str):
        fan_in = shapes[name][-1]
        full = torch.empty(shapes[name]).normal_(generator=draw)
        yield full.mul_(0.1).add_(1) if name.endswith(("norm.weight", "norm_weight")) else full.mul_(fan_in**-0.5)

    write_tensors(checkpoint / shard_file(0), shapes, dict.fromkeys(shapes, dtype), weight)
    state = run_directory.TrainerState(1, recipe.training.global_batch_size, {}, [], None)
    run_directory.write_text(checkpoint / run_directory.TRAINER_STATE, state.to_json())
    run_directory.write_text(run / run_directory.RECIPE, recipes.to_yaml(recipe))
    files = {path.name: (path.stat().st_size, run_directory.checksum(path)) for path in checkpoint.iterdir()}
    run_directory.write_manifest(checkpoint, files)


def measured(command: list[str]) -> None:
    """Run a stage in its own process and print its figures."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-W", "ignore", __file__, *command], check=True, stdout=sys.stderr)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # the largest of all stages so far
    print(json.dumps({"stage": command[1:], "seconds": round(time.monotonic() - start), "peak_bytes": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", nargs=argparse.REMAINDER, help="of this program's own children")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the checkpoint")
    parser.add_argument("--format", choices=("llama", "leviathan"), default="llama")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/leviathan_export"), help="removed at the end")
    options = parser.parse_args()
    if options.stage:
        launcher, *arguments = options.stage
        sys.exit({"export": export_hf, "import": import_hf}[launcher].main(arguments))

    run, exported = options.folder / "run", options.folder / "hf"
    shutil.rmtree(options.folder, ignore_errors=True)
    recipe = recipes.load(RECIPE)
    start = time.monotonic()
    make_run(run, recipe, DTYPES[options.dtype])
    print(json.dumps({"stage": "make", "seconds": round(time.monotonic() - start)}), flush=True)
    try:
        measured(
            ["--stage", "export", "--checkpoint", str(run), "--output", str(exported), "--format", options.format]
        )
        measured(["--stage", "import", "--source", str(exported), "--output", str(options.folder / "back")])
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
