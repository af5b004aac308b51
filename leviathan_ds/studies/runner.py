"""Runs of a study trained one after the other, each by the command that a user would type; results read back."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from data_prep.blend import load_blend
from data_prep.errors import UserError
from data_prep.files import manifest_path
from data_prep.indexed import check_dataset
from data_prep.sample import DEMO_PREFIX, is_demo
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.parallel import ds_config
from leviathan_ds.parallel.launch import EXIT_DIVERGED, EXIT_STOPPED, InUse, claimed
from leviathan_ds.studies.study import ROOT, Run, Study, Tuned

# In a run directory, of its last checkpoint: losses by frequency as of launchers/evaluate.py, and its embeddings.
EVALUATION, MEASURES = "evaluation.json", "measures.json"
Say = Callable[[str], None]


def run_study(study: Study, folder: Path, pattern: str, say: Say) -> int:
    """Train and measure the runs whose names match that are not done yet, going on after one that fails.

    A run that another process trains or measures is left to that one. Returns 0 if none failed, 1 if some did or
    could not start, EXIT_STOPPED after a signal. Raises UserError before the first one where runs lack something.
    """
    runs = study.matching(pattern)
    if lacks := lacking(study, folder, runs):
        more = f" (and {len(lacks) - 1} more, which `study.py plan` names)" if len(lacks) > 1 else ""
        raise UserError(lacks[0] + more)
    names = [run.name for run in runs]
    troubles, elsewhere = [], []
    for number, name in enumerate(names, 1):
        # Anew for each: the tuning runs before may have settled its learning rate.
        (run,) = study.runs(tuned_tries(study, folder), name)
        run_dir, log, code = folder / name, folder / f"{name}.log", 0
        trouble = run.missing
        if trouble is None and (obstacle := obstacle_to(run, run_dir)):
            trouble = f"{obstacle}; to train it anew, remove {run_dir}"
        if trouble is None:
            try:
                with reserved(run_dir):
                    if not finished(run, run_dir):
                        minutes = study.predicted_s(run) / 60
                        say(f"[{number}/{len(names)}] {name}: about {minutes:.0f} min; log: {log}")
                        code = execute(pretrain_command(study, run, folder), log)
                        trouble = f"ended with code {code}, see {log}" if code else None
                    if not code:
                        code = measure_run(run_dir)
                        trouble = f"could not be measured, see {log}" if code else None
                    if not code and run.kind not in study.keep_checkpoints:
                        shutil.rmtree(run_dir / run_directory.CHECKPOINTS, ignore_errors=True)
            except InUse:
                elsewhere.append(name)
                say(f"[{number}/{len(names)}] {name}: is being trained by another process, or measured")
        if code == EXIT_STOPPED:
            say(f"stopped in {name}; the same command goes on there")
            return code
        if trouble is not None:
            say(f"[{number}/{len(names)}] {name}: {trouble}")
            troubles.append(name)
    say(f"{len(names) - len(troubles) - len(elsewhere)} of {len(names)} runs are done")
    return 1 if troubles else 0


def lacking(study: Study, folder: Path, runs: Sequence[Run]) -> list[str]:
    """What of that which unfinished runs read is not there, a line each: the ds_config, datasets.

    But the demo's dataset, which training prepares. A run would find out for itself half a minute after its start.
    """
    due = [run for run in runs if not finished(run, folder / run.name)]
    found = [_mistake(ds_config.read, ROOT / study.ds_config)] if due else []
    for data in dict.fromkeys(run.recipe.data for run in due):
        prefixes: list[str | Path | None] = [*data.prefixes, *data.validation_prefixes]
        if data.blend is not None:
            try:
                entries = load_blend(ROOT / data.blend).entries
            except UserError as error:
                found.append(str(error))
                continue
            prefixes += [prefix for entry in entries for prefix in (entry.train, entry.validation)]
        elif not data.prefixes:
            found.append(f"study {study.name}: data.prefixes is empty; name the datasets in its recipe:")
        if is_demo(data.prefixes) and not manifest_path(ROOT / DEMO_PREFIX).is_file():
            prefixes = [prefix for prefix in prefixes if prefix != str(DEMO_PREFIX)]
        found += [_mistake(check_dataset, ROOT / prefix) for prefix in prefixes if prefix is not None]
    return list(dict.fromkeys(filter(None, found)))


def _mistake(check: Callable[[Path], object], path: Path) -> str | None:
    try:
        check(path)
    except UserError as error:
        return str(error)
    return None


def reserved(run_dir: Path) -> AbstractContextManager[None]:
    """A run for this process alone, from its training until its checkpoints are gone. Raises InUse.

    Not by RUN/lock, which the training itself takes, half a minute after its start and not while it is measured.
    """
    return claimed(run_dir.with_name(f"{run_dir.name}.lock"))


def pretrain_command(study: Study, run: Run, folder: Path) -> list[str]:
    """The supervised training of a run; its recipe is written beside its directory."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    supervise = [sys.executable, str(ROOT / "launchers" / "supervise.py"), "--auto_restart", "1", "--"]
    deepspeed = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(study.world_size)]
    pretrain = [str(ROOT / "launchers" / "pretrain.py"), *pretrain_options(study, run, folder)]
    return [*supervise, *deepspeed, "--master_port", str(port), *pretrain]


def pretrain_options(study: Study, run: Run, folder: Path) -> list[str]:
    """Writes the recipe and returns the options of pretrain.py."""
    path = folder / f"{run.name}.yaml"
    run_directory.write_text(path, recipes.to_yaml(run.recipe))
    return ["--ds_config", study.ds_config, "--config", str(path), "--run_dir", str(folder / run.name)]


def measure_run(run_dir: Path) -> int:
    """Measure a run's last checkpoint where that is not done; 0, or the exit code of what failed."""
    if measured(run_dir):
        return 0
    command = [sys.executable, str(ROOT / "launchers" / "study.py"), "measure", str(run_dir)]
    return execute(command, run_dir.with_name(f"{run_dir.name}.log"))


def measured(run_dir: Path) -> bool:
    return all((run_dir / name).is_file() for name in (EVALUATION, MEASURES))


def slurm_script(study: Study, runs: list[Run], folder: Path) -> str:
    """A shell script that submits every run by launchers/slurm/pretrain.sbatch; writes their recipes."""
    nodes = -(-study.world_size // study.cluster.gpus_per_node)
    lines = [
        "#!/bin/bash",
        "# From the project's folder, on a disk that all nodes share. Submitted again, a finished",
    ]
    lines += ["# run says so and ends, another goes on from its last checkpoint.", "set -euo pipefail"]
    for run in runs:
        job = ["sbatch", "--nodes", str(nodes), "--job-name", run.name.replace("/", "-")]
        if study.world_size < study.cluster.gpus_per_node:
            job += ["--gpus-per-node", str(study.world_size)]
        lines.append(shlex.join([*job, "launchers/slurm/pretrain.sbatch", *pretrain_options(study, run, folder)]))
    return "\n".join(lines) + "\n"


def execute(command: list[str], log: Path) -> int:
    """Exit code of a command whose output goes behind a log. SIGTERM, SIGUSR1 and Ctrl-C ask it to save and stop;
    a second one ends it at once. Then the code is EXIT_STOPPED, however the command took it: one that knows no
    saving dies of the signal, and one that was about to end has done its work, but what follows is not wanted."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = None
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if process is not None:
            process.send_signal(signal.SIGINT if asked else signal.SIGTERM)
        asked = True

    # Before there is a process: a signal in between would end this one alone, and the training would go on.
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        with log.open("ab") as output:
            # In a session of its own: a Ctrl-C reaches it through `ask` alone.
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        if asked:
            process.terminate()
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return EXIT_STOPPED if asked else code


def read_summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / run_directory.SUMMARY
    return json.loads(path.read_text()) if path.is_file() else {}


def finished(run: Run, run_dir: Path) -> bool:
    """Whether a run reached its last step, and its weights are there or have been measured."""
    if read_summary(run_dir).get("steps") != run.recipe.training.train_steps:
        return False
    last = run_directory.checkpoint_name(run.recipe.training.train_steps)
    complete = [path.name for path in run_directory.complete_checkpoints(run_dir)]
    return (run_dir / MEASURES).is_file() or last in complete


def diverged(run: Run, run_dir: Path) -> bool:
    """Whether a run ended for good without a finite loss."""
    summary = read_summary(run_dir)
    if finished(run, run_dir):
        return not math.isfinite(summary["final_val_loss"])
    return summary.get("exit_code") == EXIT_DIVERGED


def obstacle_to(run: Run, run_dir: Path) -> str | None:
    """Why what was trained here cannot stand for a run, and cannot become it; None if it can."""
    return "diverged" if diverged(run, run_dir) else recipe_difference(run, run_dir)


def recipe_difference(run: Run, run_dir: Path) -> str | None:
    """With what other recipe the run directory was trained, if it was."""
    path = run_dir / run_directory.RECIPE
    if not path.is_file():
        return None
    differing = recipes.differences(recipes.load(path), run.recipe)
    return next(
        (
            f"was trained with {key} = {there}, the study now says {here}"
            for key, (there, here) in differing.items()
            if (key, here) != ("data.tokenizer_fingerprint", None)  # filled in at the start
        ),
        None,
    )


def tuned_tries(study: Study, folder: Path) -> Tuned:
    """By arm and size, the try of the lowest mean validation loss, once all its runs have ended.

    One that diverged has lost; where all have, there is none.
    """
    losses: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    unfinished = set()
    for run in study.runs(pattern="learning_rate/*"):
        run_dir = folder / run.name
        lost = diverged(run, run_dir)
        if not (lost or finished(run, run_dir)) or recipe_difference(run, run_dir):
            unfinished.add((run.arm, run.size))
            continue
        losses[run.arm, run.size][run.variant].append(
            math.inf if lost else read_summary(run_dir)["final_val_loss"]
        )
    means = {
        place: {variant: statistics.fmean(values) for variant, values in by_variant.items()}
        for place, by_variant in losses.items()
        if place not in unfinished
    }
    return {
        place: min(by_variant, key=by_variant.__getitem__)
        for place, by_variant in means.items()
        if math.isfinite(min(by_variant.values()))
    }
