"""README.md of an export: what the run directory records of the model, and nothing that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory, software
from leviathan_ds.accounting import count_parameters
from leviathan_ds.export.llama import Format
from leviathan_ds.export.verify import Parity
from leviathan_ds.trained_model import TrainedModel

MODEL_CARD = "README.md"

_COUNTS = ("documents", "tokens", "bytes")
_HEADER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- {tag}
---
"""
_LOADING = {
    "llama": """\
A plain Llama: it loads without code of its own. The run's input embeddings are computed by a generator from the
token id; here they are written out as a table.
""",
    "dense": "A plain Llama: it loads without code of its own.\n",
    "leviathan": """\
Loads with `trust_remote_code=True` (`modeling_leviathan.py` lies here), or without it after
`import leviathan_ds.hf`. Input embeddings are computed by a generator; the first inference computes the whole
table once, `model.drop_table()` frees it.
""",
}
_LIMITS = """\
## Intended use and limits

A pretrained base model: it continues text. It was not tuned to follow instructions and not aligned, and nothing
was measured of it but what stands above. It reproduces what its training text holds, errors and bias included.
Contexts longer than {length} tokens were not trained on. This card names no licence: that of the training data
decides what its publisher may grant.
"""


def model_card(
    trained: TrainedModel, form: Format, name: str, dtype: str, parity: Parity, rounding: Parity | None
) -> str:
    """The card's Markdown."""
    state = run_directory.read_state(trained.checkpoint)
    recipe = trained.recipe
    kind = form if recipe.model.embedding == "leviathan" else "dense"
    parts = [
        _HEADER.format(tag="leviathan" if recipe.model.embedding == "leviathan" else "llama"),
        f"# {name}\n",
        _LOADING[kind],
        _table(
            "",
            {
                "embedding": recipe.model.embedding,
                "vocabulary": f"{recipe.model.vocabulary:,}",
                "layers × hidden size": f"{recipe.model.num_layers} × {recipe.model.hidden_size}",
                "parameters as trained": f"{count_parameters(recipe.model).total:,}",
                "dtype": dtype,
                "tokenizer": f"{trained.tokenizer.kind}, sha256 {trained.tokenizer.fingerprint}",
            },
        ),
        _training(trained, state),
        _data(trained, state),
        _metrics(trained, state),
        _export(parity, rounding),
        _LIMITS.format(length=recipe.data.sequence_length),
        "## Recipe\n\n```yaml\n" + recipes.to_yaml(recipe) + "```\n",
    ]
    return "\n".join(part for part in parts if part)


def _table(title: str, rows: dict[str, Any]) -> str:
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    return (f"## {title}\n\n" if title else "") + "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _training(trained: TrainedModel, state: run_directory.TrainerState) -> str:
    length = trained.recipe.data.sequence_length
    starts = _starts(trained)
    commits = sorted({str(start["git"]) for start in starts if start.get("git")})
    devices = sorted({f"{start['world_size']} × {start['device']}" for start in starts if "device" in start})
    rows = {
        "checkpoint": trained.checkpoint.name,
        "optimizer steps": f"{state.step:,} of {trained.recipe.training.train_steps:,}",
        "tokens seen": f"{state.consumed_samples * length:,} (sequences of {length})",
    }
    if state.imported_from:
        rows["weights before the first step"] = f"imported from {state.imported_from}"
    if commits:
        rows["trained by"] = f"leviathan_ds at {', '.join(commits)}"
    if devices:
        rows["devices"] = ", ".join(devices)
    return _table("Training", rows)


def _starts(trained: TrainedModel) -> list[dict[str, Any]]:
    return run_directory.read_lines(trained.run / run_directory.STARTS)


def _data(trained: TrainedModel, state: run_directory.TrainerState) -> str:
    mix = [data for start in _starts(trained)[-1:] for data in start.get("data", [])]
    if not mix:
        lines = [f"- dataset {fingerprint}" for fingerprint in state.data_fingerprints]
        return "\n".join(["## Data", "", *lines, ""]) if lines else ""
    lines, domains = ["## Data", ""], dict[str, list[int]]()
    for data in mix:
        lines.append(
            f"- `{Path(data['prefix']).name}`: {data['documents']:,} documents, {data['tokens']:,} tokens, "
            f"{data['share']:.1%} of the samples, fingerprint {data['fingerprint']}"
        )
        for name, counts in data["domains"].items():
            before = domains.get(name, [0, 0, 0])
            domains[name] = [old + counts[key] for old, key in zip(before, _COUNTS, strict=True)]
    if domains:
        lines += ["", "| domain | documents | tokens | bytes of text |", "|---|---|---|---|"]
    for name, counts in domains.items():
        lines.append(f"| {name} | " + " | ".join(f"{count:,}" for count in counts) + " |")
    return "\n".join([*lines, ""])


def _metrics(trained: TrainedModel, state: run_directory.TrainerState) -> str:
    lines = run_directory.read_lines(trained.run / run_directory.METRICS)
    last = [line for line in lines if "val_loss" in line and line.get("step", state.step + 1) <= state.step][-1:]
    if not last:
        return ""
    rows = {key: f"{value:.4f}" for key, value in last[0].items() if key != "step" and isinstance(value, float)}
    return _table(f"Held-out documents of the same data, measured at step {last[0]['step']:,}", rows)


def _export(parity: Parity, rounding: Parity | None) -> str:
    commit = software.commit()
    rows: dict[str, Any] = {"exported by": f"leviathan_ds at {commit}"} if commit else {}
    rows |= {
        "positions of real text compared with the trainer": f"{parity.positions:,}",
        "largest logit difference": f"{parity.max_logit_difference:.2e}",
        "KL(trainer ‖ export), nats": f"{parity.kl_divergence:.2e}",
    }
    if rounding is not None:
        rows |= {
            "largest logit difference to the unrounded trainer": f"{rounding.max_logit_difference:.2e}",
            "KL(unrounded trainer ‖ export), nats": f"{rounding.kl_divergence:.2e}",
        }
    return _table("Export", rows)
