"""Loss and bits per byte against a plain computation on the same text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from distributed_cases import evaluation_run

from data_prep.preprocess import preprocess
from data_prep.tokenizers import load_tokenizer
from data_prep.train_tokenizer import train_tokenizer
from leviathan_ds.config import DataConfig, GeneratorConfig, ModelConfig, ParallelConfig
from leviathan_ds.data.dataset import build_datasets, check_data
from leviathan_ds.data.loader import loader
from leviathan_ds.model.initialization import initialize_weights
from leviathan_ds.model.language_model import LanguageModel
from leviathan_ds.parallel import topology
from leviathan_ds.training.evaluate import Evaluation, blended, evaluate, token_bytes, validation_batches

TEXT = Path(__file__).parent / "data_prep" / "minipile_tiny.jsonl"


def test_equals_a_plain_computation(tmp_path):
    train_tokenizer([TEXT], tmp_path / "tok.model", 600)
    preprocess([TEXT], tmp_path / "tok.model", tmp_path / "text", workers=1)
    topology.initialize(1)
    tokenizer = load_tokenizer(tmp_path / "tok.model")
    sizes = GeneratorConfig(seed_size=8, num_heads=2, num_knots=6, rank=8)
    config = ModelConfig(vocab_size=600, hidden_size=32, num_layers=1, num_attention_heads=4, generator=sizes)
    model = LanguageModel(config, ParallelConfig())
    initialize_weights(model, config, seed=1)
    data = DataConfig(prefixes=(str(tmp_path / "text"),), sequence_length=64, validation_fraction=0.3)
    _, domains = build_datasets(data, check_data(data), 8)
    (validation,) = domains.values()
    batches = validation_batches(10, len(validation), micro_batch_size=4)
    found = evaluate(model, loader(validation, batches, 0), token_bytes(tokenizer, 600), topology.device())
    assert model.training

    nats, tokens, text_bytes = 0.0, 0, 0
    model.eval()
    for index in (i for batch in batches for i in batch):
        sample = validation[index]
        with torch.no_grad():
            log_probabilities = model(sample["tokens"][None])[0].double().log_softmax(-1)
        nats -= log_probabilities.gather(1, sample["labels"][:, None]).sum().item()
        tokens += len(sample["labels"])
        # Counted from the pieces: "▁" is a space, <0xAB> a byte, a control piece nothing.
        for label in sample["labels"].tolist():
            piece = tokenizer._processor.id_to_piece(label)
            is_byte = len(piece) == 6 and piece.startswith("<0x")
            text_bytes += 1 if is_byte else 0 if piece == "</s>" else len(piece.replace("▁", " ").encode())
    assert (found.tokens, found.bytes) == (tokens, text_bytes)
    assert found.loss == pytest.approx(nats / tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)


def test_two_ranks_share_the_samples_and_sum_their_scores(two_ranks):
    """15 samples make one pass of 4 on each of two ranks: the first 8, as one process scores them."""
    alone = evaluation_run(1, 8)
    for found in two_ranks.run(evaluation_run, 2, 15):
        assert (found.tokens, found.bytes) == (alone.tokens, alone.bytes)
        assert found.loss == pytest.approx(alone.loss, rel=1e-6)
        assert found.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=1e-6)


def test_blended_scores_are_those_of_tokens_drawn_by_the_shares():
    """Equally many samples were scored of both; three tokens of four shall count from the first domain."""
    one = Evaluation(loss=2.0, bits_per_byte=2.0 / math.log(2) / 4, tokens=100, bytes=400)
    two = Evaluation(loss=6.0, bits_per_byte=6.0 / math.log(2) / 2, tokens=100, bytes=200)
    found = blended([one, two], [0.75, 0.25])
    assert found.loss == pytest.approx((300 * 2.0 + 100 * 6.0) / 400)
    assert found.bits_per_byte == pytest.approx((300 * 2.0 + 100 * 6.0) / math.log(2) / (300 * 4 + 100 * 2))
    assert (found.tokens, found.bytes) == (200, 600)
