"""Export: the written files, loaded by transformers alone, compute and encode what the trainer does."""

import dataclasses
import io
import json
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama

from data_prep.indexed import IndexedWriter
from data_prep.sample import sample_corpus_path
from data_prep.sources import iter_documents
from data_prep.tokenizers import load_tokenizer
from data_prep.train_tokenizer import train_tokenizer
from launchers import export_hf
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.config import DataConfig, GeneratorConfig, ModelConfig, ParallelConfig, Recipe, TrainingConfig
from leviathan_ds.export import names, verify
from leviathan_ds.export.llama import to_llama
from leviathan_ds.export.publish import ExportRefused, export_llama
from leviathan_ds.export.tokenizer import PROBES, check_convertible, check_encoding, write_tokenizer
from leviathan_ds.export.verify import real_text
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.model.weights import load_full_weights, shard_file
from leviathan_ds.parallel import registry, topology
from leviathan_ds.trained_model import find_trained_model

VOCAB_SIZE = 509
GENERATOR = GeneratorConfig(num_coordinates=2, seed_size=8, num_heads=2, num_knots=6, rank=4, out_proj_std=1.0)
# Nothing at its default or at a value that hides a mistake: large weights, an odd eps, another rotary base.
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=96,
    rotary_base=3000.0,
    norm_epsilon=1e-3,
    init_method_std=0.2,
    generator=GENERATOR,
)


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    topology.initialize(1)
    yield
    topology.shutdown()


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every export below checks its tokenizer; one test does so at length."""
    monkeypatch.setattr(verify, "TEXT_CHARACTERS", 100_000)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return [document.text for document in iter_documents([sample_corpus_path()])]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tok.model"
    train_tokenizer([sample_corpus_path()], path, VOCAB_SIZE, sample_bytes=200_000)
    return path


def make_run(
    run: Path,
    tokenizer_file: Path,
    model: ModelConfig = MODEL,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype = torch.float32,
    data: DataConfig | None = None,
) -> Path:
    """A run directory with one checkpoint of random weights, the same for every tensor-parallel size."""
    recipe = Recipe(model=model, data=data or DataConfig(sequence_length=64), training=TrainingConfig())
    language_model = LanguageModel(model, ParallelConfig())
    initialize_weights(language_model, model, seed=7)
    generator = torch.Generator().manual_seed(7)
    checkpoint = run / run_directory.CHECKPOINTS / run_directory.checkpoint_name(100)
    checkpoint.mkdir(parents=True)
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(tensor_parallel_size)]
    for name, parameter, rule in registry.named_rules(language_model):
        full = parameter.detach().to(dtype)
        if name.endswith("layernorm.weight"):  # constant ones would hide a norm in another's place
            full = (0.5 + torch.rand(full.shape, generator=generator)).to(dtype)
        if rule.is_vocabulary:
            rows = model.padded_vocab_size(tensor_parallel_size)
            true = model.vocabulary
            full = torch.cat([full[:true], full.new_full((rows - true, full.shape[1]), 9.0)])
        for rank, shard in enumerate(shards):
            shard[name] = rule.shard(full, rank, tensor_parallel_size).contiguous()
    for rank, shard in enumerate(shards):
        save_file(shard, checkpoint / shard_file(rank))
    (checkpoint / run_directory.TRAINER_STATE).write_text(json.dumps({"step": 100}))
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    (checkpoint / run_directory.MANIFEST).write_text(json.dumps({"bytes": sizes}))
    (run / run_directory.RECIPE).write_text(recipes.to_yaml(recipe))
    (run / run_directory.TOKENIZERS["sentencepiece"]).write_bytes(tokenizer_file.read_bytes())
    return run


def trainer_model(run: Path) -> LanguageModel:
    trained = find_trained_model(run)
    model = LanguageModel(trained.recipe.model, ParallelConfig())
    load_full_weights(model, trained.checkpoint)
    return model.eval().requires_grad_(False)


def trainer_logits(run: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return trainer_model(run)(tokens)


SHAPES = {
    "leviathan": MODEL,
    "residual, product not centred": dataclasses.replace(
        MODEL, generator=dataclasses.replace(GENERATOR, residual=True, center_product=False)
    ),
    "dense tied": dataclasses.replace(MODEL, embedding="dense_tied"),
    "dense untied": dataclasses.replace(MODEL, embedding="dense_untied"),
    "a query group for each head": dataclasses.replace(MODEL, num_query_groups=None),
    "one query group": dataclasses.replace(MODEL, num_query_groups=1),
    "heads wider than the model": dataclasses.replace(MODEL, kv_channels=24),
}


@pytest.mark.parametrize("name", SHAPES)
def test_exported_files_compute_what_the_trainer_does(name: str, tmp_path: Path, tokenizer_file: Path) -> None:
    model = SHAPES[name]
    run, output = make_run(tmp_path / "run", tokenizer_file, model), tmp_path / "hf" / "out"
    report = export_llama(find_trained_model(run), output)

    llama, loading = AutoModelForCausalLM.from_pretrained(output, local_files_only=True, output_loading_info=True)
    assert not any(loading.values()), loading
    tokens = torch.arange(VOCAB_SIZE).flip(0)[None]  # every id, far beyond the training length of 64
    expected = trainer_logits(run, tokens)
    with torch.no_grad():
        difference = (llama(tokens).logits - expected).abs().amax((0, 2))
    assert expected.std() > 0.5
    assert difference.shape == (VOCAB_SIZE,) and difference.max() < 1e-4
    assert llama.model.embed_tokens.weight.shape[0] == llama.lm_head.weight.shape[0] == VOCAB_SIZE
    assert llama.config.tie_word_embeddings == (model.embedding == "dense_tied")

    assert report.max_logit_difference < 1e-4 and report.positions_compared == 4 * 64
    assert json.loads((run / "summary.json").read_text())["hf_max_logit_diff"] == report.max_logit_difference
    assert report.num_parameters == sum(p.numel() for p in llama.parameters())
    assert {stat.S_IMODE(path.stat().st_mode) for path in output.iterdir()} == {0o644}
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert not list(output.glob("*.py"))


def test_rotary_embedding_is_hugging_faces(tmp_path: Path, tokenizer_file: Path) -> None:
    """The first position has no rotation: a wrong layout shows from the second on, and only there."""
    run = make_run(tmp_path / "run", tokenizer_file)
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
    tamper, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = make_run(tmp_path / "run", tokenizer_file), tmp_path / "hf" / "out"
    tamper(monkeypatch)
    with pytest.raises(ValueError, match=r"logits differ|is not a checkpoint of"):
        export_llama(find_trained_model(run), output)
    assert list(output.parent.iterdir()) == []
    assert not (run / "summary.json").exists()


def test_eps_is_inside_the_root(tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings of a variance far below eps: the norm then scales by 1/√eps, not by 1/(σ + eps)."""
    faint = dataclasses.replace(GENERATOR, out_proj_std=1e-4)
    run = make_run(tmp_path / "run", tokenizer_file, dataclasses.replace(MODEL, generator=faint))
    trained = find_trained_model(run)
    assert to_llama(trained).model.embed_tokens.weight.std() < 1e-3
    export_llama(trained, tmp_path / "right")
    _eps_outside_the_root(monkeypatch)
    with pytest.raises(ExportRefused, match="logits differ"):
        export_llama(trained, tmp_path / "wrong")


@pytest.mark.parametrize("embedding", ["leviathan", "dense_tied", "dense_untied"])
def test_tensor_parallel_degrees_give_equal_files(embedding: str, tmp_path: Path, tokenizer_file: Path) -> None:
    model = dataclasses.replace(MODEL, embedding=embedding)
    for size in (1, 2):
        run = make_run(tmp_path / f"tp{size}", tokenizer_file, model, tensor_parallel_size=size)
        export_llama(find_trained_model(run), tmp_path / f"hf{size}")
    one, two = tmp_path / "hf1", tmp_path / "hf2"
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


@pytest.mark.parametrize("embedding", ["leviathan", "dense_tied"])
def test_bfloat16_keeps_its_dtype_and_the_tolerance(embedding: str, tmp_path: Path, tokenizer_file: Path) -> None:
    model = dataclasses.replace(MODEL, embedding=embedding)
    run = make_run(tmp_path / "run", tokenizer_file, model, dtype=torch.bfloat16)
    report = export_llama(find_trained_model(run), tmp_path / "hf")
    assert report.dtype == "bfloat16" and report.max_logit_difference < 1e-4
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_the_name_table_reads_both_ways(model: ModelConfig) -> None:
    language_model = LanguageModel(model, ParallelConfig())
    initialize_weights(language_model, model, seed=1)
    table = names.correspondences(model)
    stored = {name: p.detach() for name, p in language_model.named_parameters() if ".generator." not in name}
    assert table.keys() == stored.keys()
    for name, weight in stored.items():
        back = table[name].join(table[name].split(weight, model), model)
        assert torch.equal(back, weight[:VOCAB_SIZE] if registry.rule_for(name).is_vocabulary else weight), name


def test_config_and_generation_config(tmp_path: Path, tokenizer_file: Path) -> None:
    """A vocabulary larger than the tokenizer's keeps its rows, and generation keeps away from them."""
    model = dataclasses.replace(MODEL, embedding="dense_untied")
    run = make_run(tmp_path / "run", tokenizer_file, model)
    small = tmp_path / "small.model"
    train_tokenizer([sample_corpus_path()], small, VOCAB_SIZE - 9, sample_bytes=200_000)
    (run / run_directory.TOKENIZERS["sentencepiece"]).write_bytes(small.read_bytes())
    export_llama(find_trained_model(run), tmp_path / "hf")
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


def test_output_in_the_way(tmp_path: Path, tokenizer_file: Path) -> None:
    trained, output = find_trained_model(make_run(tmp_path / "run", tokenizer_file)), tmp_path / "hf"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty; choose another --output or pass --overwrite"):
        export_llama(trained, output)
    with pytest.raises(ValueError, match="holds no export"):
        export_llama(trained, output, overwrite=True)
    assert (output / "notes.txt").read_text() == "mine"
    (output / "notes.txt").unlink()
    export_llama(trained, output)  # an empty folder is no obstacle
    (output / "old").write_text("")
    export_llama(trained, output, overwrite=True)
    assert not (output / "old").exists() and (output / "config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_where_the_real_text_comes_from(tmp_path: Path, tokenizer_file: Path, documents: list[str]) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    texts = [document[:500] for document in documents[:3]]
    with IndexedWriter(tmp_path / "d.bin", tmp_path / "d.idx", VOCAB_SIZE, tokenizer.eod_id) as writer:
        for ids in ([*tokenizer.encode(text), tokenizer.eod_id] for text in texts):
            writer.add(np.array(ids), np.array([len(ids)], np.int32))
        writer.finish()
    data = DataConfig(prefixes=(str(tmp_path / "d"),), sequence_length=64)
    trained = find_trained_model(make_run(tmp_path / "run", tokenizer_file, data=data))
    assert list(real_text(trained, None)) == texts
    (tmp_path / "d.bin").unlink()
    assert next(real_text(trained, None)) == documents[0]
    (tmp_path / "t.txt").write_text("some text")
    assert list(real_text(trained, tmp_path / "t.txt")) == ["some text"]
    with pytest.raises(ValueError, match="No such file"):
        real_text(trained, tmp_path / "none.txt")


def test_tokenizer_encodes_exactly(tmp_path: Path, tokenizer_file: Path, documents: list[str]) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    write_tokenizer(tokenizer, tmp_path, 64)
    draw = random.Random(0)
    alphabets = ["ab", " \n\t", "-=", "01", ["the", " the"], ["</s>", "<s>", "<unk>", "<0x0A>", "▁"], "é中🙂"]
    noise = ["".join(draw.choice(draw.choice(alphabets)) for _ in range(40)) for _ in range(3000)]
    lines = [line for document in documents[::8] for line in document.split("\n")]
    assert check_encoding(tmp_path, tokenizer, [*PROBES, *noise, *lines, *documents[::16]]) > 500_000
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.eos_token_id not in exported.encode("</s>")
    assert exported.decode([tokenizer.eod_id, *tokenizer.encode("hi")], skip_special_tokens=True) == "hi"


def _sentencepiece(path: Path, documents: list[str], **options: object) -> Path:
    model, defaults = io.BytesIO(), {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}
    SentencePieceTrainer.train(
        sentence_iterator=(line for text in documents[:30] for line in text[:3000].split("\n") if line),
        model_writer=model,
        **{"vocab_size": 700, "normalization_rule_name": "identity", "minloglevel": 2} | defaults | options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"add_dummy_prefix": True},
        {"add_dummy_prefix": True, "user_defined_symbols": ["\n"]},
        {"add_dummy_prefix": False, "user_defined_symbols": ["\n", "<|sep|>", "<|sep|><|x|>"]},
        {"add_dummy_prefix": False, "byte_fallback": False, "pad_id": 3},
    ],
    ids=str,
)
def test_other_sentencepiece_settings_encode_exactly(options: dict, tmp_path: Path, documents: list[str]) -> None:
    tokenizer = load_tokenizer(_sentencepiece(tmp_path / "tok.model", documents, **options))
    write_tokenizer(tokenizer, tmp_path, 64)
    draw = random.Random(0)
    parts = ["<|sep|>", "<|x|>", "word", " ", "  ", "\n", "é", "中", "a", "</s>"]
    noise = ["".join(draw.choices(parts, k=12)) for _ in range(500)]
    check_encoding(tmp_path, tokenizer, [*PROBES, *noise, *documents[:60]])
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id == tokenizer.pad_id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "one with --model_type bpe"),
        ({"normalization_rule_name": "nmt_nfkc"}, "Unicode normalisation"),
        ({"remove_extra_whitespaces": True}, "removes whitespace"),
        ({"user_defined_symbols": ["<|sep|>"]}, "dummy prefix"),
        ({"user_defined_symbols": ["  "], "add_dummy_prefix": False}, "hold spaces"),
    ],
)
def test_tokenizers_without_an_exact_counterpart_are_refused(
    options: dict, message: str, tmp_path: Path, documents: list[str]
) -> None:
    tokenizer = load_tokenizer(_sentencepiece(tmp_path / "tok.model", documents, **options))
    with pytest.raises(ValueError, match=message):
        check_convertible(tokenizer)


@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base"])
def test_tiktoken_ranks_become_a_tokenizer_json(name: str, tmp_path: Path, documents: list[str]) -> None:
    tokenizer = load_tokenizer(name)
    check_convertible(tokenizer)
    write_tokenizer(tokenizer, tmp_path, 64)
    draw = random.Random(0)
    # Runs and overlaps, where two merges to one token compete; scripts and odd characters, where patterns differ.
    runs = ["".join(draw.choice(" -=a*\t\n.#A_0/") * draw.randint(1, 70) for _ in range(8)) for _ in range(400)]
    everywhere = [
        "".join(f"a{chr(c)}b {chr(c)}1'{chr(c)} " for c in range(s, s + 97)) for s in range(0, 0xD700, 97)
    ]
    beyond = ["".join(f"a{chr(c)}B {chr(c)}" for c in range(s, s + 50)) for s in range(0x10000, 0x1FC00, 499)]
    texts = [*PROBES, *runs, *everywhere, *beyond, *documents[::40], "s'ſ 'S 'll 'LL" + " " * 5000 + "x"]
    assert check_encoding(tmp_path, tokenizer, texts) > 300_000
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.eos_token_id == tokenizer.eod_id == {"o200k_base": 199_999, "cl100k_base": 100_257}[name]
    assert exported.decode([tokenizer.eod_id, *tokenizer.encode("hi")], skip_special_tokens=True) == "hi"
    for token in (65_499, 65_500, 65_535, 65_536, 99_999, *((150_000, 199_997) if name == "o200k_base" else ())):
        assert exported.convert_tokens_to_ids(exported.convert_ids_to_tokens(token)) == token
        assert exported.decode([token]) == tokenizer.decode([token])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base"])
def test_tiktoken_export_on_all_of_the_sample_corpus(name: str, tmp_path: Path, documents: list[str]) -> None:
    tokenizer = load_tokenizer(name)
    write_tokenizer(tokenizer, tmp_path, 64)
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    everywhere = ["".join(f"a{c}b A{c} B1'{c} {c}" for c in points[start::4096]) for start in range(4096)]
    check_encoding(tmp_path, tokenizer, [*documents, *everywhere])


def test_a_tokenizer_json_is_exported_as_it_is(tmp_path: Path, documents: list[str]) -> None:
    """Its truncation, and what it puts around a text, were not there in training."""
    source = tmp_path / "tokenizer.json"
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    bpe.decoder = tokenizers.decoders.ByteLevel()  # type: ignore
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        documents[:20],
        tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),  # type: ignore
    )
    bpe.add_special_tokens(["<s>", "<stop>", "</s>", "<pad>"])
    bpe.enable_truncation(4)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore
        single="<s> $A </s>", special_tokens=[("<s>", 600), ("</s>", 602)]
    )
    source.write_text(bpe.to_str())
    for end, token in ((None, 602), ("<stop>", 601)):
        tokenizer = load_tokenizer(source, end)
        folder = tmp_path / f"hf{token}"
        folder.mkdir()
        write_tokenizer(tokenizer, folder, 64)
        assert check_encoding(folder, tokenizer, [*PROBES, "<stop></s><s>", *documents[::40]]) > 100_000
        exported = AutoTokenizer.from_pretrained(folder)
        assert exported.eos_token_id == token == tokenizer.eod_id and exported.pad_token_id == 603
        assert (
            json.loads((folder / "tokenizer.json").read_text())["model"] == json.loads(source.read_text())["model"]
        )


def test_another_encoding_is_refused(tmp_path: Path, tokenizer_file: Path, documents: list[str]) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    write_tokenizer(tokenizer, tmp_path, 64)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-20]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="encodes otherwise"):
        check_encoding(tmp_path, tokenizer, documents)


def test_launchers(tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = make_run(tmp_path / "run", tokenizer_file), tmp_path / "hf"
    export_arguments = ["--checkpoint", str(run), "--output", str(output)]
    assert export_hf.main(export_arguments) == 0
    assert "largest logit difference" in capsys.readouterr().out
    for launcher, arguments, message in (
        (export_hf, export_arguments, "not empty"),
        (export_hf, ["--checkpoint", str(tmp_path / "none"), "--output", "x"], "does not exist"),
        (export_hf, [*export_arguments[:2], "--output", "x", "--text", "none.txt"], "none.txt"),
        (export_hf, [*export_arguments[:2], "--output", str(run / "recipe.yaml" / "x")], "cannot be written"),
    ):
        assert launcher.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    topology.initialize(1)  # the export launcher left the process groups


def test_changed_weights_are_passed_over_or_refused(
    tmp_path: Path, tokenizer_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit: the trainer's logits and the export's would agree, and both be wrong."""
    run = make_run(tmp_path / "run", tokenizer_file)
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


def test_a_checkpoint_of_another_recipe(tmp_path: Path, tokenizer_file: Path) -> None:
    run = make_run(tmp_path / "run", tokenizer_file)
    for change, message in (
        ({"ffn_hidden_size": 64}, "not a checkpoint of its run's recipe"),
        ({"embedding": "dense_tied"}, "does not have"),
        ({"generator": dataclasses.replace(GENERATOR, rank=2)}, "generator's weights are not the recipe's"),
        ({"num_layers": 3}, "not a checkpoint of its run's recipe"),
    ):
        trained = find_trained_model(run)
        model = dataclasses.replace(MODEL, **change)
        with pytest.raises(ValueError, match=message):
            to_llama(dataclasses.replace(trained, recipe=dataclasses.replace(trained.recipe, model=model)))
