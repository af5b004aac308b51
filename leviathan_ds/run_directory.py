"""Where a run keeps its files, and how a finished checkpoint is told from an unfinished one.

RUN/recipe.yaml              the recipe as it was resolved; refuses another one
RUN/ds_config.json           DeepSpeed's configuration as it was filled in
RUN/tokenizer.model          the tokenizer of its data, or .json or .tiktoken by its kind
RUN/starts.jsonl             one line per start or resume: host, devices, versions, commit, data
RUN/wandb_id                 of the run's one wandb run, where wandb is on
RUN/tensorboard/             where run.tensorboard is on
RUN/traces/                  torch profiler traces of run.profile_steps
RUN/metrics.jsonl            one line per step and per validation
RUN/faults.jsonl             one line per skipped step: why, and its samples; per rollback; per stop
RUN/summary.json             what the run reached
RUN/lock                     held by the job that trains here
RUN/met                      written anew when all ranks of a start have met
RUN/stop                     made by anybody who wants the run to save and stop
RUN/checkpoints/step_00000100/     written aside, renamed when whole
    manifest.json            sizes and CRC-32s of all files: its presence after the rename means complete
    recipe.yaml              as above
    trainer_state.json       step, consumed samples, data, parallel layout, wandb id
    weights_tp00.safetensors weights of each tensor-parallel rank, whatever the ZeRO stage
    ...                      DeepSpeed's own files: optimizer states, random states
RUN/checkpoints/damaged_step_…     failed its checksums at a resume; kept for a look, and no checkpoint any more
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.files import TOKENIZER_SUFFIXES, TokenizerKind, written_aside

RECIPE, DS_CONFIG = "recipe.yaml", "ds_config.json"
TOKENIZERS: dict[TokenizerKind, str] = {kind: f"tokenizer{suffix}" for kind, suffix in TOKENIZER_SUFFIXES.items()}
METRICS, SUMMARY, WANDB_ID = "metrics.jsonl", "summary.json", "wandb_id"
FAULTS = "faults.jsonl"
STARTS, TENSORBOARD, TRACES = "starts.jsonl", "tensorboard", "traces"
LOCK, MET, STOP = "lock", "met", "stop"
PROBE = ".probe_"  # begins the name of a file that is there while nodes look whether they share the directory
CHECKPOINTS, MANIFEST, TRAINER_STATE = "checkpoints", "manifest.json", "trainer_state.json"

_BLOCK_BYTES = 1 << 22
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what reading a broken manifest raises
_logger = logging.getLogger(__name__)


def path_of(option: str | None, recipe_file: Path) -> Path:
    """The run directory: what --run_dir says, else runs/RECIPE."""
    return Path(option) if option else Path("runs") / recipe_file.stem


def tokenizer_of(run: Path) -> Path | None:
    """The run's tokenizer, of whatever kind; None where it has none yet."""
    return next((run / name for name in TOKENIZERS.values() if (run / name).is_file()), None)


@dataclass(frozen=True)
class TrainerState:
    """What the trainer must know to go on, beside the engine's own state."""

    step: int
    consumed_samples: int
    layout: dict[str, Any]  # tensor and data parallel sizes, ZeRO stage, precision
    data_fingerprints: list[str]
    wandb_id: str | None
    guard: dict[str, Any] = field(default_factory=dict)  # training/faults.StepGuard.state
    imported_from: str | None = None  # the model whose weights the run began with; at step 0 there is nothing else

    @property
    def weights_only(self) -> bool:
        """Whether nothing was trained yet: no optimizer states and no random states."""
        return self.step == 0 and self.imported_from is not None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state in a complete checkpoint."""
    return TrainerState(**json.loads((checkpoint / TRAINER_STATE).read_text()))


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints(run_dir: Path) -> list[tuple[Path, str | None]]:
    """Every checkpoint of a run, oldest first, with why it cannot be used (None: it can)."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    named = sorted(path for path in folder.iterdir() if re.fullmatch(r"step_\d{8,}", path.name))
    return [(path, incompleteness(path)) for path in named]


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints whose files are all there with the sizes that were written, oldest first."""
    return [path for path, reason in checkpoints(run_dir) if reason is None]


def incompleteness(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if sizes, and the content of TRAINER_STATE, say that it can."""
    try:
        sizes = _manifest(checkpoint)["bytes"].items()
    except _BROKEN as error:
        return _broken_manifest(checkpoint, error)
    for name, size in sizes:
        try:
            found = (checkpoint / name).stat().st_size
        except OSError:
            return f"{checkpoint / name}: missing"
        if found != size:
            return f"{checkpoint / name}: {found} bytes, {size} were written"
    return damage(checkpoint, lambda names: [name for name in names if name == TRAINER_STATE])


def damage(checkpoint: Path, choose: Callable[[list[str]], list[str]] = lambda names: names) -> str | None:
    """Which file of a complete checkpoint no longer holds what was written, or None. Reads the files.

    choose: of the names of all files, largest first, those to look at. A file without a recorded checksum passes.
    """
    try:
        manifest = _manifest(checkpoint)
        sizes, recorded = manifest["bytes"], manifest.get("crc32", {})
        names = sorted(sizes, key=lambda name: (-sizes[name], name))
    except _BROKEN as error:
        return _broken_manifest(checkpoint, error)
    chosen = [name for name in choose(names) if name in recorded]

    def changed(name: str) -> str | None:
        try:
            same = checksum(checkpoint / name) == recorded[name]
        except OSError as error:
            return str(error)
        return None if same else f"{checkpoint / name}: its content has changed since it was written"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # zlib lets go of the GIL
        return next((reason for reason in pool.map(changed, chosen) if reason is not None), None)


def damage_of_share(checkpoint: Path, rank: int, ranks: int) -> str | None:
    """`damage` of this rank's part of the files, so that all ranks together read each file once."""
    return damage(checkpoint, lambda names: names[rank::ranks])


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value


def write_manifest(checkpoint: Path, files: dict[str, tuple[int, int]]) -> None:
    """Record size and CRC-32 of every file of a checkpoint, by its name in the folder."""
    manifest = {
        "bytes": {name: size for name, (size, _) in sorted(files.items())},
        "crc32": {name: crc32 for name, (_, crc32) in sorted(files.items())},
    }
    write_text(checkpoint / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _manifest(checkpoint: Path) -> Any:
    return json.loads((checkpoint / MANIFEST).read_text())


def _broken_manifest(checkpoint: Path, error: Exception) -> str:
    return f"{checkpoint / MANIFEST}: {str(error) or 'is broken'}"


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint a name by which nothing takes it for a checkpoint; returns its new path."""
    name = f"damaged_{checkpoint.name}"
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    aside = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    return checkpoint.rename(aside)


def find_checkpoint(path: Path, damage: Callable[[Path], str | None] = lambda checkpoint: None) -> Path:
    """The checkpoint that a user means by a run directory (its last good one) or by its own folder.

    damage: what is wrong with the content of a complete checkpoint, None if nothing is. Raises UserError naming
    the path when there is none; of a run, newer ones that cannot be used are named in a warning.
    """
    if (path / TRAINER_STATE).is_file():
        reason = incompleteness(path) or damage(path)
        if reason is not None:
            raise UserError(f"the checkpoint {path} cannot be used ({reason}); choose another one")
        return path
    for checkpoint, incomplete in reversed(checkpoints(path)):
        reason = incomplete or damage(checkpoint)
        if reason is None:
            return checkpoint
        _logger.warning("passing over a checkpoint: %s", reason)
    problem = "holds no complete checkpoint" if path.exists() else "does not exist"
    raise UserError(f"{path} {problem}; give a run directory or one of its checkpoints")


def run_of(checkpoint: Path) -> Path:
    """The run directory that a checkpoint lies in."""
    return checkpoint.resolve().parent.parent


def write_text(path: Path, content: str) -> None:
    """Write a small text file so that a reader sees the old one or the new one, never a part."""
    with written_aside(path) as file:
        file.write(content.encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, [] without one. Half a line, left by a kill, is passed over."""
    objects = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            objects.append(json.loads(line))
        except ValueError:
            continue
    return [each for each in objects if isinstance(each, dict)]


def drop_later_lines(path: Path, step: int) -> None:
    """Take the lines of steps after `step`, which are run again, out of a JSON-lines file with a "step" in each.

    Half a line, left by a kill, goes too. At step 0 nothing stays: the run begins anew, with its validation.
    """
    if not path.is_file():
        return

    def stays(line: str) -> bool:
        try:
            return step > 0 and json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            return False

    content = path.read_text(errors="replace")
    kept = "".join(line + "\n" for line in content.splitlines() if stays(line))
    if kept != content:
        write_text(path, kept)


def update_summary(run_dir: Path, **values: Any) -> dict[str, Any]:
    """Merge values into RUN/summary.json and return it."""
    path = run_dir / SUMMARY
    summary = {}
    if path.is_file():
        try:
            summary = dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            _logger.warning("%s is not a JSON object; written anew", path)
    summary.update(values)
    write_text(path, json.dumps(summary, indent=2) + "\n")
    return summary
