"""Studies: expansion, the solver of depths, fits on planted losses, verdicts, one run by the launcher."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from data_prep.errors import UserError
from data_prep.files import manifest_path
from data_prep.indexed import IndexedReader
from launchers import study as launcher
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.accounting import count_parameters
from leviathan_ds.config import ModelConfig
from leviathan_ds.data.audit import Audit
from leviathan_ds.parallel.launch import EXIT_DIVERGED, EXIT_STOPPED
from leviathan_ds.studies import figures, measure, results, runner, theorem
from leviathan_ds.studies.comparison import Comparison
from leviathan_ds.studies.fits import PowerLaw, equivalent, fit_dense, fit_power_law, tokens_to_reach
from leviathan_ds.studies.report import CAPTIONS
from leviathan_ds.studies.runner import EVALUATION, MEASURES
from leviathan_ds.studies.study import Run, Study, layers_for, load, merged
from tests.study_runs import STUDY, finish, finish_all, write_study

ROOT = Path(__file__).parents[1]
LAW = PowerLaw(2.0, 60.0, 0.3)
SIZES = [1e6, 2e6, 4e6, 1e7, 4e7]


# ---- the runs of a study ----


def test_a_study_is_a_grid_of_recipes(tmp_path):
    study = write_study(tmp_path)
    tuned = {("leviathan", "d64"): "lr0.003", ("dense_tied", "d64"): "lr0.001"}
    runs = {run.name: run for run in study.runs(tuned)}
    assert len(runs) == 3 * 2 + 4 * 3 * 2 + 4 * 2 + 2
    run = runs["iso_body/leviathan-d128-s2"]
    training = run.recipe.training
    assert (training.seed, training.lr, training.min_lr) == (2, 3e-3, pytest.approx(3e-4))
    assert run.tokens == training.train_steps * 4 * 64 >= 10_000 > (training.train_steps - 1) * 4 * 64
    assert runs["learning_rate/dense_tied-d64-lr0.001-s1"].recipe.training.lr == 1e-3
    assert runs["ablation/leviathan-d64-rank8-s1"].recipe.model.generator.rank == 8
    twin = recipes.differences(run.recipe, runs["iso_body/dense_tied-d128-s2"].recipe)
    assert set(twin) == {"model.embedding", "training.lr", "training.min_lr"}
    assert run.missing is None
    assert "dense_untied" in str(runs["iso_body/dense_untied-d32-s1"].missing)
    assert [each.name for each in study.runs(pattern="*-d32-s2")] == [
        "iso_body/dense_tied-d32-s2",
        "iso_body/dense_untied-d32-s2",
        "iso_body/leviathan-d32-s2",
        "isoparametric/leviathan-d32-s2",
    ]


def test_an_experiment_may_have_a_budget_of_its_own(tmp_path):
    rates = {"lr": {"training": {"lr": 1e-3}}}
    tuning = {"sizes": ["d32"], "tokens": 2_560, "variants": rates}
    grid = {"learning_rate": tuning, "iso_body": {}}
    runs = list(write_study(tmp_path, experiments=grid).runs())
    assert {run.tokens for run in runs if run.kind == "learning_rate"} == {2_560}
    assert all(run.tokens >= 10_000 for run in runs if run.kind == "iso_body")


def test_isoparametric_totals_agree(tmp_path):
    study = write_study(tmp_path)
    runs = {run.name: run for run in study.runs()}
    for size in study.sizes:
        deep = count_parameters(runs[f"isoparametric/leviathan-{size}-s1"].recipe.model).total
        untied = count_parameters(runs[f"iso_body/dense_untied-{size}-s1"].recipe.model).total
        assert deep == pytest.approx(untied, rel=0.02)


def test_the_solver_finds_the_nearest_depth_or_says_that_there_is_none():
    model = ModelConfig(vocab_size=5000, hidden_size=64, num_attention_heads=4)
    for layers in (1, 7, 40):
        assert layers_for(model, count_parameters(replace(model, num_layers=layers)).total) == layers
    six, seven = (count_parameters(replace(model, num_layers=layers)).total for layers in (6, 7))
    assert layers_for(model, six + (seven - six) // 3) == 6
    with pytest.raises(UserError, match=r"no number of layers of width 64 .* within 2%"):
        layers_for(model, 100_000)


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_studies_that_ship_load_and_are_planned(path, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert (
        launcher.main(["plan", str(path), "--runs_dir", str(tmp_path), "--slurm", str(tmp_path / "submit")]) == 0
    )
    study = load(path)
    assert f"{study.name}: {len(list(study.runs()))} runs" in capsys.readouterr().out
    subprocess.run(["bash", "-n", str(tmp_path / "submit")], check=True)
    jobs = [line for line in (tmp_path / "submit").read_text().splitlines() if line.startswith("sbatch ")]
    ready = [run for run in study.runs() if run.missing is None]
    assert len(jobs) == len(ready)
    written = tmp_path / study.name / f"{ready[0].name}.yaml"
    assert recipes.load(written) == ready[0].recipe
    assert str(written) in jobs[0]


@pytest.mark.parametrize("name", ["paper_v1", "paper_v2"])
def test_the_documented_node_hours_are_current(name):
    study = load(ROOT / "studies" / f"{name}.yaml")
    runs = {run.name: run for run in study.runs()}
    documented = (ROOT / "docs" / "studies.md").read_text()
    arms = ("dense_tied", "dense_untied", "leviathan")
    for size in study.sizes:
        deep = runs[f"isoparametric/leviathan-{size}-s1"]
        hours = [
            study.predicted_s(run) / 3600 for run in (*(runs[f"iso_body/{arm}-{size}-s1"] for arm in arms), deep)
        ]
        row = " | ".join([f"| {size}", f"{deep.tokens / 1e9:.2f} B", *(f"{each:.2f}" for each in hours)])
        assert f"{row} ({deep.recipe.model.num_layers}) |" in documented


def test_every_loss_that_the_documents_quote_is_in_the_tables_of_its_study():
    def measured(name: str) -> set[str]:
        rows = results.read_table(ROOT / "docs" / "results" / name, results.RUNS)
        return {f"{row['val_loss']:.3f}" for row in rows if row["status"] == results.DONE}

    quoted = 0
    for line in (ROOT / "docs" / "studies.md").read_text().splitlines():
        if row := re.match(r"\| `(\w+_32k)` \|", line):
            losses = re.findall(r"\b\d\.\d{3}\b", line)
            known = measured(row[1]) | measured("iso_body_32k") | measured("second_round_32k")
            assert set(losses) <= known, row[1]
            quoted += len(losses)
    assert quoted > 20


def test_a_plan_names_every_run_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = ROOT / "studies" / "isoparametric_rate_32k.yaml"
    assert launcher.main(["plan", str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(run.name in printed for run in load(path).runs())
    assert launcher.main(["plan", str(path), "--only", "x*"]) == 2
    assert "no run of isoparametric_rate_32k matches 'x*'" in capsys.readouterr().err


def test_a_rate_may_be_written_without_a_point(tmp_path):
    path = tmp_path / "planted.yaml"
    path.write_text(yaml.safe_dump(STUDY).replace("lr: 0.001", "lr: 1e-3"))
    assert "1e-3" in path.read_text()
    assert [run.recipe.training.lr for run in load(path).runs(pattern="*-lr0.001-*")] == [1e-3] * 3


def test_the_papers_studies_are_the_recipes():
    runs = {run.name: run for run in load(ROOT / "studies" / "paper_v2.yaml").runs()}
    for size in ("200m", "400m", "1200m"):
        for arm in ("leviathan", "dense_tied", "dense_untied"):
            shipped = recipes.load(ROOT / "recipes" / f"{arm}_{size}.yaml")
            differing = recipes.differences(shipped, runs[f"iso_body/{arm}-{size}-s1"].recipe)
            unused = set() if arm == "leviathan" else {"model.generator.sigmoid_divisor"}
            assert set(differing) <= {"training.seed", "run.keep_checkpoints"} | unused


def test_a_study_upon_another_one_says_only_what_differs(tmp_path):
    base = write_study(tmp_path, note="of the base")
    arms = {"leviathan": {"training": {"generator_lr_scale": 0.1}}, "other": {"model": {"embedding": "leviathan"}}}
    sizes = {"d64": {"model": {"num_layers": 3}}}
    grid = {"iso_body": {"arms": ["leviathan", "other"], "sizes": ["d64"]}}
    values = {"recipe": {"training": {"lr": 5e-3}}, "arms": arms, "sizes": sizes, "experiments": grid}
    study = upon(tmp_path, tmp_path / "planted.yaml", **values)
    ours, other = study.runs()
    (theirs,) = base.runs({("leviathan", "d64"): "lr0.001"}, "iso_body/leviathan-d64-s1")
    assert recipes.differences(theirs.recipe, ours.recipe) == {
        "model.num_layers": (2, 3),
        "training.lr": (1e-3, 5e-3),
        "training.min_lr": (1e-4, 5e-4),
        "training.generator_lr_scale": (1.0, 0.1),
    }
    assert other.recipe.training.generator_lr_scale == 1.0
    assert (study.name, study.note, study.tokens) == ("upon", "", base.tokens)
    assert list(study.sizes) == list(base.sizes)


def upon(folder: Path, base: Any, **values: Any) -> Study:
    path = folder / "upon.yaml"
    path.write_text(yaml.safe_dump({"base": str(base) if isinstance(base, Path) else base, **values}))
    return load(path)


def test_a_base_may_name_recipe_files_and_a_name_with_nothing_behind_it_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the base is found in the project
    grid = {"iso_body": {"arms": ["dense_tied"], "sizes": ["60m"]}}
    changes = {"sizes": {"60m": {"training": {"warmup_steps": 7}}}, "arms": {"dense_tied": None}}
    (run,) = upon(tmp_path, "studies/paper_v1.yaml", experiments=grid, **changes).runs()
    (theirs,) = load(ROOT / "studies" / "paper_v1.yaml").runs(pattern="iso_body/dense_tied-60m-s1")
    before = theirs.recipe.training.warmup_steps
    assert recipes.differences(theirs.recipe, run.recipe) == {"training.warmup_steps": (before, 7)}


def test_mistakes_in_a_base_are_named(tmp_path):
    write_study(tmp_path)
    (tmp_path / "middle.yaml").write_text("base: root.yaml\n")
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(STUDY | {"tokens": -3}))
    for base, message in (
        (3, "base must be the path of a study file, got 3"),
        ("", "base must be the path of a study file, got ''"),
        ("nowhere.yaml", "base: study nowhere.yaml: No such file"),
        (tmp_path, f"base: study {tmp_path}: Is a directory"),
        (tmp_path / "middle.yaml", "middle.yaml has a base itself; name a study without one"),
        (tmp_path / "upon.yaml", "upon.yaml has a base itself"),
        (tmp_path / "wrong.yaml", f"base: study {tmp_path / 'wrong.yaml'}: tokens must be a whole number"),
        (tmp_path / "planted.yaml", "experiments is missing or no mapping; .* are not taken from a base"),
    ):
        with pytest.raises(UserError, match=rf"^study {tmp_path / 'upon.yaml'}: .*{message}"):
            upon(tmp_path, base)


TUNING = STUDY["experiments"]["learning_rate"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokns": 1}, "unknown key tokns"),
        ({"tokens": "1e6"}, "tokens must be a whole number"),
        ({"experiments": {"iso_body": {"tokens": 0}}}, "experiments.iso_body.tokens must be a whole number"),
        ({"arms": None}, "arms is missing"),
        ({"experiments": {"iso": {}}}, "unknown experiment iso"),
        ({"experiments": {"iso_body": {"arms": ["tied"]}}}, "iso_body.arms names 'tied', not among 'dense_tied'"),
        (
            {"experiments": {"iso_body": {"arms": "leviathan"}}},
            "arms must be a list with something in it, got 'le",
        ),
        ({"experiments": {"iso_body": {"sizes": []}}}, r"iso_body.sizes must be a list with something in it"),
        ({"experiments": {"iso_body": {"sizes": ["d32", "d32"]}}}, "iso_body.sizes has 'd32' twice"),
        ({"experiments": {"iso_body": {"seeds": []}}}, "iso_body.seeds must be a list with something in it"),
        ({"experiments": {"iso_body": {"seeds": [1, 1]}}}, "iso_body.seeds has 1 twice"),
        ({"experiments": {"iso_body": {"seeds": 2}}}, "iso_body.seeds must be a list"),
        ({"experiments": {"iso_body": {"seeds": [1, "2"]}}}, "iso_body.seeds must be whole numbers"),
        ({"experiments": {"isoparametric": {"match_arm": "tied"}}}, "isoparametric.match_arm names 'tied', not"),
        ({"experiments": {"ablation": {"variants": ["a"]}}}, "ablation.variants must be a mapping of names"),
        ({"experiments": {"ablation": {"variants": {}}}}, "ablation.variants must be a mapping of names"),
        ({"experiments": {"ablation": {"variants": {"a": 3}}}}, "ablation.variants.a must be a mapping of sec"),
        ({"experiments": {"ablation": {"variants": {0.3: {}}}}}, "reads 0.3 in experiments.ablation.variants as"),
        (
            {"sizes": {64: {"model": {"hidden_size": 64}}}},
            "YAML reads 64 in sizes as no string; put the name in q",
        ),
        ({"arms": {"a": {"model": None}}}, "arms.a must be a mapping of sections"),
        ({"experiments": {"learning_rate": {}}}, "learning_rate.variants sets no training.lr"),
        (
            {"experiments": {"learning_rate": TUNING | {"arms": ["leviathan"]}, "iso_body": {}}},
            "experiments.iso_body has dense_tied, of which learning_rate has no tries; add it to both",
        ),
        ({"experiments": {"learning_rate": {"variants": {"a": None}}}}, "variants.a sets no training.lr"),
        (
            {"experiments": {"learning_rate": {"variants": {"a": {"training": {"lr": 1e-3}, "model": {}}}}}},
            "variants.a sets model; a try may set keys of training alone",
        ),
        (
            {
                "experiments": {
                    "learning_rate": {"variants": {"a": {"training": {"lr": 1e-3, "warmup_steps": 30}}}},
                    "iso_body": {"tokens": 2_560},
                }
            },
            "learning_rate.variants.a: tokens = 2,560 make 10 steps: training.warmup_steps = 30 exceeds",
        ),
        ({"ds_config": 3}, "ds_config must be text, got 3"),
        ({"keep_checkpoints": "iso_body"}, "keep_checkpoints must be a list, got 'iso_body'"),
        ({"keep_checkpoints": ["isobody"]}, "keep_checkpoints names 'isobody', not among 'learning_rate'"),
        ({"experiments": {"iso_body": {"seed": 1}}}, "unknown key experiments.iso_body.seed"),
        ({"cluster": {"gpus": 8}}, "unknown key cluster.gpus"),
        ({"sizes": {"d32": {"model": {"hidden": 32}}}}, "unknown key model.hidden"),
        ({"recipe": {"model": {"num_attention_heads": 2}}}, "vocab_size is open"),
    ],
)
def test_mistakes_in_a_study_are_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        write_study(tmp_path, **({"experiments": {"iso_body": {}}} | changes))


def test_a_variant_with_nothing_behind_its_name_changes_nothing(tmp_path):
    variants = {"as_is": None, "rank8": {"model": {"generator": {"rank": 8}}}}
    ablation = {"arms": ["leviathan"], "sizes": ["d64"], "variants": variants}
    study = write_study(tmp_path, experiments={"ablation": ablation, "iso_body": {}}, keep_checkpoints=[])
    runs = {run.name: run for run in study.runs()}
    as_is = runs["ablation/leviathan-d64-as_is-s1"]
    assert as_is.recipe == runs["iso_body/leviathan-d64-s1"].recipe
    assert study.keep_checkpoints == ()


def test_a_study_is_the_same_from_any_folder(tmp_path, monkeypatch):
    """Sizes that are recipe files are the project's; run directories are where the user is."""
    monkeypatch.chdir(tmp_path)
    assert {run.size for run in load(ROOT / "studies" / "paper_v2.yaml").runs()} == {"200m", "400m", "1200m"}
    with pytest.raises(UserError, match=r"recipe recipes/none\.yaml: No such file"):
        write_study(tmp_path, sizes={"none": "recipes/none.yaml"})
    write_study(tmp_path, experiments={"iso_body": {"arms": ["leviathan"], "sizes": ["d32"]}})
    started = []
    monkeypatch.setattr(runner, "execute", lambda command, log: started.append(command) or 1)
    monkeypatch.setattr(runner, "lacking", lambda *_: [])
    assert launcher.main(["run", "planted.yaml", "--runs_dir", "runs"]) == 1
    options = dict(zip(started[0][:-1], started[0][1:], strict=True))
    assert options["--run_dir"] == str(tmp_path / "runs" / "planted" / "iso_body" / "leviathan-d32-s1")
    assert options["--config"] == f"{options['--run_dir']}.yaml"


# ---- fits ----


def test_the_fit_recovers_a_planted_law():
    for law in (LAW, PowerLaw(1.7, 400.0, 0.34), PowerLaw(3.0, 1e4, 0.6)):
        found = fit_power_law(SIZES, [law.loss(size) for size in SIZES])
        assert found.irreducible == pytest.approx(law.irreducible, rel=1e-3)
        assert found.exponent == pytest.approx(law.exponent, rel=1e-3)
        assert found.amplitude == pytest.approx(law.amplitude, rel=1e-2)


def test_the_intervals_hold_the_planted_law_under_noise_and_an_outlier():
    rng = np.random.default_rng(3)
    sizes = [size for size in SIZES for _ in range(3)]
    losses = [LAW.loss(size) * math.exp(rng.normal(0, 1e-3)) for size in sizes]
    losses[4] += 0.3
    fit = fit_dense(sizes, losses, resamples=60)
    assert not fit.warnings
    for key in ("irreducible", "exponent"):
        low, high = fit.interval([getattr(law, key) for law in fit.resampled])
        assert low <= getattr(LAW, key) <= high
    found = equivalent(fit, 2e6, [LAW.loss(3.6e6)] * 2)
    assert found.multiplier == pytest.approx(1.8, rel=0.02)
    assert found.interval[0] <= 1.8 <= found.interval[1]
    assert not found.warnings


def test_what_a_fit_does_not_support_is_said():
    losses = [LAW.loss(size) for size in SIZES]
    few = fit_dense(SIZES[:3], losses[:3], resamples=5)
    assert "3 sizes for three parameters" in few.warnings[0]
    assert "3 sizes for three parameters" in equivalent(few, 1e6, losses[:1]).warnings[0]
    fit = fit_dense(SIZES, losses, resamples=20)
    below = equivalent(fit, 1e6, [1.9])
    assert math.isinf(below.size)
    assert "at or below E" in below.warnings[1]
    beyond = equivalent(fit, 2e6, [LAW.loss(3e8)])
    assert "extrapolated: the dense runs say more than 20.00 ×" in beyond.warnings[0]
    wide = equivalent(fit, 2e6, [LAW.loss(2e6), LAW.loss(2e7)])
    assert "more than a factor of 2" in wide.warnings[0]
    # Support is a matter of the run's own size: never of what came out.
    assert beyond.supported and wide.supported and not equivalent(few, 2e6, losses[:1]).supported
    for size in (SIZES[0], SIZES[-1], 1e8):
        at_the_end = equivalent(fit, size, [LAW.loss(2e6)])
        assert not at_the_end.supported
        assert "at or beyond the ends" in at_the_end.warnings[0]
    plain = fit_dense(SIZES, [60 * size**-0.3 for size in SIZES], resamples=5)
    assert "E is near nought" in plain.warnings[0]
    steps = fit_dense(SIZES, [4.0, 3.0, 3.0, 3.0, 3.0], resamples=5)
    assert any("α is at its bound" in warning for warning in steps.warnings)
    with pytest.raises(ValueError, match="three sizes"):
        fit_power_law([1.0, 2.0, 2.0], [3.0, 2.0, 2.0])


def test_tokens_to_a_loss_are_interpolated_or_none():
    assert tokens_to_reach([10, 20, 30], [5.0, 4.0, 3.0], 3.75) == 22.5
    assert tokens_to_reach([30, 10, 20], [3.0, 5.0, 4.0], 5.5) == 10
    assert tokens_to_reach([10, 20], [5.0, 4.0], 3.9) is None


# ---- from run directories to the page ----


AGAINST_TIED = "Iso-body: lower perplexity than the tied table"
AGAINST_UNTIED = "Iso-body: lower perplexity than the untied table"
EQUAL = "Equal parameters: lower perplexity than the untied table"
SOONER = "Fewer tokens to the final loss of the tied table"
GROWS = "The gain over the tied table grows from the smallest to the largest size"
RARE = "The gain over the tied table is in rare tokens"
LARGER = "Equal parameters: acts like a larger dense model (fit of the untied table)"


def planted(multiplier: float):
    """Dense runs on the law of their size, Leviathan's on that of `multiplier` times theirs; seeds a bit apart."""

    def loss(run: Run) -> float:
        size = count_parameters(run.recipe.model).total * (multiplier if run.arm == "leviathan" else 1)
        noise = 1e-3 * run.seed + (0.2 if run.recipe.training.lr == 1e-3 and run.kind == "learning_rate" else 0)
        return LAW.loss(size) + noise

    return loss


def page_of(tmp_path: Path) -> str:
    """Collect and report, as a user would."""
    study, where = str(tmp_path / "planted.yaml"), ["--results", str(tmp_path / "results")]
    assert launcher.main(["collect", study, "--runs_dir", str(tmp_path / "runs"), *where]) == 0
    assert launcher.main(["report", study, "--page", str(tmp_path / "page.md"), *where]) == 0
    return (tmp_path / "page.md").read_text()


def collected(tmp_path: Path, multiplier: float, **options) -> tuple[Comparison, str]:
    finish_all(write_study(tmp_path), tmp_path / "runs" / "planted", planted(multiplier), **options)
    page = page_of(tmp_path)
    return Comparison.read(tmp_path / "results" / "planted"), page


def test_a_planted_gain_is_found(tmp_path):
    speed = {"tokens_per_s": lambda run: 500.0 if run.arm == "leviathan" else 1e3}
    rare = {"rare_loss": lambda run: 6.0 - (run.arm == "leviathan")}
    comparison, page = collected(tmp_path, 3.0, **speed, **rare)
    for size in ("d32", "d128"):
        row, other = comparison.pairs(size, "dense_tied")[0]
        gain = 1 - math.exp(row["val_loss"] - other["val_loss"])
        assert comparison.gains(size, "dense_tied")[1] == pytest.approx(gain)
        assert comparison.frequency_gains(size, 10)[1] == pytest.approx(1 - math.exp(-1))
        assert comparison.overheads(size) == {1: 1.0, 2: 1.0}
    found = comparison.equivalents("isoparametric")["d64"]
    assert found.multiplier == pytest.approx(3.0, rel=0.1)
    # The curves fall by 0.2 every tenth of the run: reached earlier by the difference.
    ours, base = comparison.pairs("d64", "dense_tied")[0]
    share = 1 - (base["val_loss"] - ours["val_loss"]) / 2
    assert comparison.savings("d64")[1] == pytest.approx(1 / share, rel=0.02)
    verdicts = {each.claim: each.verdict for each in comparison.verdicts()}
    for claim in (AGAINST_TIED, AGAINST_UNTIED, EQUAL, SOONER, RARE):
        assert verdicts[claim] == "holds (8 of 8 pairs)", claim
        assert verdicts[claim.replace("the tied", "the untied")] == "holds (8 of 8 pairs)", claim
    # A power law in N: the smaller the model, the more is to be gained from three times its parameters.
    assert verdicts[GROWS] == "fails (0 of 2 seeds)"
    # The smallest and the largest are as large as the dense runs' ends: there only one outcome could be seen.
    assert verdicts[LARGER] == "holds at d64, d96; the fit does not support d32, d128"
    assert "**holds (8 of 8 pairs)**" in page
    assert page.count("![") == 8
    for name in ("loss", "gain", "multiplier", "curves", "frequency", "learning_rate", "ablation", "embeddings"):
        assert f"results/planted/{name}.png" in page
        for kind in ("png", "svg"):
            assert (tmp_path / "results" / "planted" / f"{name}.{kind}").stat().st_size > 1000


def test_a_planted_loss_is_told_plainly(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda *_: list(CAPTIONS))  # the test above draws them
    comparison, page = collected(tmp_path, 0.4)
    by_claim = {each.claim: each for each in comparison.verdicts()}
    for claim in (AGAINST_TIED, AGAINST_UNTIED, EQUAL, SOONER):
        assert by_claim[claim].verdict == "fails (0 of 8 pairs)", claim
    assert by_claim[LARGER].verdict == "fails at d64, d96; the fit does not support d32, d128"
    assert "not reached" in page
    assert "**fails (0 of 8 pairs)**" in page
    # The rates that won the tuning are those of all other runs; the edge cases of the tables survive the CSV.
    assert {row["lr"] for row in comparison.of("iso_body")} == {3e-3}
    assert {row["variant"] for row in comparison.of("iso_body")} <= {"", None}


def lose(tmp_path: Path, pattern: str) -> None:
    """Make runs of the planted study diverge."""
    for run in load(tmp_path / "planted.yaml").runs(pattern=pattern):
        summary = tmp_path / "runs" / "planted" / run.name / run_directory.SUMMARY
        summary.write_text(json.dumps({"exit_code": EXIT_DIVERGED, "steps": 3}))


def test_a_diverged_run_loses_its_pair_and_is_named(tmp_path):
    study = write_study(tmp_path)
    finish_all(study, tmp_path / "runs" / "planted", planted(3.0))
    lose(tmp_path, "iso_body/leviathan-d64-s2")
    page = page_of(tmp_path)
    assert "undecided (7 of 8 pairs)" in page
    assert "| iso_body/leviathan-d64-s2 | diverged | no finite loss |" in page
    count = len(list(study.runs()))
    assert f"{count - 1} of {count} runs" in page


@pytest.fixture(scope="module")
def gaining(tmp_path_factory) -> Path:
    """A study's folder, all of its runs at their end, Leviathan's with a gain; tests put back what they take."""
    folder = tmp_path_factory.mktemp("gaining")
    finish_all(write_study(folder), folder / "runs" / "planted", planted(3.0))
    return folder


@pytest.mark.parametrize(
    "pattern, verdict",
    [
        ("iso_body/leviathan-*", {AGAINST_TIED: "fails (0 of 8 pairs)", SOONER: "fails (0 of 8 pairs)"}),
        ("iso_body/leviathan-d128-*", {GROWS: "fails (0 of 2 seeds)", AGAINST_TIED: "undecided (6 of 8 pairs)"}),
        ("isoparametric/*", {EQUAL: "fails (0 of 8 pairs)"}),
        ("isoparametric/*-s2", {EQUAL: "undecided (4 of 8 pairs)", LARGER: "undecided at d64, d96;"}),
        ("isoparametric/*-d32-*", {LARGER: "undecided at d64, d96;"}),
    ],
)
def test_what_diverged_is_in_no_verdict_a_gain(gaining, tmp_path, pattern, verdict):
    folder, study = gaining / "runs" / "planted", load(gaining / "planted.yaml")
    before = {path: path.read_text() for path in folder.rglob(run_directory.SUMMARY)}
    lose(gaining, pattern)
    try:
        results.collect(study, folder, tmp_path)
    finally:
        for path, text in before.items():
            path.write_text(text)
    found = {each.claim: each.verdict for each in Comparison.read(tmp_path).candidates[0].verdicts()}
    for claim, expected in verdict.items():
        assert found[claim].startswith(expected), (claim, found[claim])


@pytest.mark.parametrize(
    "losses, verdict",
    [
        ((4.1, 4.03), "fails (0 of 1 seeds)"),
        ((4.1, 3.97), "holds (1 of 1 seeds)"),
        ((3.9, 3.97), "fails (0 of 1 seeds)"),
    ],
)
def test_a_loss_that_shrinks_is_no_gain_that_grows(losses, verdict):
    same = {"kind": "iso_body", "seed": 1, "status": "done", "num_layers": 2, "tokens": 10, "tokens_per_s": 1.0}
    rows = []
    for size, width, loss in zip(("small", "large"), (32, 64), losses, strict=True):
        for arm, val_loss in (("dense_tied", 4.0), ("leviathan", loss)):
            shape = {"arm": arm, "embedding": arm, "size": size, "hidden_size": width}
            rows.append(same | shape | {"parameters": 1000 * width, "val_loss": val_loss})
    assert {each.claim: each.verdict for each in Comparison(rows, [], []).verdicts()}[GROWS] == verdict


def test_equal_parameters_are_claimed_of_equal_parameters_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda *_: [])
    experiments = STUDY["experiments"] | {
        "isoparametric": {"arms": ["leviathan"], "match_arm": "dense_tied", "sizes": ["d128"]}
    }
    small = {"model": {**STUDY["recipe"]["model"], "generator": {"seed_size": 8, "num_heads": 1, "rank": 8}}}
    study = write_study(tmp_path, experiments=experiments, recipe=STUDY["recipe"] | small)
    finish_all(study, tmp_path / "runs" / "planted", planted(3.0))
    page_of(tmp_path)
    claims = [each.claim for each in Comparison.read(tmp_path / "results" / "planted").verdicts()]
    assert EQUAL not in claims
    assert EQUAL.replace("untied", "tied") in claims


def test_every_arm_with_a_generator_is_compared(tmp_path):
    arms = STUDY["arms"] | {"wide": {"model": {"embedding": "leviathan", "generator": {"rank": 96}}}}
    grid = {"iso_body": {}, "isoparametric": {"arms": ["wide"], "sizes": ["d128"]}}
    study = write_study(tmp_path, arms=arms, experiments=grid)
    finish_all(study, tmp_path / "runs" / "planted", lambda run: 5.0 - 0.1 * list(arms).index(run.arm))
    page = page_of(tmp_path)
    assert page.count("### Verdicts on ") == 2
    wide = page[page.index("### Verdicts on wide") :]
    assert f"| {EQUAL} | not reported | d128 +18.1% | **holds (1 of 1 pairs)** |" in wide


def test_a_best_rate_at_an_end_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda *_: ["learning_rate"])
    rates = {f"lr{rate}": {"training": {"lr": rate}} for rate in (1e-3, 3e-3, 9e-3)}
    grid = {"learning_rate": {"arms": ["leviathan"], "sizes": ["d64"], "variants": rates}}
    study = write_study(tmp_path, experiments=grid)
    finish_all(study, tmp_path / "runs" / "planted", lambda run: 5.0 - run.recipe.training.lr)
    assert "**leviathan at d64: the best rate, 0.009, is at an end of the tries.**" in page_of(tmp_path)
    lose(tmp_path, "*-lr0.009-*")
    assert "No arm's best rate is at an end" in page_of(tmp_path), "a try beyond it diverged"


def test_tries_of_one_rate_that_differ_elsewhere_are_told_apart(tmp_path):
    """The best rate, with the better warmup, is at the end; by the mean over warmups none is better."""
    tries = {
        f"lr{lr}_w{warmup}": {"training": {"lr": lr, "warmup_steps": warmup}}
        for lr in (1e-3, 3e-3, 9e-3)
        for warmup in (1, 5)
    }
    grid = {"learning_rate": {"arms": ["leviathan", "dense_tied"], "sizes": ["d64"], "variants": tries}}
    recipe = merged(STUDY["recipe"], {"training": {"generator_lr_scale": 0.3}})
    study = write_study(tmp_path, experiments=grid, recipe=recipe)

    def loss(run: Run) -> float:
        training = run.recipe.training
        return 5.0 - 100 * training.lr if training.warmup_steps == 5 else 4.5 + 100 * training.lr

    finish_all(study, tmp_path / "runs" / "planted", loss)
    assert "**leviathan at d64: the best rate, 0.009, is at an end of the tries.**" in page_of(tmp_path)
    comparison = Comparison.read(tmp_path / "results" / "planted")
    scales = {(row["arm"], row["input_lr_scale"]) for row in comparison.runs}
    assert scales == {("leviathan", 0.3), ("dense_tied", 1.0)}, "that of each one's own input"
    (panel,) = figures.learning_rate(comparison).axes
    for drawn in panel.containers:
        assert list(drawn.lines[0].get_ydata()) == pytest.approx([4.6, 4.7, 4.1])


FACTORS = {
    f"lr{lr}_x{factor}": {"training": {"lr": lr, "table_lr_scale": factor, "generator_lr_scale": factor}}
    for lr in (1e-3, 3e-3, 9e-3)
    for factor in (0.1, 1.0, 10.0)
}


def test_a_try_may_set_more_than_the_rate_and_all_of_it_is_taken(tmp_path, monkeypatch):
    """The best factor of each arm is at an end of the tries, of one the rate as well."""
    best = {"dense_tied": (3e-3, 0.1), "dense_untied": (3e-3, 10.0), "leviathan": (9e-3, 0.1)}

    def loss(run: Run) -> float:
        training = run.recipe.training
        factor = training.generator_lr_scale if run.arm == "leviathan" else training.table_lr_scale
        lr, best_factor = best[run.arm]
        return 4 + abs(math.log(training.lr / lr)) + abs(math.log(factor / best_factor))

    monkeypatch.setattr(figures, "draw", lambda *_: ["loss", "learning_rate"])
    grid = {"learning_rate": {"sizes": ["d64"], "variants": FACTORS}, "iso_body": {}}
    study, folder = write_study(tmp_path, experiments=grid), tmp_path / "runs" / "planted"
    finish_all(study, folder, loss)
    tuned = runner.tuned_tries(study, folder)
    assert tuned == {(arm, "d64"): f"lr{lr}_x{factor}" for arm, (lr, factor) in best.items()}
    for run in study.runs(tuned, "iso_body/*"):
        assert loss(run) == 4
    page = page_of(tmp_path)
    rows = results.read_table(tmp_path / "results" / "planted", results.RUNS)
    rates = {(row["arm"], row["lr"], row["input_lr_scale"]) for row in rows if row["kind"] == "iso_body"}
    assert rates == {(arm, *found) for arm, found in best.items()}
    assert re.search(r"\| d64 \| leviathan \| 64 × 2 \| .* \| 0.009 \| 0.0009 \|", page)
    assert re.findall(r"\*\*(.*) is at an end of the tries", page) == [
        "dense_tied at d64: the best factor of the input embedding, 0.1,",
        "dense_untied at d64: the best factor of the input embedding, 10,",
        "leviathan at d64: the best rate, 0.009,",
        "leviathan at d64: the best factor of the input embedding, 0.1,",
    ]
    panels = figures.learning_rate(Comparison.read(tmp_path / "results" / "planted")).axes
    assert [axis.get_title() for axis in panels] == [f"{arm}, d64" for arm in best]
    for axis, (arm, rates) in zip(panels, best.items(), strict=True):
        drawn = {each.get_label(): each.lines[0].get_xydata() for each in axis.containers}
        assert list(drawn) == [f"learning rate {lr:g}" for lr in (1e-3, 3e-3, 9e-3)]
        lowest = {label: points[points[:, 1].argmin()] for label, points in drawn.items()}
        assert tuple(lowest[f"learning rate {rates[0]:g}"]) == (rates[1], 4.0), arm
        assert all(len(points) == 3 for points in drawn.values())


def test_tries_of_the_heads_rate_are_shown_by_its_factor_and_a_tied_one_has_its_tables(tmp_path, monkeypatch):
    lr = 2e-3
    tries = {f"head_x{factor}": {"training": {"lr": lr, "head_lr_scale": factor}} for factor in (0.5, 1.0, 2.0)}
    arms = {"dense_tied": {"training": {"table_lr_scale": 10.0}}, "dense_untied": {}, "leviathan": {}}
    arms = {arm: each | STUDY["arms"][arm] for arm, each in arms.items()}
    grid = {"learning_rate": {"sizes": ["d64"], "variants": tries}, "iso_body": {"sizes": ["d64"]}}
    study, folder = write_study(tmp_path, experiments=grid, arms=arms), tmp_path / "runs" / "planted"
    best = {"dense_tied": 1.0, "dense_untied": 1.0, "leviathan": 2.0}
    finish_all(study, folder, lambda run: 4 + abs(run.recipe.training.head_lr_scale - best[run.arm]))
    monkeypatch.setattr(figures, "draw", lambda *_: ["loss", "learning_rate"])
    page = page_of(tmp_path)
    assert "**leviathan at d64: the best factor of the head, 2, is at an end of the tries.**" in page
    assert not re.search("(tied|untied) at d64: the best factor", page)
    rates = {
        arm: re.search(rf"\| d64 \| {arm} \|.*?\| {lr:g} \| (\S+) \| (\S+) \|", page).groups()  # pyright: ignore
        for arm in arms
    }
    assert rates == {
        "dense_tied": (f"{10 * lr:g}", f"{10 * lr:g}"),
        "dense_untied": (f"{lr:g}", f"{lr:g}"),
        "leviathan": (f"{lr:g}", f"{2 * lr:g}"),
    }
    panels = figures.learning_rate(Comparison.read(tmp_path / "results" / "planted")).axes
    assert panels[2].get_title() == "leviathan, d64"
    assert panels[2].get_xlabel() == "factor on the head's rate"
    assert [list(point) for point in panels[2].containers[0].lines[0].get_xydata()] == [[0.5, 5.5], [1, 5], [2, 4]]


def test_tables_that_are_not_whole_are_refused_and_none_is_left_of_before(gaining, tmp_path, monkeypatch, capsys):
    folder, study = gaining / "runs" / "planted", load(gaining / "planted.yaml")
    output = tmp_path / "planted"
    results.collect(study, folder, output)
    assert results.read_table(output, results.FREQUENCY)
    monkeypatch.setattr(results, "measured", lambda run_dir: False)
    results.collect(study, folder, output)
    assert results.read_table(output, results.FREQUENCY) == []
    whole = (output / results.RUNS).read_text()
    report = [
        "report",
        str(gaining / "planted.yaml"),
        "--page",
        str(tmp_path / "page.md"),
        "--results",
        str(tmp_path),
    ]
    for broken in (whole.replace('"status",', ""), whole[: len(whole) // 2], ""):
        (output / results.RUNS).write_text(broken)
        assert launcher.main(report) == 2
        assert "is cut short or of another version" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_a_study_of_ablations_alone_has_a_page(tmp_path):
    grid = {"ablation": STUDY["experiments"]["ablation"]}
    finish_all(write_study(tmp_path, experiments=grid), tmp_path / "runs" / "planted", lambda run: 4.0)
    page = page_of(tmp_path)
    assert page.count("![") == 1
    assert "leviathan rank8" in page


def test_without_results_the_way_out_is_named(tmp_path, capsys):
    write_study(tmp_path)
    study, where = str(tmp_path / "planted.yaml"), ["--results", str(tmp_path / "none")]
    assert launcher.main(["collect", study, "--runs_dir", str(tmp_path), *where]) == 2
    assert "`study.py run` trains them" in capsys.readouterr().err
    assert launcher.main(["report", study, "--page", str(tmp_path / "page.md"), *where]) == 2
    assert "`study.py collect` writes it" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


# ---- the runner ----


@pytest.fixture
def iso_body(tmp_path, monkeypatch):
    """A study of two runs without tuning, and its folder; its data are not looked for."""
    monkeypatch.setattr(runner, "lacking", lambda *_: [])
    grid = {"iso_body": {"arms": ["dense_tied", "leviathan"], "sizes": ["d32"]}}
    return write_study(tmp_path, experiments=grid), tmp_path / "runs"


def test_done_runs_are_skipped_and_a_failed_one_does_not_end_the_study(iso_body, monkeypatch):
    study, folder = iso_body
    tied, leviathan = study.runs()
    started = []

    def execute(command: list[str], log: Path) -> int:
        started.append(command[command.index("--run_dir") + 1])
        if "leviathan" in started[-1]:
            finish(leviathan, folder / leviathan.name, 3.0)
            return 0
        return 1

    monkeypatch.setattr(runner, "execute", execute)
    said = []
    assert runner.run_study(study, folder, "*", said.append) == 1
    assert started == [str(folder / run.name) for run in (tied, leviathan)]
    assert "ended with code 1" in " ".join(said)
    assert said[-1] == "1 of 2 runs are done"
    started.clear()
    runner.run_study(study, folder, "*", said.append)
    assert started == [str(folder / tied.name)]
    with pytest.raises(UserError, match="no run of planted matches 'x'"):
        runner.run_study(study, folder, "x", said.append)


def test_what_all_runs_lack_is_said_before_the_first_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "execute", lambda *_: pytest.fail("none can run"))
    grid, study = {"iso_body": {"arms": ["leviathan"], "sizes": ["d32"]}}, str(tmp_path / "planted.yaml")
    blend = tmp_path / "blend.yaml"
    blend.write_text("datasets:\n- {name: a, train: a.train, validation: a.validation, weight: 1.0}\n")

    def refused(what: str, **changes: Any) -> None:
        write_study(tmp_path, experiments=grid, **changes)
        assert launcher.main(["plan", study, "--runs_dir", str(tmp_path)]) == 0
        assert f"before these can run: {what}" in capsys.readouterr().out
        assert launcher.main(["run", study, "--runs_dir", str(tmp_path)]) == 2
        first = capsys.readouterr().err
        assert what in first or "more, which `study.py plan` names)" in first

    def of(**data: Any) -> dict[str, Any]:
        return STUDY["recipe"] | {"data": {"sequence_length": 64} | data}

    refused(f"{ROOT / 'text.idx'}: no such file; prepare the dataset")
    refused(f"{ROOT / 'here.idx'}: no such file", recipe=of(validation_prefixes=["here"]))
    refused(f"{tmp_path / 'a.validation.idx'}: no such file", recipe=of(blend=str(blend)))
    refused("study planted: data.prefixes is empty", recipe=of())
    refused(f"{tmp_path / 'none.yaml'}: No such file", recipe=of(blend=str(tmp_path / "none.yaml")))
    refused(f"ds_config {ROOT / 'none.json'}: No such file", ds_config="none.json")
    (run,) = load(Path(study)).runs()
    finish(run, tmp_path / "planted" / run.name, 3.0)
    assert launcher.main(["run", study, "--runs_dir", str(tmp_path)]) == 0, "what has ended lacks nothing"
    assert launcher.main(["plan", study, "--runs_dir", str(tmp_path)]) == 0
    assert "before these can run" not in capsys.readouterr().out


def test_the_data_that_training_prepares_are_not_lacked(tmp_path, monkeypatch):
    """In a clean clone there is no data/demo/sample, and smoke.yaml runs."""
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    shutil.copytree(ROOT / "ds_configs", tmp_path / "ds_configs")
    study = load(ROOT / "studies" / "smoke.yaml")
    assert runner.lacking(study, tmp_path, list(study.runs())) == []
    damaged = tmp_path / "data" / "demo"
    damaged.mkdir(parents=True)
    manifest_path(damaged / "sample").write_text("{}")  # as it is there, training prepares nothing
    (lack,) = runner.lacking(study, tmp_path, list(study.runs()))
    assert lack.startswith(f"{damaged / 'sample.idx'}: no such file")
    study = write_study(tmp_path, recipe=STUDY["recipe"] | {"data": {"prefixes": ["data/demo/other"]}})
    (lack,) = runner.lacking(study, tmp_path, list(study.runs()))
    assert lack.startswith(f"{damaged / 'other.idx'}: no such file")


def test_a_run_of_another_recipe_is_not_taken_for_this_one(iso_body, tmp_path, monkeypatch):
    study, folder = iso_body
    for run in study.runs():
        finish(run, folder / run.name, 3.0)
    monkeypatch.setattr(runner, "execute", lambda *_: pytest.fail("nothing to start"))
    assert runner.run_study(study, folder, "*", lambda _: None) == 0
    other = write_study(
        tmp_path, experiments={"iso_body": {"arms": ["leviathan"], "sizes": ["d32"]}}, tokens=20_000
    )
    said = []
    assert runner.run_study(other, folder, "*", said.append) == 1
    assert "training.train_steps = 40, the study now says 79; to train it anew, remove " in said[0]
    with pytest.raises(UserError, match="no finished run"):
        results.collect(other, folder, tmp_path / "results")


def test_a_stopped_run_stops_the_study(iso_body, monkeypatch):
    study, folder = iso_body
    monkeypatch.setattr(runner, "execute", lambda *_: EXIT_STOPPED)
    said = []
    assert runner.run_study(study, folder, "*", said.append) == EXIT_STOPPED
    assert len(said) == 2


def test_a_stop_while_a_run_is_measured_stops_the_study(iso_body, tmp_path, monkeypatch, capsys):
    study = iso_body[0]
    run = next(study.runs())
    finish(run, tmp_path / study.name / run.name, 3.0)
    (tmp_path / study.name / run.name / MEASURES).unlink()
    monkeypatch.setattr(runner, "finished", lambda run, run_dir: (run_dir / run_directory.SUMMARY).is_file())
    started = []
    monkeypatch.setattr(runner, "execute", lambda command, log: started.append(command) or EXIT_STOPPED)
    said = []
    assert runner.run_study(study, tmp_path / study.name, "*", said.append) == EXIT_STOPPED
    assert said == [f"stopped in {run.name}; the same command goes on there"]
    arguments = ["--runs_dir", str(tmp_path), "--results", str(tmp_path / "results")]
    assert launcher.main(["collect", str(tmp_path / "planted.yaml"), *arguments]) == EXIT_STOPPED
    assert f"stopped in {run.name}" in capsys.readouterr().out
    assert len(started) == 2


def test_a_diverged_learning_rate_loses_the_tuning(tmp_path):
    study = write_study(tmp_path)
    slow, fast = study.runs(pattern="learning_rate/leviathan-*")
    finish(slow, tmp_path / slow.name, 5.0)
    assert runner.tuned_tries(study, tmp_path) == {}, "not before all tries have ended"
    run_directory.update_summary(tmp_path / fast.name, exit_code=EXIT_DIVERGED)
    assert runner.obstacle_to(fast, tmp_path / fast.name) == "diverged"
    assert runner.tuned_tries(study, tmp_path) == {("leviathan", "d64"): slow.variant}
    finish(fast, tmp_path / fast.name, math.nan)
    assert runner.tuned_tries(study, tmp_path) == {("leviathan", "d64"): slow.variant}
    finish(fast, tmp_path / fast.name, 4.0)
    run_directory.update_summary(tmp_path / fast.name, exit_code=EXIT_DIVERGED)  # of an earlier start
    assert runner.obstacle_to(fast, tmp_path / fast.name) is None
    assert runner.tuned_tries(study, tmp_path) == {("leviathan", "d64"): fast.variant}
    # A try of another recipe is none, and where all have diverged there is no best one.
    path = tmp_path / fast.name / run_directory.RECIPE
    whole = path.read_text()
    path.write_text(whole.replace("log_interval: 10", "log_interval: 7"))
    assert runner.tuned_tries(study, tmp_path) == {}
    path.write_text(whole)
    for run in (slow, fast):
        finish(run, tmp_path / run.name, math.nan)
    assert runner.tuned_tries(study, tmp_path) == {}


@pytest.mark.parametrize("code", [EXIT_STOPPED, 0, 1])
def test_a_signal_is_handed_on_and_waited_for(tmp_path, code):
    """The command sees SIGTERM where this process gets SIGUSR1, and may take its time and end as it likes."""
    script = f"import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(0.3), sys.exit({code})))\n"
    script += "print('ready', flush=True)\ntime.sleep(60)"
    log = tmp_path / "log"

    def send() -> None:
        while not log.is_file() or "ready" not in log.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    sender = threading.Thread(target=send)
    sender.start()
    assert runner.execute([sys.executable, "-c", script], log) == EXIT_STOPPED
    sender.join()
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.fixture
def hold() -> Iterator[Callable[[Path], None]]:
    """Lets another process train or measure a run until the test ends."""
    script = "import sys, time; from pathlib import Path; from leviathan_ds.studies.runner import reserved\n"
    script += "with reserved(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    holders = []

    def start(run_dir: Path) -> None:
        command = [sys.executable, "-c", script, str(run_dir)]
        holders.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout.readline() == "held\n"

    yield start
    for each in holders:
        each.kill()
        each.communicate()


def test_a_run_that_another_process_trains_or_measures_is_left_to_it(
    iso_body, tmp_path, monkeypatch, capsys, hold
):
    study, folder = iso_body[0], tmp_path / "planted"
    tied, leviathan = study.runs()
    for run in (tied, leviathan):
        finish(run, folder / run.name, 3.0)
    (folder / tied.name / MEASURES).unlink()
    monkeypatch.setattr(runner, "finished", lambda run, run_dir: True)
    monkeypatch.setattr(runner, "execute", lambda *_: pytest.fail("it is another's"))
    hold(folder / tied.name)
    said = []
    assert runner.run_study(study, folder, "*", said.append) == 0
    assert said == [
        f"[1/2] {tied.name}: is being trained by another process, or measured",
        "1 of 2 runs are done",
    ]
    arguments = ["--runs_dir", str(tmp_path), "--results", str(tmp_path / "results")]
    assert launcher.main(["collect", str(tmp_path / "planted.yaml"), *arguments]) == 0
    assert f"{tied.name}: is being measured by another process" in capsys.readouterr().out


def test_finished_runs_are_not_submitted_again(iso_body, tmp_path, capsys):
    study, folder = iso_body[0], tmp_path / "planted"
    tied, leviathan = study.runs()
    finish(tied, folder / tied.name, 3.0)
    arguments = ["--runs_dir", str(tmp_path), "--slurm", str(tmp_path / "submit.sh")]
    assert launcher.main(["plan", str(tmp_path / "planted.yaml"), *arguments]) == 0
    (job,) = [line for line in (tmp_path / "submit.sh").read_text().splitlines() if line.startswith("sbatch ")]
    assert str(folder / leviathan.name) in job
    assert "1 jobs; 1 are finished, 0 wait for a tuned learning rate" in capsys.readouterr().out


# ---- the tables ----


def test_planned_runs_without_a_row_are_named_with_the_reason(tmp_path, monkeypatch, capsys):
    """And what was trained with another recipe is not measured."""
    study, folder = write_study(tmp_path), tmp_path / "planted"
    finish_all(study, folder, planted(3.0))
    runs = {run.name: run for run in study.runs(runner.tuned_tries(study, folder))}
    diverged, nan, stopped, other = (f"iso_body/leviathan-{size}-s2" for size in ("d32", "d64", "d96", "d128"))
    (folder / diverged / MEASURES).unlink()
    (folder / diverged / run_directory.SUMMARY).write_text('{"exit_code": 65}')
    finish(runs[nan], folder / nan, math.nan)
    (folder / stopped / run_directory.SUMMARY).write_text("{}")
    recipe = runs[other].recipe
    finish(
        replace(runs[other], recipe=replace(recipe, run=replace(recipe.run, log_interval=7))), folder / other, 3
    )
    (folder / other / MEASURES).unlink()
    untuned = "learning_rate/dense_tied-d64-lr0.001-s1"
    (folder / untuned / run_directory.SUMMARY).unlink()
    monkeypatch.setattr(runner, "execute", lambda *_: pytest.fail("nothing to measure"))
    plainly_finished = runner.finished
    monkeypatch.setattr(
        runner, "finished", lambda run, run_dir: run.name == other or plainly_finished(run, run_dir)
    )
    arguments = ["--runs_dir", str(tmp_path), "--results", str(tmp_path / "results")]
    assert launcher.main(["collect", str(tmp_path / "planted.yaml"), *arguments]) == 0
    output = tmp_path / "results" / "planted"
    missing = {}
    rows = results.read_table(output, results.RUNS)
    assert [results.name_of(row) for row in rows] == list(runs)
    done = [row for row in rows if row["status"] == "done"]
    assert all(math.isfinite(row["val_loss"]) and not row["reason"] for row in done)
    missing = {results.name_of(row): (row["status"], row["reason"]) for row in rows if row not in done}
    assert missing.pop(diverged) == missing.pop(nan) == ("diverged", "no finite loss")
    assert missing.pop(stopped) == missing.pop(untuned) == ("missing", "not finished")
    recipes_differ = "was trained with run.log_interval = 7, the study now says 10"
    assert missing.pop(other) == ("missing", recipes_differ)
    assert set(missing) == {name for name in runs if "/dense_tied-" in name and not name.startswith("learning_r")}
    assert set(missing.values()) == {("missing", "waits for a tuned learning rate")}
    told = f"{len(done)} of {len(runs)} runs; {len(missing) + 5} missing: {untuned}, iso_body/dense_tied-d128-s1, "
    assert told in capsys.readouterr().out


def test_of_a_whole_study_nothing_is_missing_and_names_stay_strings(tmp_path, capsys):
    """A variant called 0.3 and one called 3, a size called 64, a commit of digits alone."""
    variants = {"0.3": None, "3": {"model": {"generator": {"rank": 8}}}}
    grid = {"ablation": {"arms": ["leviathan"], "variants": variants}, "iso_body": {}}
    sizes = {"64": {"model": {"hidden_size": 64, "num_layers": 2}}}
    study = write_study(tmp_path, experiments=grid, sizes=sizes)
    finish_all(study, tmp_path / "planted", planted(3.0))
    for path in (tmp_path / "planted").rglob(run_directory.STARTS):
        path.write_text(path.read_text().replace("abc", "1234567"))
    arguments = ["--runs_dir", str(tmp_path), "--results", str(tmp_path / "results")]
    assert launcher.main(["collect", str(tmp_path / "planted.yaml"), *arguments]) == 0
    assert capsys.readouterr().out.endswith(": 5 of 5 runs\n")
    output = tmp_path / "results" / "planted"
    for table in (results.RUNS, results.EVALUATIONS, results.FREQUENCY):
        rows = results.read_table(output, table)
        assert {row["size"] for row in rows} == {"64"}
        assert [each for each in dict.fromkeys(row["variant"] for row in rows)] == ["", "0.3", "3"]
    rows = results.read_table(output, results.RUNS)
    assert {row["commit"] for row in rows} == {"1234567"}
    assert [row["embedding"] for row in rows[:3]] == ["dense_tied", "dense_untied", "leviathan"]


def test_the_speed_of_a_resumed_run_is_not_that_of_its_last_steps(iso_body, tmp_path):
    study, folder = iso_body
    run = next(study.runs())
    run_dir = folder / run.name
    finish(run, run_dir, 3.0, tokens_per_s=17.0)
    assert results.collect(study, folder, tmp_path / "results")[0]["tokens_per_s"] == 17.0
    (start,) = run_directory.read_lines(run_dir / run_directory.STARTS)
    starts = [start | {"first_step": step} for step in (0, 30)]
    (run_dir / run_directory.STARTS).write_text("".join(json.dumps(each) + "\n" for each in starts))
    speeds = {5: 1.0, 10: 100.0, 15: 104.0, 20: 102.0, 25: 101.0, 35: 2.0, 40: 110.0}
    lines = [{"step": step, "loss": 4.0, "tokens_per_s": speeds.get(step)} for step in range(1, 41)]
    (run_dir / run_directory.METRICS).write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert results.collect(study, folder, tmp_path / "results")[0]["tokens_per_s"] == 102.0


def test_the_smoke_study(tmp_path):
    """As users type it: five trainings by `deepspeed`, frequencies, embeddings, tables, figures, the page."""
    done = subprocess.run(
        ["make", "study-smoke", f"STUDY_RUNS={tmp_path}"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout, done.stderr, _logs(tmp_path))
    folder = tmp_path / "smoke" / "results" / "smoke"
    rows = results.read_table(folder, results.RUNS)
    planned = load(ROOT / "studies" / "smoke.yaml").runs()
    assert [_identity(row) for row in rows] == [(run.kind, run.arm, run.size) for run in planned]
    deciles = results.read_table(folder, results.FREQUENCY)
    for row in rows:
        assert row["tokens"] == 20_480
        assert row["commit"]
        of_run = [each for each in deciles if _identity(each) == _identity(row)]
        assert [each["decile"] for each in of_run] == list(range(1, 11))
        nats = sum(each["share"] * each["loss"] for each in of_run if each["share"])
        assert nats == pytest.approx(row["val_loss"], abs=0.02), _identity(row)
    for each in results.read_embeddings(folder):
        audit = Audit(tmp_path / "smoke" / "iso_body" / f"{each['arm']}-{each['size']}-s{each['seed']}")
        ids = set()
        for piece in (piece for step in range(1, 21) for piece in audit.pieces(step)):
            ids.update(IndexedReader(audit.prefixes[0])[piece.document][piece.start : piece.stop].tolist())
        assert len(ids) - 160 <= each["ids_seen"] <= len(ids), "each sample's last token is a label only"
        assert 1 < each["effective_rank"] <= 64
        if each["arm"] == "leviathan":
            assert sum(each["generator"]["knot_usage"]) == pytest.approx(1, abs=1e-2)
    page = (tmp_path / "smoke" / "results.md").read_text()
    assert f"| {AGAINST_TIED} | 6.7% to 18.1% (v1) | d32 " in page
    for figure in set(re.findall(r"\]\((.*?\.png)\)", page)):
        assert (tmp_path / "smoke" / figure).is_file(), figure


def _identity(row: results.Row) -> tuple:
    return row["kind"], row["arm"], row["size"]


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in folder.rglob("*.log"))


@pytest.mark.parametrize(
    "data, prefixes, split",
    [
        ({"prefixes": ["a", "b"]}, ("a", "b"), "validation"),
        ({"blend": "mix.yaml"}, ("mix.yaml",), "validation"),
        ({"prefixes": ["a"], "validation_prefixes": ["v"]}, ("v",), "all"),
    ],
)
def test_a_run_is_evaluated_on_the_samples_of_its_validation(tmp_path, data, prefixes, split):
    recipe = recipes.from_values({"data": data, "run": {"eval_samples": 7}}, "x")
    trained = SimpleNamespace(recipe=recipe, checkpoint=tmp_path)
    options = measure.validation_of(trained, tmp_path / "e.json")  # pyright: ignore[reportArgumentType]
    assert (tuple(options.data), options.split, options.samples) == (prefixes, split, 7)


@pytest.mark.parametrize("there", [EVALUATION, MEASURES])
def test_only_what_is_missing_is_measured(tmp_path, monkeypatch, there):
    """MEASURES last: a run that is measured to half is not taken for whole."""
    done = []
    trained = SimpleNamespace(recipe=recipes.from_values({"data": {"prefixes": ["a"]}}, "x"), checkpoint=tmp_path)
    monkeypatch.setattr(measure, "find_trained_model", lambda run_dir: trained)
    evaluation = SimpleNamespace(run=lambda: done.append(EVALUATION), publish=lambda result: None)
    monkeypatch.setattr(measure, "Evaluation", SimpleNamespace(prepare=lambda options: evaluation))
    monkeypatch.setattr(measure, "embeddings", lambda trained: done.append(MEASURES))
    monkeypatch.setattr(measure, "topology", SimpleNamespace(initialize=lambda size: None, shutdown=lambda: None))
    (tmp_path / there).write_text("{}")
    assert not runner.measured(tmp_path)
    measure.write(tmp_path)
    assert done == [each for each in (EVALUATION, MEASURES) if each != there]


# ---- measures of embeddings ----


def test_effective_rank_counts_equal_directions():
    assert measure.effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])) == pytest.approx(3)
    assert measure.effective_rank(torch.tensor([1.0, 0.0])) == pytest.approx(1)


def test_continuity_of_a_line_grows_with_the_distance():
    """Where an embedding is its id, two ids δ·b^j apart are that far apart; random ones a third of all ids."""
    table = torch.arange(1000, dtype=torch.float64)[:, None]
    found = measure.continuity(table, 10, 3)
    for row, step in zip(found, (100, 10, 1), strict=True):
        expected = torch.arange(1, 10) * step / (1000 / 3)
        assert torch.allclose(row, expected.double(), rtol=0.05)


def test_ids_are_sampled_evenly_in_the_logarithm_of_their_rank():
    counts = torch.tensor([0, 5, 100, 1, 0, 20])
    assert measure.by_rank(counts).tolist() == [2, 5, 1, 3]


# ---- Theorem 1.1, and what the basis must be ----


@pytest.mark.parametrize("name", theorem.FUNCTIONS)
def test_the_error_falls_with_modes_and_knots(name):
    dimensions, function = theorem.FUNCTIONS[name]
    coarse, fine = (theorem.errors(dimensions, function, knots, (1, 2, 8)) for knots in (6, 24))
    assert fine[0] > 1.5 * fine[1] >= 1.5 * fine[2] * 0.99
    assert fine[0] > 10 * fine[2]
    assert coarse[2] > 2 * fine[2]
    assert fine[2] < 0.07


def test_the_theorems_table_and_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(theorem, "FUNCTIONS", {"sin": theorem.FUNCTIONS["sin 2π(x + y)"]})
    assert launcher.main(["theorem", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("| sin |") == 4
    assert (tmp_path / "theorem" / "theorem.svg").is_file()
