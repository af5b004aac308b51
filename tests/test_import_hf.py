"""From Hugging Face into a run: bitwise, at any tensor-parallel degree; what cannot come is named; it trains."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from distributed_cases import Case
from exports import GENERATOR, MODEL, SHAPES, VOCAB_SIZE, make_run
from run_cases import whole_run
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep.tokenizers import load_tokenizer
from launchers import import_hf
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import GeneratorConfig, ModelConfig, Recipe
from leviathan_ds.export import from_hugging_face
from leviathan_ds.export.fit import FitOptions, fit_generator
from leviathan_ds.export.from_hugging_face import Imported, open_source, plan_recipe, write_run
from leviathan_ds.export.publish import export
from leviathan_ds.model.generator import SplineGenerator
from leviathan_ds.model.weights import full_weights
from leviathan_ds.parallel import registry, topology
from leviathan_ds.trained_model import find_trained_model
from leviathan_ds.training.job import check_run_dir

pytestmark = pytest.mark.usefixtures("one_rank", "little_text")


def import_model(source: Path, output: Path, **options) -> Imported:
    opened = open_source(source, None)
    return write_run(opened, plan_recipe(opened, None, None, **options), output)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Every parameter of a run's last checkpoint, without the vocabulary's padding."""
    found = dict(full_weights(find_trained_model(run).checkpoint))
    return {name: w[:VOCAB_SIZE] if registry.rule_for(name).is_vocabulary else w for name, w in found.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in SHAPES]
    + [
        pytest.param(name, torch.bfloat16, marks=() if name in ("leviathan", "dense tied") else pytest.mark.slow)
        for name in SHAPES
    ],
)
def test_an_export_of_its_own_kind_comes_back_bitwise(name: str, dtype, tmp_path: Path, sample_tokenizer: Path):
    """Leviathan by --format leviathan, dense by --format llama; from TP 2 to TP 1 and from TP 1 to TP 2."""
    model = SHAPES[name]
    before, after = (
        (2, 1) if dtype == torch.float32 and model.query_groups > 1 else (1, min(2, model.query_groups))
    )
    run = make_run(tmp_path / "run", sample_tokenizer, model, tensor_parallel_size=before, dtype=dtype)
    form = "leviathan" if model.embedding == "leviathan" else "llama"
    export(find_trained_model(run), tmp_path / "hf", form=form)
    imported = import_model(tmp_path / "hf", tmp_path / "back", tensor_parallel_size=after)
    assert_same(weights(tmp_path / "back"), weights(run))
    back = find_trained_model(tmp_path / "back")
    query_groups = dataclasses.replace(model, num_query_groups=model.query_groups, kv_channels=model.head_size)
    assert imported.recipe.model == back.recipe.model
    assert back.recipe.model == dataclasses.replace(query_groups, generator=back.recipe.model.generator)
    assert model.embedding != "leviathan" or back.recipe.model.generator == model.generator
    assert len(list(back.checkpoint.glob("weights_tp*"))) == after
    assert back.tokenizer.fingerprint == find_trained_model(run).tokenizer.fingerprint
    assert run_directory.damage(back.checkpoint) is None
    if dtype == torch.float32:
        return
    # And out again: the same files.
    export(back, tmp_path / "again", form=form)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes(), file


def test_a_plain_export_of_leviathan_becomes_a_dense_run(tmp_path: Path, sample_tokenizer: Path) -> None:
    run = make_run(tmp_path / "run", sample_tokenizer)
    export(find_trained_model(run), tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "back", embedding="dense")
    found, expected = weights(tmp_path / "back"), weights(run)
    generator = SplineGenerator(VOCAB_SIZE, MODEL.hidden_size, GENERATOR)
    prefix = "embedding.generator."
    names = [name for name in expected if name.startswith(prefix)]
    generator.load_state_dict({name.removeprefix(prefix): expected.pop(name) for name in names})
    assert_same(found, expected | {"embedding.word_embeddings.weight": generator.table()})
    export(find_trained_model(tmp_path / "back"), tmp_path / "again")
    again, first = (load_file(tmp_path / folder / "model.safetensors") for folder in ("again", "hf"))
    assert_same(again, first)


@pytest.fixture
def foreign(tmp_path: Path, sample_tokenizer: Path) -> Path:
    """A Llama that transformers made and saved, in two shards, with a key of old versions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    folder = tmp_path / "foreign"
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="80KB")
    (folder / "tokenizer.model").write_bytes(sample_tokenizer.read_bytes())
    path = next(folder.glob("model-00001*"))
    content = load_file(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    path.chmod(0o644)
    save_file(content, path)
    return folder


def test_a_foreign_llama_computes_the_same(foreign: Path, tmp_path: Path) -> None:
    import_model(foreign, tmp_path / "run")
    trained = find_trained_model(tmp_path / "run")
    tokens = torch.arange(100).view(2, 50)
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(foreign)(tokens).logits
        assert (trained.build()(tokens) - expected).abs().max() < 1e-5
    assert trained.recipe.data.sequence_length == 48 and trained.recipe.training.precision == "fp32"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "checkpoints",
        "recipe.yaml",
        "tokenizer.model",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": None}, "rope_type linear"),
        ({"model_type": "mistral"}, "is a mistral; only llama and leviathan"),
        ({"model_type": "no such"}, "config.json: "),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\..* is None, config.json says"),
        ({"num_hidden_layers": 1}, r"holds model\.layers\.1\."),
        ({"intermediate_size": 64}, "config.json says"),
    ],
    ids=str,
)
def test_what_cannot_be_imported_is_named(change: dict, message: str, foreign: Path, tmp_path: Path) -> None:
    path = foreign / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        import_model(foreign, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_not_there_is_named(foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        assert import_hf.main(["--source", str(foreign), *arguments]) == 2
        return capsys.readouterr().err

    run = ["--output", str(tmp_path / "run")]
    assert "exists; choose another run directory" in error("--output", str(tmp_path))
    assert "No such file" in error(*run, "--config", "none.yaml") or "see recipes/" in error(*run, "--config", "x")
    assert "none.manifest.json: no such file" in error(*run, "--data", str(tmp_path / "none"))
    assert "tensor_model_parallel_size = 4 does not divide" in error(*run, "--tensor_parallel", "4")
    (foreign / "tokenizer.model").unlink()
    assert "pass --data with a dataset's prefix" in error(*run)
    for path in foreign.glob("model*"):
        path.unlink()
    assert "holds no model*.safetensors" in error(*run)
    assert "holds no config.json" in error("--source", str(tmp_path), *run)
    assert not (tmp_path / "run").exists()


def test_a_leviathan_does_not_become_dense_in_silence(tmp_path: Path, sample_tokenizer: Path) -> None:
    run = make_run(tmp_path / "run", sample_tokenizer)
    export(find_trained_model(run), tmp_path / "hf", form="leviathan")
    with pytest.raises(ValueError, match="write it by export_hf --format llama and import that"):
        import_model(tmp_path / "hf", tmp_path / "back", embedding="dense")


def test_the_tokenizer_comes_back(tmp_path: Path, sample_tokenizer: Path, corpus: Path) -> None:
    """Of a tokenizer.json with a chosen --eod_token: training would refuse the first run's datasets otherwise."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    bpe.decoder = tokenizers.decoders.ByteLevel()  # type: ignore
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["some text"],
        tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),  # type: ignore
    )
    bpe.add_special_tokens(["</s>", "<stop>"])
    bpe.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json", "<stop>")
    run = make_run(tmp_path / "run", sample_tokenizer)
    (run / "tokenizer.model").unlink()
    (run / "tokenizer.json").write_bytes(tokenizer.content)
    export(find_trained_model(run), tmp_path / "hf")
    imported = import_model(tmp_path / "hf", tmp_path / "back")
    assert imported.recipe.data.tokenizer_fingerprint == tokenizer.fingerprint
    assert find_trained_model(tmp_path / "back").tokenizer.eod_id == tokenizer.eod_id
    with pytest.raises(ValueError, match=r"encoded with another tokenizer than .*training_tokenizer\.json"):
        open_source(tmp_path / "hf", corpus)


# ---- a generator fitted to a table ----

SMALL = ModelConfig(
    vocab_size=300,
    hidden_size=16,
    num_attention_heads=2,
    generator=GeneratorConfig(num_coordinates=2, seed_size=16, num_heads=4, num_knots=8, rank=8),
)


def test_the_fit_and_its_error() -> None:
    """A table of a few dimensions is learned well, one of noise is not, and the figures say which."""
    draw = torch.Generator().manual_seed(0)
    smooth = torch.stack([torch.arange(300) // 18, torch.arange(300) % 18], -1) / 18
    easy = torch.cat([smooth, smooth.square(), smooth.sin()], -1) @ torch.randn(6, 16, generator=draw) * 0.02
    noise = 0.02 * torch.randn(300, 16, generator=draw)
    options = FitOptions(steps=400, batch_ids=128)
    fits = {name: fit_generator(table, SMALL, options) for name, table in {"easy": easy, "noise": noise}.items()}
    assert fits["easy"].error.relative < 0.1 and fits["easy"].error.cosine > 0.99
    assert fits["noise"].error.relative > 0.2
    first, again = (fit_generator(easy, SMALL, FitOptions(steps=10)).generator for _ in range(2))
    assert all(torch.equal(again[name], weight) for name, weight in first.items())

    generator = SplineGenerator(300, 16, SMALL.generator)
    generator.load_state_dict(fits["noise"].generator)
    found = generator.table()
    assert fits["noise"].error.relative == pytest.approx(((found - noise).norm() / noise.norm()).item(), rel=1e-4)
    counts = torch.arange(300).numpy()[:290]  # ids beyond the tokenizer's never occur
    deciles = fits["noise"].by_frequency(counts)
    most = torch.arange(289, 259, -1)
    expected = torch.cosine_similarity(found[most], noise[most]).mean().item()
    assert len(deciles) == 10 and deciles[0].cosine == pytest.approx(expected, abs=1e-5)
    least = torch.tensor([*range(19, -1, -1), *range(290, 300)])
    missed = (found[least] - noise[least]).norm() / noise[least].norm()
    assert deciles[-1].relative == pytest.approx(missed.item(), rel=1e-4)


def test_a_tied_llama_becomes_a_leviathan(
    corpus: Path, corpus_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=600, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True, max_position_embeddings=32,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    (tmp_path / "recipe.yaml").write_text("model: {generator: {seed_size: 8, num_heads: 2, rank: 4}}")
    arguments = ["--source", str(tmp_path / "hf"), "--output", str(tmp_path / "run"), "--embedding", "leviathan"]
    arguments += ["--data", str(corpus), "--config", str(tmp_path / "recipe.yaml"), "--fit_steps", "20"]
    assert import_hf.main(arguments) == 0
    topology.initialize(1)  # the launcher left the process groups
    said = capsys.readouterr().out
    assert "the generator is a fit to the source's table: relative error" in said
    assert said.count("by frequency: relative error") == 10
    trained = find_trained_model(tmp_path / "run")
    assert trained.recipe.model.embedding == "leviathan" and trained.recipe.model.generator.rank == 4
    table = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(dict(full_weights(trained.checkpoint))["output_layer.weight"][:600], table)
    error = (trained.build().embedding.generator.table() - table).norm() / table.norm()  # type: ignore[union-attr]
    assert f"relative error {error:.3f}" in said


# ---- training goes on ----


def test_an_imported_run_trains(two_ranks, corpus: Path, corpus_tokenizer: Path, tmp_path: Path) -> None:
    """A checkpoint of TP 2, taken up by two data-parallel ranks, by another recipe than the import wrote."""
    shape = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, initializer_range=0.2))
    llama.save_pretrained(tmp_path / "hf")
    shutil.copyfile(corpus_tokenizer, tmp_path / "hf" / "tokenizer.model")
    run = tmp_path / "run"
    import_model(tmp_path / "hf", run, tensor_parallel_size=2)

    options = [f"--data.prefixes=[{corpus}]", "--data.sequence_length=32", "--data.validation_fraction=0.2"]
    options += ["--data.num_workers=0", "--parallel.tensor_model_parallel_size=1", "--run.eval_samples=2"]
    options += ["--training.train_steps=2", "--training.micro_batch_size=2", "--training.global_batch_size=4"]
    options += ["--training.warmup_steps=1", "--training.lr=1e-2", "--run.log_interval=1"]
    case, recipe_file = Case(zero="zero1"), tmp_path / "recipe.yaml"
    shutil.copyfile(run / "recipe.yaml", recipe_file)

    def differs(section: str, **change) -> Recipe:
        recipe = recipes.load(run / "recipe.yaml")
        return dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **change)})

    for change in ({"norm_epsilon": 1e-3}, {"num_layers": 2}):
        with pytest.raises(ValueError, match=f"was started with another recipe: model.{next(iter(change))}"):
            check_run_dir(run, differs("model", **change))
    with pytest.raises(ValueError, match="tokenizer_fingerprint"):
        check_run_dir(run, differs("data", tokenizer_fingerprint="f" * 64))
    first, second = two_ranks.run(whole_run, case, recipe_file, run, tuple(options))
    assert first["code"] == second["code"] == 0, (first, second)
    (start,) = [
        line for line in first["said"] if "starting with the weights of hf, without optimizer states" in line
    ]
    assert "TP 1 × DP 2" in start
    initial, final = (line for line in run_directory.read_lines(run / "metrics.jsonl") if "val_loss" in line)
    assert initial["step"] == 0 and initial["val_loss"] > 6.6, "a new model has ln 600 = 6.4"
    assert final["step"] == 2 and final["val_loss"] < initial["val_loss"]
    trained = find_trained_model(run)
    state = run_directory.read_state(trained.checkpoint)
    assert state.step == 2 and state.imported_from == "hf" and not state.weights_only
    before, after = (weight for weight in (llama.lm_head.weight, weights(run)["output_layer.weight"]))
    moved = (after[:VOCAB_SIZE] - before[:VOCAB_SIZE]).abs().max()
    assert 1e-4 < moved < 0.05, "two steps of Adam away from the source"
    assert trained.recipe.training.lr == 1e-2
    # From now on it is a run like any other.
    with pytest.raises(ValueError, match=r"was started with another recipe: training\.weight_decay"):
        check_run_dir(run, differs("training", weight_decay=0.3))


def test_recipes_of_imports_are_whole(foreign: Path, tmp_path: Path) -> None:
    imported = import_model(foreign, tmp_path / "run")
    assert recipes.load(tmp_path / "run" / "recipe.yaml") == imported.recipe
    base = Recipe()
    source = from_hugging_face.open_source(foreign, None)
    assert plan_recipe(source, base, None).training == base.training
