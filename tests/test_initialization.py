"""Initial weights: the documented table on a built model, and independence of the number of ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from leviathan_ds.config import GeneratorConfig, ModelConfig, ParallelConfig
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import registry, topology

pytestmark = pytest.mark.usefixtures("one_rank")

MODEL = ModelConfig(
    vocab_size=700,  # 704 stored
    embedding="leviathan",
    hidden_size=64,
    num_layers=3,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=128,
    init_method_std=0.03,
    generator=GeneratorConfig(seed_size=32, num_heads=4, num_knots=6, rank=16, residual=True),
)
RESIDUAL = 0.03 / math.sqrt(6)  # two additions in each of three layers


def weights(model: ModelConfig, seed: int = 5) -> dict[str, Tensor]:
    built = LanguageModel(model, ParallelConfig())
    initialize_weights(built, model, seed)
    return {name: parameter.detach() for name, parameter in built.named_parameters()}


def expected_stds(model: ModelConfig) -> dict[str, float]:
    sizes = model.generator
    per_leaf = {
        "codebooks": sizes.codebook_std,
        "seed_proj": 1 / math.sqrt(32) if sizes.seed_proj_std is None else sizes.seed_proj_std,
        "spline_delta": sizes.spline_delta_std,
        "out_proj": 0.004 / math.sqrt(4) if sizes.out_proj_std is None else sizes.out_proj_std,
        "residual_proj": 0.03,
        "word_embeddings.weight": 0.03,
        "output_layer.weight": 0.03,
    }
    in_layers = {"linear_qkv": 0.03, "linear_fc1": 0.03, "linear_proj": RESIDUAL, "linear_fc2": RESIDUAL}
    return per_leaf | {f"{name}.weight": std for name, std in in_layers.items()}


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        replace(MODEL, embedding="dense_untied"),
        replace(MODEL, embedding="dense_tied"),
        replace(
            MODEL,
            generator=replace(
                MODEL.generator, codebook_std=0.3, seed_proj_std=0.2, spline_delta_std=0.7, out_proj_std=0.05
            ),
        ),
    ],
    ids=["leviathan", "untied", "tied", "explicit"],
)
def test_standard_deviations_are_the_documented_ones(model: ModelConfig) -> None:
    stds = expected_stds(model)
    for name, weight in weights(model).items():
        if "norm" in name:
            assert torch.equal(weight, torch.full_like(weight, 0.0 if "bias" in name else 1.0)), name
            continue
        (std,) = (std for leaf, std in stds.items() if name.endswith(leaf))
        values = weight[:700].double() if registry.rule_for(name).is_vocabulary else weight.double()
        # Five standard errors of a normal sample's mean and standard deviation.
        tolerance = 5 * std / math.sqrt(values.numel())
        assert abs(values.mean().item()) < tolerance, name
        assert abs(values.std().item() - std) < tolerance, name
        assert values.abs().max() > 2.5 * std, name  # normal, not uniform


def test_padded_rows_are_zero_and_the_others_are_not() -> None:
    untied = weights(replace(MODEL, embedding="dense_untied"))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert untied[name].shape[0] == 704
        assert not untied[name][700:].any()
        assert untied[name][:700].abs().sum(1).min() > 0


def test_seed_and_name_decide() -> None:
    one, again, other = weights(MODEL), weights(MODEL), weights(MODEL, seed=6)
    drawn = [name for name in one if "norm" not in name]
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    layers = [one[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] for layer in range(3)]
    assert not torch.equal(layers[0], layers[1])
    assert not torch.equal(layers[1], layers[2])


def test_global_random_state_plays_no_part() -> None:
    torch.manual_seed(1)
    one = weights(MODEL)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    other = weights(MODEL)
    assert all(torch.equal(one[name], other[name]) for name in one)
    torch.manual_seed(1)
    LanguageModel(MODEL, ParallelConfig())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("embedding", ["leviathan", "dense_tied", "dense_untied"])
def test_two_ranks_hold_shards_of_the_same_weights(monkeypatch: pytest.MonkeyPatch, embedding: str) -> None:
    # 700 rows are padded to 704 for one rank and to 768 for two.
    model = replace(MODEL, embedding=embedding)  # pyright: ignore[reportArgumentType]
    full = weights(model)
    shards: dict[str, list[Tensor]] = {name: [] for name in full}
    monkeypatch.setattr(topology, "tensor_parallel_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(topology, "tensor_parallel_rank", lambda rank=rank: rank)
        built = LanguageModel(model, ParallelConfig())
        for name, parameter, rule in registry.named_rules(built):  # the local shapes of two ranks
            shape = list(full[name].shape)
            if rule.shard_dim is not None:
                shape[rule.shard_dim] = (768 if rule.is_vocabulary else shape[rule.shard_dim]) // 2
            parameter.data = torch.empty(shape)
        initialize_weights(built, model, 5)
        for name, parameter in built.named_parameters():
            shards[name].append(parameter.detach())
    for name, parts in shards.items():
        together = registry.rule_for(name).unshard(parts)
        if registry.rule_for(name).is_vocabulary:
            assert together.shape[0] == 768
            assert not together[704:].any()
            together = together[:704]
        assert torch.equal(together, full[name]), name


def test_generators_output_at_the_start() -> None:
    """The numbers of initialize_weights' docstring, for the sizes of the demo."""
    model = ModelConfig(vocab_size=8192, hidden_size=192, num_layers=1, num_attention_heads=2)
    built = LanguageModel(model, ParallelConfig())
    for seed in (0, 1):
        initialize_weights(built, model, seed)
        table = built.embedding.generator.table()[torch.randperm(8192)[:512]].double()  # pyright: ignore
        rms = table.square().mean().sqrt().item()
        unit = torch.nn.functional.normalize(table, dim=1)
        cosine = ((unit @ unit.T).sum() - 512) / (512 * 511)
        assert 0.028 < rms < 0.036
        assert 0.17 < cosine < 0.25
