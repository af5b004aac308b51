"""Pretrain a model: deepspeed launchers/pretrain.py --ds_config ds_configs/zero2.json [--config RECIPE]"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from data_prep.errors import UserError
from data_prep.files import locked
from data_prep.sample import DEMO_PREFIX, is_demo, prepare_demo
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.parallel.launch import (
    LaunchEnvironment,
    StartFailure,
    claimed,
    exit_interrupted,
    exit_with,
    hear_stop_signals,
    quiet_interrupts,
    quiet_libraries,
    share_cores_politely,
)

DEMO_RECIPE = Path(__file__).parent.parent / "recipes" / "demo.yaml"


def main(arguments: list[str]) -> int:
    hear_stop_signals()
    environment = LaunchEnvironment.read()
    parser = recipes.build_parser(str(__doc__))
    parser.add_argument("--ds_config", type=str, required=True, help="DeepSpeed's JSON, see ds_configs/")
    parser.add_argument("--run_dir", type=str, default=None, help="where the run is kept; default runs/RECIPE")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    recipe, options = recipes.parse(parser, arguments, default_config=DEMO_RECIPE)
    run_dir = run_directory.path_of(options.run_dir, Path(options.config or DEMO_RECIPE))

    share_cores_politely()
    quiet_interrupts()
    quiet_libraries()
    from leviathan_ds.parallel import topology
    from leviathan_ds.training import job, loop

    if is_demo(recipe.data.prefixes):
        # Mistakes come to light before the minutes of preparing.
        job.check_configuration(recipe, Path(options.ds_config), environment.world_size)
        with locked(DEMO_PREFIX.with_name("prepare.lock")):
            prepare_demo()

    checked = job.prepare(recipe, Path(options.ds_config), run_dir, environment.world_size)
    # One start at a time in a run directory, on whatever machines: rank 0 holds it.
    with held(run_dir) if environment.rank == 0 else nullcontext():
        if environment.rank == 0:
            job.check_run_dir(run_dir, checked.recipe)  # another may have begun a run here in the meantime
        code = loop.run(checked)
    # Not after a failure: the other ranks may be waiting in a collective, and leaving would wait for them.
    topology.shutdown()
    return code


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """The run directory for this start alone. A request to stop is forgotten before, and after it was met."""
    stop = run_dir / run_directory.STOP
    with claimed(run_dir / run_directory.LOCK):
        stop.unlink(missing_ok=True)
        yield
        stop.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, StartFailure) as error:
        exit_with(error)
    except KeyboardInterrupt:
        exit_interrupted()
