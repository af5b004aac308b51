"""Recipes from YAML and the command line: what wins, and what is refused with which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from data_prep.errors import UserError
from leviathan_ds import config
from leviathan_ds import recipe as recipes
from leviathan_ds.config import Recipe

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def parse(*arguments: str) -> Recipe:
    return recipes.parse(recipes.build_parser("test"), list(arguments))[0]


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "bad.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("trainning:\n  lr: 1.0\n", ["unknown key trainning", "did you mean training?"]),
        ("training:\n  lrr: 1.0\n", ["unknown key training.lrr", "did you mean training.lr?"]),
        ("model:\n  hiden_size: 4\n", ["unknown key model.hiden_size", "did you mean model.hidden_size?"]),
        ("model:\n  generator:\n    rnk: 4\n", ["model.generator.rnk", "did you mean model.generator.rank?"]),
        ("run:\n  zzzzqq: 4\n", ["unknown key run.zzzzqq", "known: log_interval"]),
        ("model:\n  hidden_size: wide\n", ["model.hidden_size", "int", "wide"]),
        ("model:\n  hidden_size: 5.5\n", ["model.hidden_size", "int", "5.5"]),
        ("training:\n  train_steps: true\n", ["training.train_steps", "int", "True"]),
        ("training:\n  precision: fp16\n", ["training.precision", "fp32", "bf16", "fp16"]),
        ("model:\n  embedding: dense\n", ["model.embedding", "dense_tied", "dense_untied"]),
        ("data:\n  prefixes: one\n", ["data.prefixes", "one"]),
        ("run:\n  wandb: on\n", ["run.wandb", "'off'", "'offline'", "'online'"]),
        ("model: 3\n", ["model must be a section"]),
        ("model:\n", ["model must be a section"]),
        ("", ["expected sections"]),
        ("- model\n", ["expected sections"]),
        ("training:\n  lr: [1\n", ["not YAML", "line 3"]),
        ("training:\n\tlr: 1\n", ["not YAML", "line 2, column 1"]),
        ("training:\n  lr: 1.0\n  lr: 2.0\n", ["'lr' stands twice", "line 3"]),
        ("run: {}\nrun: {}\n", ["'run' stands twice", "line 2"]),
        ("? {a: b}\n: c\n", ["not YAML", "unhashable key"]),
        (b"\xff\xfe\xfd", ["not YAML", "decode"]),
    ],
)
def test_mistake_in_a_file_is_one_line_with_file_and_key(
    file: Any, content: str | bytes, words: list[str]
) -> None:
    path = file(content)
    with pytest.raises(UserError) as raised:
        recipes.load(path)
    message = str(raised.value)
    assert message.startswith(f"recipe {path}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.yaml: No such file"):
        recipes.load(tmp_path / "nothing.yaml")
    with pytest.raises(UserError, match="Is a directory"):
        recipes.load(tmp_path)


@pytest.mark.parametrize("mode", ["off", '"off"', "offline", "online"])
def test_wandb_mode_reads_as_it_is_written(file: Any, mode: str) -> None:
    # YAML 1.1 takes a bare `off` for false.
    assert recipes.load(file(f"run:\n  wandb: {mode}\n")).run.wandb == mode.strip('"')


def test_numbers_in_exponent_notation_without_a_point(file: Any) -> None:
    # YAML 1.1 takes 1e-3 for a string.
    assert recipes.load(file("training:\n  lr: 3e-3\n  min_lr: 1e-5\n")).training.lr == 3e-3


def test_command_line_wins_over_the_file_and_the_file_over_defaults(file: Any) -> None:
    path = file("training:\n  lr: 0.5\n  train_steps: 7\n  warmup_steps: 1\nmodel:\n  generator:\n    rank: 3\n")
    for arguments in (
        ["--config", str(path), "--training.lr", "0.25", "--model.generator.num_heads", "5"],
        ["--training.lr=0.25", f"--config={path}", "--model.generator.num_heads=5"],
    ):
        recipe = parse(*arguments)
        assert (recipe.training.lr, recipe.training.train_steps) == (0.25, 7)
        assert (recipe.model.generator.rank, recipe.model.generator.num_heads) == (3, 5)
        assert recipe.training.micro_batch_size == Recipe().training.micro_batch_size


def test_default_config_gives_way_to_another_file(file: Any, tmp_path: Path) -> None:
    default = tmp_path / "default.yaml"
    default.write_text("training:\n  train_steps: 200\n  lr: 0.5\n")
    parser = recipes.build_parser("test")
    assert recipes.parse(parser, [], default)[0].training.train_steps == 200
    other = ["--config", str(file("training:\n  lr: 0.25\n"))]
    training = recipes.parse(recipes.build_parser("test"), other, default)[0].training
    assert (training.lr, training.train_steps) == (0.25, Recipe().training.train_steps)


def test_last_config_counts_for_values_and_for_its_name(file: Any, tmp_path: Path) -> None:
    first = tmp_path / "first.yaml"
    first.write_text("training:\n  lr: 0.5\n")
    second = str(file("training:\n  lr: 0.25\n"))
    arguments = ["--config", str(first), "--config", second]
    recipe, options = recipes.parse(recipes.build_parser("test"), arguments)
    assert (recipe.training.lr, options.config) == (0.25, second)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model.vocab_siz", "1000"],
        ["--training.lrr=1"],
        ["--training.train_step", "4"],
        ["--training.warmup", "4"],
    ],
)
def test_unknown_or_abbreviated_option_is_refused_with_the_nearest(arguments: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        parse(*arguments)
    name = arguments[0].split("=")[0]
    nearest = {
        "--model.vocab_siz": "--model.vocab_size",
        "--training.lrr": "--training.lr",
        "--training.train_step": "--training.train_steps",
        "--training.warmup": "--training.warmup_steps",
    }[name]
    assert name in str(raised.value)
    assert f"did you mean {nearest}?" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--conf", "x.yaml"], ["--conf"]),
        (["--config"], ["--config", "expected one argument"]),
        (["stray"], ["stray"]),
        (["--training.lr", "fast"], ["training.lr", "a number", "fast"]),
        (["--training.train_steps", "0"], ["training.train_steps must be at least 1"]),
        (["--model.generator.num_knots", "2"], ["model.generator.num_knots must be at least 3"]),
        (["--model.vocab_size", "1.5"], ["model.vocab_size", "int", "1.5"]),
    ],
)
def test_mistake_on_the_command_line_is_one_line(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        parse(*arguments)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_survives_the_round_trip(path: Path, file: Any) -> None:
    recipe = recipes.load(path)
    assert recipes.load(file(recipes.to_yaml(recipe))) == recipe


def test_round_trip_of_values_that_are_not_defaults(file: Any) -> None:
    recipe = dataclasses.replace(
        Recipe(),
        model=config.ModelConfig(1000, "dense_tied", 64, 2, 4, 2, 128, 32),
        data=config.DataConfig(("a b", "c: d"), (0.25, 1e-7), tokenizer_fingerprint="0123"),
        run=config.RunConfig(wandb="online"),
    )
    again = recipes.load(file(recipes.to_yaml(recipe)))
    assert again == recipe
    assert recipes.differences(again, recipe) == {}


def test_text_that_looks_like_a_number_stays_text(file: Any) -> None:
    """A fingerprint may be digits about an e, which our YAML reads as a number where it is not quoted."""
    recipe = dataclasses.replace(Recipe(), data=config.DataConfig(("1e3",), tokenizer_fingerprint="12e34"))
    assert recipes.load(file(recipes.to_yaml(recipe))) == recipe


def test_differences_are_flat_keys_with_both_values() -> None:
    one = Recipe()
    generator = dataclasses.replace(one.model.generator, rank=7)
    other = dataclasses.replace(one, model=dataclasses.replace(one.model, generator=generator))
    assert recipes.differences(one, other) == {"model.generator.rank": (64, 7)}


def test_help_mentions_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse("--help")
    assert exited.value.code == 0
    text = capsys.readouterr().out

    def names(section: Any, prefix: str) -> list[str]:
        found = []
        for field in dataclasses.fields(section):
            value, name = getattr(section, field.name), f"{prefix}{field.name}"
            found += names(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
        return found

    known = names(Recipe(), "--")
    assert len(known) > 50
    assert [name for name in known if f"{name} " not in text] == []
