"""Print what a recipe costs: parameters, FLOPs, memory and bytes communicated per GPU. Needs no torch and no GPU.

python launchers/describe.py --config recipes/leviathan_60m.yaml [--data_parallel_size 8] [--zero_stage 2]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal

from rich.console import Console
from rich.table import Column, Table

from leviathan_ds import accounting
from leviathan_ds.communication import communication
from leviathan_ds.config import Recipe
from leviathan_ds.recipe import build_parser, parse


def main(arguments: list[str]) -> int:
    parser = build_parser("Print a recipe's parameters, FLOPs per token and memory per GPU.")
    parser.add_argument("--data_parallel_size", type=int, default=1, help="copies of the model (default 1)")
    parser.add_argument("--zero_stage", type=Literal[0, 1, 2, 3], default=2, help="DeepSpeed ZeRO (default 2)")
    try:
        recipe, options = parse(parser, arguments)
        Console().print(describe(recipe, options.data_parallel_size, options.zero_stage))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def describe(recipe: Recipe, data_parallel_size: int, zero_stage: accounting.ZeroStage) -> Table:
    """The table of a recipe. Raises ValueError for an open vocabulary or a batch that does not divide."""
    model, training = recipe.model, recipe.training
    if model.vocab_size is None:
        raise ValueError("model.vocab_size is open; set it to your tokenizer's, as in --model.vocab_size 8192")
    if data_parallel_size < 1:
        raise ValueError(f"--data_parallel_size must be at least 1, got {data_parallel_size}")
    tp = recipe.parallel.tensor_model_parallel_size
    accumulation = recipe.gradient_accumulation_steps(tp * data_parallel_size)
    title = f"{model.embedding}, D {model.hidden_size}, {model.num_layers} layers"
    table = Table(Column(), Column(justify="right"), title=title, show_header=False)

    def section(title: str, rows: dict[str, str]) -> None:
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]", "")
        for name, value in rows.items():
            table.add_row("  " + name, value)

    count = accounting.count_parameters(model)
    stored = accounting.count_parameters(model, tp, padded=True)
    as_table = accounting.count_parameters(replace(model, embedding="dense_untied"))
    kind = "generator" if model.embedding == "leviathan" else "table"
    rows = {kind: count.embedding, "body": count.body, "head": count.head, "total": count.total}
    rows |= {"stored, vocabulary padded": stored.total, "an embedding table would have": as_table.embedding}
    section("parameters", {name: f"{value:,}" for name, value in rows.items()})

    flops = accounting.flops_per_token(model, recipe.data.sequence_length)
    parts = {kind: flops.embedding, "body": flops.body, "attention": flops.attention, "head": flops.head}
    parts |= {"total": flops.total}
    section("GFLOPs per token", {name: f"{value / 1e9:.4f}" for name, value in parts.items()})

    memory = accounting.estimate_memory(recipe, data_parallel_size, zero_stage)
    place = f"TP {tp}, DP {data_parallel_size}, ZeRO {zero_stage}, {training.precision}"
    gibibytes = {name: f"{value / 2**30:.2f}" for name, value in (vars(memory) | {"total": memory.total}).items()}
    section(f"GiB per GPU, estimated: {place}, recompute {training.recompute}", gibibytes)

    traffic = communication(recipe, zero_stage, tp * data_parallel_size)
    megabytes = {" ".join(key): f"{num_bytes / 1e6:,.1f}" for key, num_bytes in traffic.items() if num_bytes}
    section("MB that each GPU communicates in a step", megabytes or {"none": "0"})

    step_tokens = training.global_batch_size * recipe.data.sequence_length
    tokens = step_tokens * training.train_steps
    sequences = f"{training.micro_batch_size} × {data_parallel_size} × {accumulation} accumulated"
    rows = {"sequences per step": sequences, "tokens per step": f"{step_tokens:,}"}
    rows |= {"tokens": f"{tokens:,}", "FLOPs": f"{flops.total * tokens:.3e}"}
    section("training", {"steps": f"{training.train_steps:,}"} | rows)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
