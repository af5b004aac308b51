"""The trainer against transformers' LlamaForCausalLM of the same shape, tokens and DeepSpeed configuration.

    python benchmarks/peer.py [--repeats 5] [--precision bf16] [--compile]

D = 512, 8 layers, V = 200,376, sequence 512, 8 sequences (4,096 tokens) a step. The peer is what a user would
otherwise write: a Llama with an untied table, its own loss, the same `deepspeed.initialize`. The arms alternate in
one process; peak memory, of model, optimizer and two steps, is taken in a fresh process for each. Targets: at
least 1.10 times its tokens per second and at most 0.5 times its peak memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import deepspeed
from measure import alternate, in_fresh_process, peak_memory_mb, ratio, report
from step import filled_config, options_of, recipe_of, tokens_per_step, trainer_step, zipf_batches

from leviathan_ds.parallel import topology

PEER = "transformers Llama, untied"


def peer_step(options: argparse.Namespace) -> Callable[[], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    recipe = recipe_of(options, "dense_untied", compiled=False)
    model = recipe.model
    config = LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        max_position_embeddings=options.sequence_length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    llama = LlamaForCausalLM(config).to(topology.device())
    engine, *_ = deepspeed.initialize(
        model=llama,
        model_parameters=llama.parameters(),  # pyright: ignore[reportArgumentType]
        config=filled_config(options, recipe),
        dist_init_required=False,
    )
    batches = itertools.cycle(zipf_batches(options, options.micro_batches))

    def step() -> None:
        for _ in range(options.micro_batches):
            batch = next(batches).to(topology.device())
            logits = engine(input_ids=batch.tokens).logits
            # The tokens that the trainer predicts, by the loss that transformers calls.
            loss = llama.loss_function(logits, labels=None, shift_labels=batch.labels, vocab_size=model.vocabulary)
            engine.backward(loss)
            engine.step()

    return step


ARMS: dict[str, Callable[[argparse.Namespace], Callable[[], Any]]] = {
    PEER: peer_step,
    "leviathan": lambda options: trainer_step(options, recipe_of(options, "leviathan", options.compile)),
}


def peak(arm: str, options: argparse.Namespace) -> float:
    topology.initialize(1)

    def build_and_step_twice() -> None:
        step = ARMS[arm](options)
        step()
        step()

    return peak_memory_mb(build_and_step_twice)


def main() -> None:
    options = options_of(argparse.ArgumentParser(description=__doc__))
    peaks = {arm: in_fresh_process(peak, arm, options) for arm in ARMS}
    topology.initialize(1)
    times = alternate({arm: build(options) for arm, build in ARMS.items()}, options.repeats)
    for arm in ARMS:
        seconds = statistics.median(times[arm])
        report(
            "peer",
            arm=arm,
            precision=options.precision,
            compile=options.compile,
            seconds=seconds,
            tokens_per_s=tokens_per_step(options) / seconds,
            tokens_per_s_ratio=1 / ratio(times, arm, PEER),
            peak_mb=peaks[arm],
            memory_ratio=peaks[arm] / peaks[PEER],
        )
    topology.shutdown()


if __name__ == "__main__":
    main()
