"""The modeling file that keeps the generator: by itself, in transformers' ways, at the paper's size."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exports import MODEL, make_run, trainer_logits, trainer_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from leviathan_ds.config import GeneratorConfig
from leviathan_ds.export.llama import empty_model
from leviathan_ds.export.publish import export
from leviathan_ds.hf import LeviathanConfig, LeviathanForCausalLM
from leviathan_ds.model.generator import SplineGenerator
from leviathan_ds.trained_model import find_trained_model

pytestmark = pytest.mark.usefixtures("one_rank", "little_text")

TOKENS = torch.randint(509, (2, 30), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(one_rank, tmp_path_factory: pytest.TempPathFactory, sample_tokenizer: Path) -> Path:
    model = dataclasses.replace(MODEL, generator=dataclasses.replace(MODEL.generator, residual=True))
    return make_run(tmp_path_factory.mktemp("run") / "run", sample_tokenizer, model)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "out"
    export(find_trained_model(run), folder, form="leviathan")
    return folder


def load(folder: Path, **options) -> LeviathanForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    assert isinstance(model, LeviathanForCausalLM)
    return model


ELSEWHERE = """
import sys
for name in ("leviathan_ds", "megatron", "deepspeed"):
    sys.modules[name] = None  # an import fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)  # reads the configuration, too
ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("The ")]])
print("ids", model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist(), flush=True)
model.save_pretrained(again)
AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
"""


def test_it_needs_nothing_of_ours(exported: Path, run: Path, tmp_path: Path) -> None:
    """Loaded as remote code where this project cannot be imported, saved again, and loaded from there."""
    command = [sys.executable, "-c", ELSEWHERE, str(exported), str(tmp_path / "again")]
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    tokenizer, model = find_trained_model(run).tokenizer, trainer_model(run)
    ids = [tokenizer.eod_id, *tokenizer.encode("The ")]
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert f"ids {ids}" in done.stdout.splitlines()
    again, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", exported))
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)
    assert (tmp_path / "again" / "modeling_leviathan.py").is_file()


def test_importing_the_package_registers_it(exported: Path) -> None:
    assert isinstance(AutoConfig.from_pretrained(exported), LeviathanConfig)
    model = load(exported, device_map={"": "cpu"})
    assert model.config._attn_implementation == "sdpa"


def counted(model: LeviathanForCausalLM) -> list[int]:
    """How many ids each call of the generator gets from now on."""
    embedding, calls = model.model.embed_tokens, []
    generate = embedding.generate
    embedding.generate = lambda ids: calls.append(len(ids)) or generate(ids)
    return calls


def test_the_table_is_computed_once_and_let_go(exported: Path, run: Path) -> None:
    model, expected = load(exported), trainer_logits(run, TOKENS)
    calls, distinct = counted(model), len(TOKENS.unique())

    def close() -> bool:
        return bool((model(TOKENS).logits - expected).abs().max() < 1e-4)

    with torch.no_grad():
        assert close() and close() and calls == [509]
        assert not any("table" in name for name in model.state_dict())
        model.drop_table()
        assert close() and calls == [509] * 2
        model.train()
        assert close() and calls == [509] * 2 + [distinct]
        model.eval()
        model.load_state_dict({name: 2 * weight for name, weight in model.state_dict().items()})
        assert not close() and calls[3:] == [509]
        model.to(torch.bfloat16)
        assert model(TOKENS).logits.dtype == torch.bfloat16 and calls[4:] == [509]
    model = load(exported)
    calls = counted(model)
    assert close() and calls == [distinct], "where gradients are recorded there is no table"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_trainers(exported: Path, run: Path, checkpointing: bool) -> None:
    model, reference = load(exported).train(), trainer_model(run).requires_grad_(True)
    if checkpointing:
        model.gradient_checkpointing_enable()
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    logits = reference(TOKENS)[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten())
    expected.backward()
    assert abs(loss - expected) < 1e-5
    for name, parameter in reference.embedding.generator.named_parameters():  # type: ignore[union-attr]
        found = getattr(model.model.embed_tokens, name).grad
        assert found is not None and parameter.grad is not None
        assert (found - parameter.grad).abs().max() < 1e-4 * parameter.grad.abs().max().clamp_min(1e-3), name


def test_a_batch_generates_with_a_cache_what_it_does_without(exported: Path) -> None:
    model = load(exported)
    mask = torch.ones_like(TOKENS)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = None
    with_cache = model.generate(TOKENS, use_cache=True, **options)
    assert torch.equal(with_cache, model.generate(TOKENS, use_cache=False, **options))
    assert torch.equal(with_cache[1:], model.generate(TOKENS[1:], **options | {"attention_mask": mask[1:]}))


def test_new_weights_begin_as_the_trainers_do() -> None:
    torch.manual_seed(0)
    config = LeviathanConfig(vocab_size=20_000, hidden_size=256, num_hidden_layers=1, intermediate_size=64)
    table = LeviathanForCausalLM(config).model.embed_tokens.generate(torch.arange(2000))
    assert table.pow(2).mean().sqrt().item() == pytest.approx(0.033, rel=0.5)  # as model/initialization.py says


def test_size_at_the_papers_vocabulary() -> None:
    """V = 200,376 and D = 512: 410 MB of table in fp32 against 6 MB of generator."""
    sizes = {"vocab_size": 200_376, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    from transformers import LlamaConfig

    llama, leviathan = (
        sum(p.numel() for p in empty_model(config).parameters())
        for config in (LlamaConfig(**sizes), LeviathanConfig(**sizes))
    )
    with torch.device("meta"):
        generator = sum(p.numel() for p in SplineGenerator(200_376, 512, GeneratorConfig()).parameters())
    assert llama - leviathan == 200_376 * 512 - generator
    assert (llama - leviathan) * 4 / 1e6 == pytest.approx(404.5, abs=1)


def test_what_the_configuration_refuses(exported: Path) -> None:
    with pytest.raises(ValueError, match="unknown keys of embedding_generator: ranks"):
        LeviathanConfig(embedding_generator={"ranks": 3})
    with pytest.raises(ValueError, match="no table to tie"):
        LeviathanConfig(tie_word_embeddings=True)
    with pytest.raises(NotImplementedError, match="cannot be resized"):
        load(exported).resize_token_embeddings(600)
