"""A start that was killed never makes the next one hang (DeepSpeed compiles operators at first use)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def run(code: str, **environment: str) -> str:
    import os

    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_no_operator_is_compiled_at_a_start(tmp_path):
    """The shared-memory collective takes a minute to build and leaves a lock behind when killed."""
    code = """
        import deepspeed
        import torch
        from leviathan_ds.config import GeneratorConfig, ModelConfig, Recipe, TrainingConfig
        from leviathan_ds.parallel import ds_config, topology
        from leviathan_ds.training import loop
        from pathlib import Path

        topology.initialize(1)
        sizes = GeneratorConfig(seed_size=4, num_heads=1, num_knots=4, rank=2)
        model = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_attention_heads=2, generator=sizes)
        training = TrainingConfig(micro_batch_size=2, global_batch_size=2, precision="fp32")
        recipe = Recipe(model=model, training=training)
        path = Path("ds_configs/zero2.json")
        engine, _ = loop.build_engine(recipe, ds_config.fill(ds_config.read(path), recipe, 1, path))
        assert deepspeed.comm.is_initialized()
    """
    run(code, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert not list(tmp_path.rglob("*")), "something was compiled"


def test_a_stale_build_lock_of_the_cpu_adam_does_not_hang():
    """torch waits for ever on a bare lock file; ours is the operating system's and dies with its holder."""
    code = """
        from pathlib import Path
        import os
        from leviathan_ds.parallel import engine
        engine._build_cpu_adam()  # so that the build folder is there
        root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        built = next(root.glob("**/cpu_adam"))
        (built / "lock").touch()
        print(built / "lock")
    """
    lock = Path(run(code).strip().splitlines()[-1])
    assert lock.is_file()
    run("from leviathan_ds.parallel import engine; engine._build_cpu_adam()")
    assert not lock.is_file()
