"""Chrome traces of chosen steps by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from leviathan_ds import run_directory
from leviathan_ds.parallel import engine as engines
from leviathan_ds.parallel import topology
from leviathan_ds.training.checkpoint_writer import attempt
from leviathan_ds.training.step_log import StepLog


@contextmanager
def traced(run_dir: Path, step: int, profile_steps: tuple[int, ...], log: StepLog) -> Iterator[None]:
    """Trace the block if `step` is among `profile_steps`; otherwise do nothing.

    The ranks of the first copy of the model (data-parallel rank 0) each write
    RUN/traces/step_XXXXXXXX_rankXXXXX.json.gz, for chrome://tracing or ui.perfetto.dev. Writing is no step's
    time; the tracing itself slows the step.
    """
    if step not in profile_steps or topology.data_parallel_rank() > 0:
        yield
        return
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
        engines.synchronize()  # the step's kernels belong to it
    with log.paused():
        name = f"{run_directory.checkpoint_name(step)}_rank{topology.rank():05d}.json.gz"
        path = run_dir / run_directory.TRACES / name

        def write() -> None:
            path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))

        if reason := attempt(write):
            print(f"the trace {name} could not be written: {reason}; the run goes on", flush=True)
