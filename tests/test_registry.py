"""The table of parameters: complete, strict, and shards that come together again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from leviathan_ds.config import GeneratorConfig, ModelConfig, ParallelConfig, TrainingConfig
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import registry

pytestmark = pytest.mark.usefixtures("one_rank")

TINY = ModelConfig(
    vocab_size=500,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    ffn_hidden_size=96,
    generator=GeneratorConfig(seed_size=8, num_heads=2, num_knots=5, rank=4, residual=True),
)
EMBEDDINGS = ("leviathan", "dense_tied", "dense_untied")
SHARDED = {  # by the layers that Megatron splits: columns of QKV and fc1, rows of the other two, the vocabulary
    "embedding.word_embeddings.weight": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc2.weight": 1,
    "output_layer.weight": 0,
}


def build(embedding: str) -> LanguageModel:
    return LanguageModel(replace(TINY, embedding=embedding), ParallelConfig())  # pyright: ignore[reportArgumentType]


def leaf(name: str) -> str:
    return name.split(".", 3)[3] if name.startswith("decoder.layers.") else name


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_every_parameter_has_a_rule(embedding: str) -> None:
    model = build(embedding)
    known = list(registry.named_rules(model))
    assert [name for name, _, _ in known] == [name for name, _ in model.named_parameters()]
    for name, _, rule in known:
        assert rule.shard_dim == SHARDED.get(leaf(name)), name
        assert rule.is_vocabulary == (name in ("embedding.word_embeddings.weight", "output_layer.weight"))
        assert rule.num_stacked == (2 if "linear_fc1" in name else 1)
        assert rule.undecayed == ("norm" in name or "codebooks" in name), name
        partial = "sequence_parallel" if name.endswith("layernorm.weight") else None
        assert rule.partial_with == ("split_distinct_ids" if ".generator." in name else partial), name
        room = name.split(".")[1 if ".generator." in name else 0]
        expected = {"decoder": "body", "output_layer": "head", "embedding": "embedding", "generator": "generator"}
        assert rule.component == expected[room]


def test_tied_weight_is_one_parameter() -> None:
    names = {
        embedding: [name for name, _, _ in registry.named_rules(build(embedding))] for embedding in EMBEDDINGS
    }
    assert "output_layer.weight" not in names["dense_tied"]
    assert "embedding.word_embeddings.weight" in names["dense_tied"]
    assert len(names["dense_untied"]) == len(names["dense_tied"]) + 1


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.mlp.gate.weight",
        "embedding.generator.extra",
        "xembedding.word_embeddings.weight",
        "output_layer.weight.more",
        "decoder.layers.x.mlp.linear_fc1.weight",
    ],
)
def test_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(KeyError, match="matches 0 rules"):
        registry.rule_for(name)


def test_model_with_an_unknown_parameter_does_not_start() -> None:
    model = build("leviathan")
    model.register_parameter("stray", nn.Parameter(torch.zeros(1)))
    with pytest.raises(KeyError, match="stray"):
        registry.mark_tensor_parallel(model)
    with pytest.raises(KeyError, match="stray"):
        registry.optimizer_groups(model, TrainingConfig())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rule", registry.RULES, ids=lambda rule: rule.pattern)
def test_shards_come_together_again(rule: registry.ParameterRule, size: int) -> None:
    full = torch.arange(16 * 24.0).reshape(16, 24)
    shards = [rule.shard(full, rank, size) for rank in range(size)]
    assert torch.equal(rule.unshard(shards), full)
    if rule.shard_dim is None:
        assert all(torch.equal(shard, full) for shard in shards)
    else:
        assert sum(shard.numel() for shard in shards) == full.numel()
        assert shards[0].shape[rule.shard_dim] * size == full.shape[rule.shard_dim]
    assert rule.full_shape(shards[0].shape, size) == list(full.shape)


def test_gate_and_up_are_split_each_by_itself() -> None:
    rule = registry.rule_for("decoder.layers.1.mlp.linear_fc1.weight")
    gate, up = torch.arange(8.0)[:, None], 100 + torch.arange(8.0)[:, None]
    shard = rule.shard(torch.cat([gate, up]), 1, 4)
    assert shard.flatten().tolist() == [2, 3, 102, 103]


def test_shard_of_a_projection_computes_its_part() -> None:
    # Column-parallel outputs are concatenated, row-parallel outputs summed: what the layers rely on.
    torch.manual_seed(0)
    x, full = torch.randn(3, 8, dtype=torch.float64), torch.randn(12, 8, dtype=torch.float64)
    qkv = registry.rule_for("decoder.layers.0.self_attention.linear_qkv.weight")
    columns = torch.cat([x @ qkv.shard(full, rank, 2).T for rank in range(2)], -1)
    torch.testing.assert_close(columns, x @ full.T)
    proj = registry.rule_for("decoder.layers.0.self_attention.linear_proj.weight")
    rows = sum(x.chunk(2, -1)[rank] @ proj.shard(full, rank, 2).T for rank in range(2))
    torch.testing.assert_close(rows, x @ full.T)


def groups_by_name(model: nn.Module, training: TrainingConfig) -> dict[str, tuple[float, float]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for group in registry.optimizer_groups(model, training):
        for parameter in group["params"]:
            assert names[parameter] not in found
            found[names[parameter]] = (group["weight_decay"], group["lr_scale"])
    assert found.keys() == set(names.values())
    return found


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_decay_and_learning_rate_scale_of_every_parameter(decay_vectors: bool) -> None:
    vectors = ("codebooks", "norm_weight", "norm_bias")
    training = TrainingConfig(
        weight_decay=0.25,
        decay_generator_vectors=decay_vectors,
        generator_lr_scale=3.0,
        table_lr_scale=0.5,
        head_lr_scale=2.0,
    )
    for name, (decay, scale) in groups_by_name(build("leviathan"), training).items():
        generator = "generator" in name
        assert scale == (3.0 if generator else 2.0 if name == "output_layer.weight" else 1.0), name
        if name.endswith("layernorm.weight"):
            assert decay == 0.0, name
        elif generator and name.endswith(vectors):
            assert decay == (0.25 if decay_vectors else 0.0), name
        else:
            assert decay == 0.25, name


def test_dense_models_have_two_groups_and_more_for_a_table_or_a_head_of_another_rate() -> None:
    for embedding in ("dense_tied", "dense_untied"):
        found = groups_by_name(build(embedding), TrainingConfig(weight_decay=0.1, generator_lr_scale=3.0))
        assert set(found.values()) == {(0.0, 1.0), (0.1, 1.0)}
        scaled = groups_by_name(build(embedding), TrainingConfig(weight_decay=0.1, table_lr_scale=0.5))
        assert {name for name, (_, scale) in scaled.items() if scale != 1} == {"embedding.word_embeddings.weight"}
        assert scaled["embedding.word_embeddings.weight"] == (0.1, 0.5)
        scaled = groups_by_name(build(embedding), TrainingConfig(weight_decay=0.1, head_lr_scale=0.5))
        heads = {"output_layer.weight"} if embedding == "dense_untied" else set()
        assert {name for name, (_, scale) in scaled.items() if scale != 1} == heads, "a tied head is its table"


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_marks_are_on_the_sharded_parameters_and_no_other(embedding: str) -> None:
    model = build(embedding)
    for parameter in model.parameters():  # whatever Megatron's layers left
        parameter.tensor_model_parallel = "unset"  # pyright: ignore[reportAttributeAccessIssue]
    registry.mark_tensor_parallel(model)
    for name, parameter in model.named_parameters():
        assert parameter.tensor_model_parallel is (leaf(name) in SHARDED), name  # pyright: ignore
        assert parameter.partition_dim == SHARDED.get(leaf(name), -1), name  # pyright: ignore
