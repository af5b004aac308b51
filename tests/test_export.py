"""Export: the written files, loaded by transformers alone, compute what the trainer does."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from exports import GENERATOR, MODEL, SHAPES, VOCAB_SIZE, make_run, trainer_logits
from transformers.models.llama import modeling_llama

from data_prep.preprocess import preprocess
from data_prep.sample import sample_corpus_path
from data_prep.tokenizers import load_tokenizer
from data_prep.train_tokenizer import train_tokenizer
from launchers import export_hf
from launchers import generate as generate_launcher
from leviathan_ds import run_directory
from leviathan_ds.config import DataConfig, ModelConfig, ParallelConfig
from leviathan_ds.export import names
from leviathan_ds.export.llama import to_llama
from leviathan_ds.export.publish import ExportRefused, export
from leviathan_ds.export.verify import real_text
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import registry, topology
from leviathan_ds.trained_model import find_trained_model

pytestmark = pytest.mark.usefixtures("one_rank", "little_text")


def test_rotary_embedding_is_hugging_faces(tmp_path: Path, sample_tokenizer: Path) -> None:
    """The first position has no rotation: a wrong layout shows from the second on, and only there."""
    run = make_run(tmp_path / "run", sample_tokenizer)
    llama = to_llama(find_trained_model(run))
    tokens = torch.randint(VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = trainer_logits(run, tokens)
    with torch.no_grad():
        assert (llama(tokens).logits - expected).abs().max() < 1e-4
        for layer in llama.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.copy_(_interleaved(projection.weight))
        by_position = (llama(tokens).logits - expected).abs().amax((0, 2))
    assert by_position[0] < 1e-4 and by_position[1:].min() > 1e-2


def _interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Rows of each head reordered from halves to pairs: the layout of Llama's original release."""
    return weight.unflatten(0, (-1, 2, MODEL.head_size // 2)).transpose(1, 2).flatten(0, 2)


def _swapped_gate_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "split_gate_up", lambda weight, model: tuple(reversed(weight.chunk(2))))


def _rotary_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    split = names.split_qkv

    def interleaved(weight: torch.Tensor, model: ModelConfig) -> tuple[torch.Tensor, ...]:
        query, key, value = split(weight, model)
        return _interleaved(query), _interleaved(key), value

    monkeypatch.setattr(names, "split_qkv", interleaved)


def _queries_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "split_qkv", lambda weight, model: weight.split([64, 32, 32]))


def _eps_outside_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: modeling_llama.LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


def _one_weight_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest of mistakes: the comparison is not vacuous even where both sides agree bit for bit."""
    split = names.split_gate_up

    def moved(weight: torch.Tensor, model: ModelConfig) -> tuple[torch.Tensor, ...]:
        gate, up = split(weight, model)
        gate = gate.clone()
        gate[3, 5] += 0.01
        return gate, up

    monkeypatch.setattr(names, "split_gate_up", moved)


def _padding_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_cut_padding", lambda weight, model: (weight,))


@pytest.mark.parametrize(
    "tamper",
    [
        _swapped_gate_up,
        _rotary_pairs,
        _queries_not_grouped,
        _eps_outside_the_root,
        _one_weight_moved,
        _padding_kept,
    ],
)
def test_a_wrong_export_is_refused_and_leaves_nothing(
    tamper, tmp_path: Path, sample_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = make_run(tmp_path / "run", sample_tokenizer), tmp_path / "hf" / "out"
    tamper(monkeypatch)
    with pytest.raises(ValueError, match=r"logits differ|is not a checkpoint of"):
        export(find_trained_model(run), output)
    assert list(output.parent.iterdir()) == []
    assert not (run / "summary.json").exists()


def test_eps_is_inside_the_root(tmp_path: Path, sample_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings of a variance far below eps: the norm then scales by 1/√eps, not by 1/(σ + eps)."""
    faint = dataclasses.replace(GENERATOR, out_proj_std=1e-4)
    run = make_run(tmp_path / "run", sample_tokenizer, dataclasses.replace(MODEL, generator=faint))
    trained = find_trained_model(run)
    assert to_llama(trained).model.embed_tokens.weight.std() < 1e-3
    export(trained, tmp_path / "right")
    _eps_outside_the_root(monkeypatch)
    with pytest.raises(ExportRefused, match="logits differ"):
        export(trained, tmp_path / "wrong")


@pytest.mark.parametrize("embedding", ["leviathan", "dense_tied", "dense_untied"])
def test_tensor_parallel_degrees_give_equal_files(embedding: str, tmp_path: Path, sample_tokenizer: Path) -> None:
    model = dataclasses.replace(MODEL, embedding=embedding)
    for size in (1, 2):
        run = make_run(tmp_path / f"tp{size}", sample_tokenizer, model, tensor_parallel_size=size)
        export(find_trained_model(run), tmp_path / f"hf{size}" / "out")
    one, two = tmp_path / "hf1" / "out", tmp_path / "hf2" / "out"
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_the_name_table_reads_both_ways(model: ModelConfig) -> None:
    language_model = LanguageModel(model, ParallelConfig())
    initialize_weights(language_model, model, seed=1)
    table = names.correspondences(model)
    stored = {name: p.detach() for name, p in language_model.named_parameters()}
    assert table.keys() == stored.keys()
    for name, weight in stored.items():
        back = table[name].join(table[name].split(weight, model), model)
        assert torch.equal(back, weight[:VOCAB_SIZE] if registry.rule_for(name).is_vocabulary else weight), name


def test_config_and_generation_config(tmp_path: Path, sample_tokenizer: Path) -> None:
    """A vocabulary larger than the tokenizer's keeps its rows, and generation keeps away from them."""
    model = dataclasses.replace(MODEL, embedding="dense_untied")
    run = make_run(tmp_path / "run", sample_tokenizer, model)
    small = tmp_path / "small.model"
    train_tokenizer([sample_corpus_path()], small, VOCAB_SIZE - 9, sample_bytes=200_000)
    (run / run_directory.TOKENIZERS["sentencepiece"]).write_bytes(small.read_bytes())
    export(find_trained_model(run), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    eod = load_tokenizer(small).eod_id
    wanted = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 64,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "dtype": "float32",
    }
    assert {key: config[key] for key in wanted} == wanted
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 3000.0}
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == list(range(VOCAB_SIZE - 9, VOCAB_SIZE))


def test_output_in_the_way(tmp_path: Path, sample_tokenizer: Path) -> None:
    trained, output = find_trained_model(make_run(tmp_path / "run", sample_tokenizer)), tmp_path / "hf"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty; choose another --output or pass --overwrite"):
        export(trained, output)
    with pytest.raises(ValueError, match="holds no export"):
        export(trained, output, overwrite=True)
    assert (output / "notes.txt").read_text() == "mine"
    (output / "notes.txt").unlink()
    export(trained, output)  # an empty folder is no obstacle
    (output / "old").write_text("")
    export(trained, output, overwrite=True)
    assert not (output / "old").exists() and (output / "config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_where_the_real_text_comes_from(
    tmp_path: Path, sample_tokenizer: Path, sample_documents: list[str]
) -> None:
    texts = [document[:500] for document in sample_documents[:3]]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    preprocess([tmp_path / "d.jsonl"], sample_tokenizer, tmp_path / "d")
    data = DataConfig(prefixes=(str(tmp_path / "d"),), sequence_length=64)
    trained = find_trained_model(make_run(tmp_path / "run", sample_tokenizer, data=data))
    assert list(real_text(trained, None)) == texts
    (tmp_path / "d.bin").unlink()
    assert next(real_text(trained, None)) == sample_documents[0]
    (tmp_path / "t.txt").write_text("some text")
    assert list(real_text(trained, tmp_path / "t.txt")) == ["some text"]
    with pytest.raises(ValueError, match="No such file"):
        real_text(trained, tmp_path / "none.txt")


def test_launchers(tmp_path: Path, sample_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = make_run(tmp_path / "run", sample_tokenizer), tmp_path / "hf"
    export_arguments = ["--checkpoint", str(run), "--output", str(output)]
    assert export_hf.main(export_arguments) == 0
    assert "largest logit difference" in capsys.readouterr().out
    prompt = ["--prompt", "The ", "--max_new_tokens", "5"]
    assert generate_launcher.main(["--checkpoint", str(run), *prompt]) == 0
    plain = capsys.readouterr().out
    checkpoint = run / "checkpoints" / "step_00000100"
    assert generate_launcher.main(["--checkpoint", str(checkpoint), *prompt, "--stream"]) == 0
    assert capsys.readouterr().out.strip() == plain.strip() and plain.startswith("The ")

    for launcher, arguments, message in (
        (export_hf, export_arguments, "not empty"),
        (export_hf, ["--checkpoint", str(tmp_path / "none"), "--output", "x"], "does not exist"),
        (export_hf, [*export_arguments[:2], "--output", "x", "--text", "none.txt"], "none.txt"),
        (generate_launcher, ["--checkpoint", str(tmp_path / "none"), *prompt], "does not exist"),
        (generate_launcher, ["--checkpoint", str(run), *prompt, "--top_p", "2"], "--top_p must be"),
        (generate_launcher, ["--checkpoint", str(run), "--prompt", "\udcff"], "--prompt is not UTF-8"),
        (export_hf, [*export_arguments[:2], "--output", str(run / "recipe.yaml" / "x")], "cannot be written"),
    ):
        assert launcher.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    topology.initialize(1)  # the export launcher left the process groups


def test_changed_weights_are_passed_over_or_refused(
    tmp_path: Path, sample_tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit: the trainer's logits and the export's would agree, and both be wrong."""
    run = make_run(tmp_path / "run", sample_tokenizer)
    good = run / run_directory.CHECKPOINTS / run_directory.checkpoint_name(100)
    (good / run_directory.MANIFEST).unlink()
    files = {path.name: (path.stat().st_size, run_directory.checksum(path)) for path in good.iterdir()}
    run_directory.write_manifest(good, files)
    bad = Path(shutil.copytree(good, good.with_name(run_directory.checkpoint_name(200))))
    assert find_trained_model(run).checkpoint == bad
    weights = bad / "weights_tp00.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert find_trained_model(run).checkpoint == good
    assert f"{weights}: its content has changed" in caplog.text
    with pytest.raises(ValueError, match=r"weights_tp00\.safetensors: its content has changed .* choose another"):
        find_trained_model(bad)
    recipe = (run / run_directory.RECIPE).read_text()
    (run / run_directory.RECIPE).write_text(
        recipe.replace("verify_checkpoints: checksums", "verify_checkpoints: sizes")
    )
    assert find_trained_model(run).checkpoint == bad, "told not to look"


def test_a_checkpoint_of_another_recipe(tmp_path: Path, sample_tokenizer: Path) -> None:
    run = make_run(tmp_path / "run", sample_tokenizer)
    for change, message in (
        ({"ffn_hidden_size": 64}, "not a checkpoint of its run's recipe"),
        ({"embedding": "dense_tied"}, "does not have"),
        ({"generator": dataclasses.replace(GENERATOR, rank=2)}, "embed_tokens.out_proj is .* the recipe says"),
        ({"num_layers": 3}, "not a checkpoint of its run's recipe"),
    ):
        trained = find_trained_model(run)
        model = dataclasses.replace(MODEL, **change)
        with pytest.raises(ValueError, match=message):
            to_llama(dataclasses.replace(trained, recipe=dataclasses.replace(trained.recipe, model=model)))


def test_a_killed_export_leaves_nothing(
    tmp_path: Path, sample_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM, the end of a batch job, in the middle of the comparison."""
    run = make_run(tmp_path / "run", sample_tokenizer)
    monkeypatch.setattr("leviathan_ds.export.publish.parity", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match="143"):
            export_hf.main(["--checkpoint", str(run), "--output", str(tmp_path / "hf" / "out")])
    finally:
        signal.signal(signal.SIGTERM, before)
        topology.initialize(1)  # the launcher left the process groups
    assert not list((tmp_path / "hf").iterdir())
