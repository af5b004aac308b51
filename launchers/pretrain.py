"""Pretrain a model: deepspeed launchers/pretrain.py --ds_config ds_configs/zero2.json [--config RECIPE]"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

from data_prep.errors import UserError
from data_prep.sample import DEMO_PREFIX, prepare_demo
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.parallel.launch import (
    LaunchEnvironment,
    claimed,
    exit_interrupted,
    exit_with,
    locked,
    quiet_interrupts,
    quiet_libraries,
    share_cores_politely,
)

DEMO_RECIPE = Path(__file__).parent.parent / "recipes" / "demo.yaml"


def main(arguments: list[str]) -> int:
    environment = LaunchEnvironment.read()
    parser = recipes.build_parser(str(__doc__))
    parser.add_argument("--ds_config", type=str, required=True, help="DeepSpeed's JSON, see ds_configs/")
    parser.add_argument("--run_dir", type=str, default=None, help="where the run is kept; default runs/RECIPE")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    recipe, options = recipes.parse(parser, arguments, default_config=DEMO_RECIPE)
    run_dir = Path(options.run_dir or Path("runs") / Path(options.config or DEMO_RECIPE).stem)

    share_cores_politely()
    quiet_interrupts()
    quiet_libraries()
    from leviathan_ds.parallel import topology
    from leviathan_ds.training import job, loop

    if options.config is None and recipe.data.prefixes == (str(DEMO_PREFIX),):
        # Mistakes come to light before the minutes of preparing.
        job.check_configuration(recipe, Path(options.ds_config), environment.world_size)
        with locked(DEMO_PREFIX.with_name("prepare.lock")):
            prepare_demo()

    checked = job.prepare(recipe, Path(options.ds_config), run_dir, environment.world_size)
    # One start at a time in a run directory, on whatever machines: rank 0 holds it.
    with claimed(run_dir / run_directory.LOCK) if environment.rank == 0 else nullcontext():
        code = loop.run(checked)
    # Not after a failure: the other ranks may be waiting in a collective, and leaving would wait for them.
    topology.shutdown()
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:
        exit_interrupted()
