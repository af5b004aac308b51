"""Both formats, at every shape: the files, loaded by transformers' own way, compute what the trainer does."""

import dataclasses
import json
import stat
from pathlib import Path

import pytest
import torch
from exports import MODEL, SHAPES, VOCAB_SIZE, make_run, trainer_logits, trainer_model
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from leviathan_ds.config import ModelConfig
from leviathan_ds.export import names, verify
from leviathan_ds.export.publish import ExportRefused, export
from leviathan_ds.trained_model import find_trained_model

pytestmark = pytest.mark.usefixtures("one_rank", "little_text")

GENERATORS = ("leviathan", "residual, product not centred")
CASES = [("llama", name) for name in SHAPES] + [("leviathan", name) for name in GENERATORS]
CASES += [  # the other shapes concern the body alone, which both formats share
    pytest.param("leviathan", name, marks=pytest.mark.slow)
    for name, model in SHAPES.items()
    if model.embedding == "leviathan" and name not in GENERATORS
]


@pytest.mark.parametrize(("form", "name"), CASES)
def test_exported_files_compute_what_the_trainer_does(form, name, tmp_path: Path, sample_tokenizer: Path) -> None:
    """Also far beyond the training length of 64, for one token, and in a batch with padding on the left."""
    model = SHAPES[name]
    # Two tensor-parallel ranks: the vocabulary of 509 is padded to 512.
    run = make_run(
        tmp_path / "run", sample_tokenizer, model, tensor_parallel_size=2 if model.query_groups > 1 else 1
    )
    output = tmp_path / "hf" / "out"
    report = export(find_trained_model(run), output, form=form)

    llama, loading = AutoModelForCausalLM.from_pretrained(output, local_files_only=True, output_loading_info=True)
    assert not any(loading.values()), loading
    tokens = torch.arange(VOCAB_SIZE).flip(0)[None]  # every id
    expected = trainer_logits(run, tokens)
    assert expected.std() > 0.5
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :25] = 0
    padded = torch.stack([functional.pad(tokens[0, :15], (25, 0), value=7), tokens[0, 100:140]])
    with torch.no_grad():
        by_position = (llama(tokens).logits - expected).abs().amax((0, 2))
        one = llama(tokens[:, :1]).logits - expected[:, :1]
        short, long = llama(padded, attention_mask=mask).logits
    assert by_position.shape == (VOCAB_SIZE,) and by_position.max() < 1e-4
    assert one.abs().max() < 1e-4
    assert (short[25:] - expected[0, :15]).abs().max() < 1e-4
    assert (long - trainer_logits(run, tokens[:, 100:140])[0]).abs().max() < 1e-4
    assert llama.lm_head.weight.shape[0] == VOCAB_SIZE
    assert llama.config.tie_word_embeddings == (model.embedding == "dense_tied")

    assert report.rounding is None and report.parity.positions == 4 * 64
    summary = json.loads((run / "summary.json").read_text())
    assert summary["hf_max_logit_diff"] == report.parity.max_logit_difference < 1e-4
    assert summary["hf_kl_divergence"] == report.parity.kl_divergence < 1e-6
    assert report.num_parameters == sum(p.numel() for p in llama.parameters())
    assert {stat.S_IMODE(path.stat().st_mode) for path in output.iterdir()} == {0o644}
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert bool(list(output.glob("*.py"))) == (form == "leviathan")


@pytest.mark.parametrize("form", ["llama", "leviathan"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bfloat16(form, stored: torch.dtype, tmp_path: Path, sample_tokenizer: Path) -> None:
    """The same numbers to 1e-4; what rounding costs is measured against the trainer as it is."""
    small = dataclasses.replace(MODEL, init_method_std=0.2)
    run = make_run(tmp_path / "run", sample_tokenizer, small, dtype=stored)
    trained = find_trained_model(run)
    report = export(trained, tmp_path / "hf", form=form, dtype=torch.bfloat16)
    assert report.dtype == "bfloat16" and report.parity.max_logit_difference < 1e-4
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    if form == "leviathan" and stored == torch.bfloat16:
        assert report.rounding is None  # the generator's own numbers
        return
    assert report.rounding is not None and report.rounding.kl_divergence > report.parity.kl_divergence

    # The same by the whole models in memory.
    tokens = verify.sequences(trained, verify.limited(verify.real_text(trained, None)))
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        theirs, ours = llama(tokens).logits.double(), trainer_logits(run, tokens).double()
    divergence = functional.kl_div(
        theirs.log_softmax(-1), ours.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert report.rounding.kl_divergence == pytest.approx(divergence.mean().item(), rel=0.02, abs=2e-8)
    assert report.rounding.max_logit_difference == pytest.approx((theirs - ours).abs().max().item(), rel=0.01)


def test_rounding_hides_no_mistake(
    tmp_path: Path, sample_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", sample_tokenizer, dtype=torch.bfloat16)
    split = names.split_gate_up

    def moved(weight: torch.Tensor, model: ModelConfig) -> tuple[torch.Tensor, ...]:
        gate, up = split(weight, model)
        gate = gate.clone()
        gate[3, 5] += 0.02
        return gate, up

    monkeypatch.setattr(names, "split_gate_up", moved)
    with pytest.raises(ExportRefused, match="logits differ"):
        export(find_trained_model(run), tmp_path / "hf")


def test_what_rounding_may_cost(tmp_path: Path, sample_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leviathan_ds.export.publish.ROUNDING_KL_TOLERANCE", 1e-9)
    run = make_run(tmp_path / "run", sample_tokenizer)
    with pytest.raises(ExportRefused, match=r"rounding costs .* nats .* wider --dtype"):
        export(find_trained_model(run), tmp_path / "hf", dtype=torch.float16)


def test_nan_weights_are_refused(tmp_path: Path, sample_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = names.split_gate_up
    monkeypatch.setattr(names, "split_gate_up", lambda weight, model: split(weight * float("nan"), model))
    with pytest.raises(ExportRefused, match="by up to inf"):
        export(find_trained_model(make_run(tmp_path / "run", sample_tokenizer)), tmp_path / "hf")


@pytest.mark.parametrize("form", ["llama", "leviathan"])
def test_shards(form, tmp_path: Path, sample_tokenizer: Path) -> None:
    run = make_run(tmp_path / "run", sample_tokenizer)
    trained = find_trained_model(run)
    export(trained, tmp_path / "whole", form=form)
    export(trained, tmp_path / "cut", form=form, max_shard_size="50KB")
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "cut").glob("model-*.safetensors"))
    assert {path.name for path in shards} == set(index["weight_map"].values()) and len(shards) > 3
    together = {}
    for path in shards:
        tensors = load_file(path)
        assert len(tensors) == 1 or path.stat().st_size < 55_000
        assert {index["weight_map"][name] for name in tensors} == {path.name}
        together |= tensors
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert together.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(together[name], whole[name]) for name in whole)
    tokens = torch.arange(60)[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")(tokens).logits
    assert (logits - trainer_model(run)(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("size", ["", "5 potatoes", "0GB", "-1GB"])
def test_a_shard_size_that_is_none(size: str, tmp_path: Path, sample_tokenizer: Path) -> None:
    run = make_run(tmp_path / "run", sample_tokenizer)
    with pytest.raises(ValueError, match="--max_shard_size"):
        export(find_trained_model(run), tmp_path / "hf", max_shard_size=size)
