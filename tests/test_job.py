"""Every mistake through launchers/pretrain.py: one clear line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.errors import UserError
from data_prep.files import bin_path, idx_path
from data_prep.manifest import load_manifest
from launchers import pretrain
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.data import index
from leviathan_ds.training import job, loop

ROOT = Path(__file__).parents[1]
REAL_RUN = loop.run
ZERO1 = ROOT / "ds_configs" / "zero1.json"
TINY = """
model:
  {{hidden_size: 32, num_layers: 1, num_attention_heads: 2, generator: {{seed_size: 8, num_heads: 2, rank: 4}}}}
data: {{prefixes: ["{prefix}"], sequence_length: 32, validation_fraction: 0.2, num_workers: 0}}
training: {{train_steps: 4, warmup_steps: 1, micro_batch_size: 2, global_batch_size: 4, precision: fp32}}
run: {{eval_samples: 2}}
"""


class Case:
    """A correct start of a job, to be spoilt, and what pretrain.py makes of it."""

    def __init__(self, folder: Path, prefix: Path) -> None:
        self.folder, self.prefix = folder, prefix
        self.recipe, self.ds_config, self.run_dir = folder / "tiny.yaml", folder / "ds.json", folder / "run"
        self.recipe.write_text(TINY.format(prefix=prefix))
        shutil.copyfile(ZERO1, self.ds_config)
        self.options: list[str] = []
        self.started: list[job.Job] = []

    @property
    def arguments(self) -> list[str]:
        named = ["--ds_config", self.ds_config, "--config", self.recipe, "--run_dir", self.run_dir]
        return [*map(str, named), *self.options]

    def files(self) -> set[Path]:
        return {path for path in self.folder.rglob("*") if ".index_cache" not in str(path)}


@pytest.fixture
def case(tmp_path: Path, corpus_copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Case:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    made = Case(tmp_path, corpus_copy("data"))
    monkeypatch.setattr(loop, "run", made.started.append)
    return made


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def start_with(case: Case, *options: str) -> None:
    """Leave a run directory behind, as another start would have."""
    checked = job.prepare(
        recipes.parse(recipes.build_parser(""), ["--config", str(case.recipe), *options])[0],
        ZERO1,
        case.run_dir,
        1,
    )
    job.write_run_dir(checked)


# Each: how to spoil the case, the number of ranks, words of the one line.
MISTAKES: dict[str, tuple[Callable[[Case], Any], int, list[str]]] = {
    "no ds_config": (lambda c: c.ds_config.unlink(), 1, ["ds.json", "No such file"]),
    "trailing comma": (lambda c: c.ds_config.write_text('{\n"bf16": {},\n}'), 1, ["ds.json", "not JSON", "line"]),
    "unknown key": (lambda c: c.ds_config.write_text('{"bf61": 1}'), 1, ["ds.json", "bf61", "bf16?"]),
    "unknown zero key": (
        lambda c: c.ds_config.write_text('{"zero_optimization": {"stge": 1}}'),
        1,
        ["ds.json", "zero_optimization.stge", "stage?"],
    ),
    "contradiction": (
        lambda c: c.ds_config.write_text('{"gradient_clipping": 3}'),
        1,
        ["gradient_clipping = 3", "training.clip_grad = 1.0"],
    ),
    "no recipe": (lambda c: c.recipe.unlink(), 1, ["tiny.yaml", "No such file"]),
    "recipe's unknown key": (lambda c: c.recipe.write_text("run: {evl_samples: 1}"), 1, ["run.eval_samples?"]),
    "recipe's wrong type": (lambda c: c.recipe.write_text("training: {lr: x}"), 1, ["tiny.yaml", "training.lr"]),
    "recipe's bad YAML": (lambda c: c.recipe.write_text("training: {lr: 1"), 1, ["tiny.yaml", "line 1"]),
    "unknown option": (lambda c: c.options.append("--training.lrr=1"), 1, ["--training.lr?"]),
    "abbreviated option": (lambda c: c.options.append("--training.train_step=1"), 1, ["--training.train_steps?"]),
    "bad value": (lambda c: c.options.append("--training.lr=-1"), 1, ["training.lr must be positive"]),
    "batch arithmetic": (
        lambda c: c.options.append("--training.global_batch_size=7"),
        2,
        ["global_batch_size = 7", "2 × 2", "4, 8, 12"],
    ),
    "TP and heads": (
        lambda c: c.options.append("--parallel.tensor_model_parallel_size=4"),
        4,
        ["tensor_model_parallel_size = 4", "num_attention_heads = 2"],
    ),
    "TP and ranks": (
        lambda c: c.options.append("--parallel.tensor_model_parallel_size=2"),
        3,
        ["tensor_model_parallel_size = 2", "ranks, 3"],
    ),
    "no prefixes": (lambda c: c.options.append("--data.prefixes=[]"), 1, ["data.prefixes is empty"]),
    "no blend file": (
        lambda c: c.options.extend(["--data.prefixes=[]", "--data.blend=no.yaml"]),
        1,
        ["no.yaml", "No such file", "--split_by"],
    ),
    "no validation dataset": (
        lambda c: c.options.append("--data.validation_prefixes=[absent]"),
        1,
        ["data.validation_prefixes", "absent.idx"],
    ),
    "traced step beyond the end": (
        lambda c: c.options.append("--run.profile_steps=[5]"),
        1,
        ["run.profile_steps names step 5", "training.train_steps = 4"],
    ),
    "no dataset": (lambda c: bin_path(c.prefix).unlink(), 1, ["data.prefixes", "tiny.bin", "no such file"]),
    "truncated bin": (lambda c: truncate(bin_path(c.prefix)), 1, ["tiny.bin: has"]),
    "truncated idx": (lambda c: truncate(idx_path(c.prefix)), 1, ["tiny.idx: has"]),
    "other tokenizer": (
        lambda c: c.options.append("--data.tokenizer_fingerprint=0123456789abcdef"),
        1,
        ["data.tokenizer_fingerprint is 0123456789ab", "tiny"],
    ),
    "small vocabulary": (
        lambda c: c.options.append("--model.vocab_size=500"),
        1,
        ["model.vocab_size = 500", "600"],
    ),
    "empty split": (lambda c: c.options.append("--data.validation_fraction=1e-9"), 1, ["validation_fraction"]),
    "foreign folder": (
        lambda c: [c.run_dir.mkdir(), (c.run_dir / "notes.txt").write_text("mine")],
        1,
        ["run exists and is not a run"],
    ),
    "run_dir under a file": (
        lambda c: [c.run_dir.write_text("mine"), setattr(c, "run_dir", c.run_dir / "sub" / "run")],
        1,
        ["run is no directory"],
    ),
    "data seed": (lambda c: c.options.append("--data.seed=-1"), 1, ["data.seed must lie"]),
    "empty config": (lambda c: c.options.append("--config="), 1, ["--config is empty"]),
    "more steps than memory": (
        lambda c: c.options.append("--training.train_steps=99999999999"),
        1,
        ["training.train_steps", "399,999,999,996 samples", "memory"],
    ),
    "run_dir is a file": (lambda c: c.run_dir.write_text("mine"), 1, ["run exists and is not a run"]),
    "other recipe": (
        lambda c: start_with(c, "--training.weight_decay=0.125"),
        1,
        ["another recipe", "training.weight_decay 0.125 there and 0.1 now"],
    ),
    "other shape": (
        lambda c: start_with(c, "--model.generator.rank=5"),
        1,
        ["another recipe", "model.generator.rank 5 there and 4 now"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_and_nothing_is_written(
    name: str, case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, world_size, words = MISTAKES[name]
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    spoil(case)
    before = case.files()
    capsys.readouterr()
    with pytest.raises(UserError) as raised:
        pretrain.main(case.arguments)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert case.files() == before
    assert not case.started
    with pytest.raises(SystemExit) as exited:
        pretrain.exit_with(raised.value)
    assert exited.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_correct_case_starts(case: Case) -> None:
    before = case.files()
    pretrain.main(case.arguments)
    (checked,) = case.started
    assert checked.recipe.model.vocab_size == 600
    assert (checked.num_passes, checked.resume_from, checked.finished) == (2, None, False)
    assert len(checked.train_dataset) >= 16
    assert case.files() - before == {case.run_dir, case.run_dir / run_directory.LOCK}


def test_mistakes_come_before_the_demo_is_prepared(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []

    def prepare_demo() -> None:
        prepared.append("demo")
        raise InterruptedError

    monkeypatch.setattr(pretrain, "prepare_demo", prepare_demo)
    with pytest.raises(UserError, match="No such file"):
        pretrain.main(["--ds_config", "missing.json"])
    assert prepared == []
    with pytest.raises(InterruptedError):
        pretrain.main(["--ds_config", str(ZERO1)])
    assert prepared == ["demo"]


# ---- run directory ----


LAYOUT = {
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "zero_stage": 1,
    "sub_group_size": None,
    "offload_optimizer": False,
    "scattered_by": None,
    "precision": "fp32",
}


def complete_checkpoint(case: Case, step: int, fingerprints: list[str], **layout: object) -> Path:
    folder = case.run_dir / run_directory.CHECKPOINTS / run_directory.checkpoint_name(step)
    folder.mkdir(parents=True)
    state = {"step": step, "consumed_samples": 4 * step, "layout": LAYOUT | layout, "wandb_id": None}
    (folder / run_directory.TRAINER_STATE).write_text(json.dumps(state | {"data_fingerprints": fingerprints}))
    size = (folder / run_directory.TRAINER_STATE).stat().st_size
    (folder / run_directory.MANIFEST).write_text(json.dumps({"bytes": {run_directory.TRAINER_STATE: size}}))
    return folder


def test_harmless_differences_resume(case: Case) -> None:
    start_with(
        case,
        "--run.log_interval=3",
        "--data.num_workers=1",
        "--training.recompute=full",
        "--training.compile=true",
    )
    pretrain.main(case.arguments)
    assert len(case.started) == 1


def test_compiling_without_a_compiler_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leviathan_ds.training.job.shutil.which", lambda _: None)
    compiling = ["--config", str(case.recipe), "--training.compile=true"]
    with pytest.raises(UserError, match=r"training\.compile needs a C\+\+ compiler"):
        job.check_configuration(recipes.parse(recipes.build_parser(""), compiling)[0], ZERO1, 1)


def test_changed_data_is_refused_at_a_resume(case: Case) -> None:
    start_with(case)
    pretrain.main(case.arguments)
    (checked,) = case.started
    folder = complete_checkpoint(case, 2, checked.data.fingerprints)
    pretrain.main(case.arguments)
    assert case.started[1].resume_from == folder
    shutil.rmtree(folder)
    complete_checkpoint(case, 2, ["another"])
    with pytest.raises(UserError, match=r"step_00000002 was trained on other data"):
        pretrain.main(case.arguments)


def test_tokenizer_is_that_of_the_data_until_there_is_a_checkpoint(case: Case) -> None:
    """A run killed before its first checkpoint may start again on other data; its tokenizer must follow."""
    start_with(case)
    kept = case.run_dir / run_directory.TOKENIZERS["sentencepiece"]
    right = kept.read_bytes()
    kept.rename(case.run_dir / "tokenizer.json")  # it may have been of another kind
    (case.run_dir / "tokenizer.json").write_bytes(b"of the data before")
    pretrain.main(case.arguments)
    job.write_run_dir(case.started[0])
    assert kept.read_bytes() == right and run_directory.tokenizer_of(case.run_dir) == kept
    assert not (case.run_dir / "tokenizer.json").exists()
    complete_checkpoint(case, 2, case.started[0].data.fingerprints)
    kept.write_bytes(b"of the checkpoint")
    pretrain.main(case.arguments)
    job.write_run_dir(case.started[1])
    assert kept.read_bytes() == b"of the checkpoint"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_model_parallel_size", 2),
        ("data_parallel_size", 4),
        ("zero_stage", 3),
        ("offload_optimizer", True),
        ("sub_group_size", 1000),
    ],
)
def test_another_layout_is_taken_over_at_a_resume(case: Case, key: str, value: object) -> None:
    start_with(case)
    pretrain.main(case.arguments)
    (checked,) = case.started
    folder = complete_checkpoint(case, 2, checked.data.fingerprints)
    pretrain.main(case.arguments)
    assert case.started[1].resume_from == folder and case.started[1].resumes_same_layout
    shutil.rmtree(folder)
    complete_checkpoint(case, 2, checked.data.fingerprints, **{key: value})
    pretrain.main(case.arguments)
    assert case.started[2].resume_from == folder and not case.started[2].resumes_same_layout


def test_a_change_of_layout_may_change_the_batch_of_a_rank(case: Case) -> None:
    """Tensor parallelism and the micro-batch are the layout's; the global batch is the run's."""
    start_with(case, "--training.micro_batch_size=4", "--parallel.tensor_model_parallel_size=1")
    pretrain.main([*case.arguments, "--training.micro_batch_size=1"])
    (checked,) = case.started
    assert checked.num_passes == 4
    with pytest.raises(UserError, match=r"another recipe: training.global_batch_size 4 there and 8 now"):
        pretrain.main([*case.arguments, "--training.global_batch_size=8"])


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"round_robin_gradients": True}, "round_robin_gradients"),
        ({"parameter_alignment": True}, "parameter_alignment"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, "offload_optimizer.device"),
    ],
)
def test_a_layout_that_cannot_be_taken_over_is_refused(case: Case, section: dict, key: str) -> None:
    """Before any process group exists; on the same layout DeepSpeed loads its own files."""
    start_with(case)
    pretrain.main(case.arguments)
    fingerprints = case.started[0].data.fingerprints
    folder = complete_checkpoint(case, 2, fingerprints, zero_stage=2, scattered_by=key)
    with pytest.raises(UserError, match=rf"zero_stage 2 \(now 1\).*under zero_optimization.{key} DeepSpeed"):
        pretrain.main(case.arguments)
    shutil.rmtree(folder)
    complete_checkpoint(case, 2, fingerprints)
    values = json.loads(case.ds_config.read_text())
    case.ds_config.write_text(json.dumps(values | {"zero_optimization": {"stage": 2, **section}}))
    with pytest.raises(UserError, match=rf"zero_stage 1 \(now 2\).*under zero_optimization.{key} DeepSpeed"):
        pretrain.main(case.arguments)


def test_finished_run_says_so_and_does_nothing(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    start_with(case)
    pretrain.main(case.arguments)
    (checked,) = case.started
    complete_checkpoint(case, 4, checked.data.fingerprints)
    pretrain.main(case.arguments)
    assert case.started[1].finished
    capsys.readouterr()
    REAL_RUN(case.started[1])
    assert capsys.readouterr().out == f"{case.run_dir} is done: all 4 steps were trained, nothing to do\n"


@pytest.mark.parametrize("writes", range(4))
def test_start_killed_while_it_describes_the_run_can_start_again(
    case: Case, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    pretrain.main(case.arguments)
    (checked,) = case.started
    real, left = Path.replace, [writes]

    def replace_until_killed(self: Path, target: Path) -> Path:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_until_killed)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a kill runs no clean-up
        if writes < 3:
            with pytest.raises(KeyboardInterrupt):
                job.write_run_dir(checked)
        else:
            job.write_run_dir(checked)
    pretrain.main(case.arguments)
    job.write_run_dir(case.started[1])
    assert recipes.load(case.run_dir / run_directory.RECIPE) == checked.recipe
    assert (case.run_dir / run_directory.TOKENIZERS["sentencepiece"]).is_file()
    assert json.loads((case.run_dir / run_directory.DS_CONFIG).read_text()) == checked.ds_config


def test_a_checkpoint_that_does_not_suit_is_refused_when_it_is_chosen(case: Case) -> None:
    """Another job may have saved it after `prepare` had looked, or a newer one may be damaged."""
    start_with(case)
    pretrain.main(case.arguments)
    (checked,) = case.started
    folder = complete_checkpoint(case, 2, checked.data.fingerprints)
    found = job.going_on_from(checked, folder, ("a reason",))
    assert (found.resume_from, found.first_step, found.passed_over) == (folder, 2, ("a reason",))
    shutil.rmtree(folder)
    complete_checkpoint(case, 2, ["another"])
    with pytest.raises(UserError, match=r"step_00000002 was trained on other data"):
        job.going_on_from(checked, folder, ())


def test_learning_rates_may_change_at_a_resume_and_are_told(case: Case) -> None:
    start_with(case, "--training.lr=0.125", "--training.min_lr=0.0")
    pretrain.main(case.arguments)
    (checked,) = case.started
    assert checked.changes == ("training.lr was 0.125 and is 0.001", "training.min_lr was 0.0 and is 0.0001")
    job.write_run_dir(checked)
    written = case.run_dir / run_directory.RECIPE
    notes = [f"# {change} from step 0" for change in checked.changes]
    assert written.read_text().splitlines()[:2] == notes
    assert recipes.load(written) == checked.recipe
    pretrain.main(case.arguments)
    assert case.started[1].changes == ()


def test_a_run_of_another_recipe_that_began_meanwhile_is_not_taken_over(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = job.prepare

    def prepare_slowly(*arguments: Any) -> job.Job:
        checked = prepare(*arguments)
        monkeypatch.setattr(job, "prepare", prepare)
        start_with(case, "--training.weight_decay=0.125")
        return checked

    monkeypatch.setattr(job, "prepare", prepare_slowly)
    with pytest.raises(UserError, match=r"started with another recipe: training.weight_decay 0.125 there"):
        pretrain.main(case.arguments)
    assert case.started == []


def test_a_lock_and_an_index_cache_that_find_no_room_are_one_line(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case.run_dir / run_directory.LOCK).mkdir(parents=True)  # in the way
    with pytest.raises(
        UserError, match=r"run/lock cannot be written \(Is a directory\); choose another --run_dir"
    ):
        pretrain.main(case.arguments)

    shutil.rmtree(case.prefix.with_name("tiny.index_cache"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "_build_aside", full)
    with pytest.raises(UserError, match=r"tiny.index_cache cannot be written or read: .*No space left"):
        pretrain.main(case.arguments)


def test_a_broken_summary_is_written_anew(tmp_path: Path) -> None:
    for content in ("{", "3", ""):
        (tmp_path / run_directory.SUMMARY).write_text(content)
        assert run_directory.update_summary(tmp_path, steps=3) == {"steps": 3}


def test_a_second_start_in_the_same_run_dir_is_refused(case: Case) -> None:
    """Two would delete each other's checkpoints and metrics."""
    hold = (
        "import sys, time; from pathlib import Path; from leviathan_ds.parallel.launch import claimed\n"
        "with claimed(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    lock = str(case.run_dir / run_directory.LOCK)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", hold, lock]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process is training in"):
            pretrain.main(case.arguments)
        assert case.started == []
        first.kill()
    pretrain.main(case.arguments)
    assert len(case.started) == 1


def test_written_recipe_holds_the_run_to_vocabulary_and_tokenizer(case: Case) -> None:
    start_with(case)
    written = recipes.load(case.run_dir / run_directory.RECIPE)
    given = recipes.load(case.recipe)
    fingerprint = load_manifest(case.prefix).tokenizer.fingerprint
    data = replace(given.data, tokenizer_fingerprint=fingerprint)
    assert written == replace(given, model=replace(given.model, vocab_size=600), data=data)


# ---- through the real launcher ----


def deepspeed(case: Case, *launcher_options: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WORLD_")}
    command = [Path(sys.executable).parent / "deepspeed", *launcher_options, ROOT / "launchers" / "pretrain.py"]
    return subprocess.run(
        [*map(str, command), *case.arguments],
        cwd=case.folder,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_two_ranks_say_it_once_and_the_launcher_fails(case: Case) -> None:
    case.options.append("--training.global_batch_size=7")
    result = deepspeed(case, "--num_gpus", "2", "--master_port", "29731")
    assert result.returncode == 2
    errors = re.findall(r"^error: .*$", result.stdout + result.stderr, re.MULTILINE)
    assert len(errors) == 1
    assert "global batch sizes that would do, for a new run: 4, 8, 12" in errors[0]
    assert "Traceback" not in result.stderr
    assert not case.run_dir.exists()


def test_missing_hostfile_under_the_launcher(case: Case) -> None:
    result = deepspeed(case, "--hostfile", "nowhere", "--num_gpus", "1", "--master_port", "29732")
    assert result.returncode == 2
    assert f"error: --hostfile {case.folder / 'nowhere'} does not exist" in result.stderr
    assert not case.run_dir.exists()
