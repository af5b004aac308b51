"""Examine a cluster for a run before it costs money: nodes, software, environment, data, disks, network.

deepspeed --hostfile H launchers/doctor.py --ds_config ds_configs/zero2.json --config RECIPE [--run_dir RUN]
python launchers/doctor.py --ds_config …             this machine alone, one process
python launchers/doctor.py --write_env_file PATH     this shell's variables as a file for DS_ENV_FILE

Prints a table, and for all that is wrong a sentence with the way out; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from data_prep.errors import UserError
from leviathan_ds import recipe as recipes
from leviathan_ds import run_directory
from leviathan_ds.parallel.launch import (
    LaunchEnvironment,
    StartFailure,
    exit_interrupted,
    exit_with,
    quiet_interrupts,
    quiet_libraries,
    share_cores_politely,
)

DEMO_RECIPE = Path(__file__).parent.parent / "recipes" / "demo.yaml"


def main(arguments: list[str]) -> int:
    launched = LaunchEnvironment.read()
    parser = recipes.build_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--ds_config", type=str, default=None, help="DeepSpeed's JSON, see ds_configs/")
    parser.add_argument("--run_dir", type=str, default=None, help="the run's directory; default runs/RECIPE")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    parser.add_argument("--timeout_s", type=float, default=300, help="to wait for ranks that have not come")
    parser.add_argument("--write_env_file", type=str, default=None, help="write the variables to forward, and end")
    recipe, options = recipes.parse(parser, arguments, default_config=DEMO_RECIPE)
    if options.write_env_file is not None:
        return write_env_file(Path(options.write_env_file))
    if options.ds_config is None:
        raise UserError("--ds_config is missing: name the run's, such as ds_configs/zero2.json")
    run_dir = run_directory.path_of(options.run_dir, Path(options.config or DEMO_RECIPE))

    share_cores_politely()
    quiet_interrupts()
    quiet_libraries()
    from leviathan_ds.doctor import examination, facts
    from leviathan_ds.parallel import topology

    plan = facts.plan(recipe, Path(options.ds_config), run_dir, launched.world_size)
    topology.initialize(1, options.timeout_s / 60)
    findings = examination.examination(plan)
    failed = any(finding.status == "failed" for finding in findings)
    if topology.rank() == 0:
        examination.report(findings)
        print("failed: not fit for this run" if failed else "fit for this run")
    topology.barrier()  # the launcher kills all as soon as one has failed: not before the table is out
    topology.shutdown()
    return int(failed)


def write_env_file(path: Path) -> int:
    from leviathan_ds.doctor import environment

    names = environment.write_env_file(path, os.environ)
    print(f"{path}: {', '.join(names) or 'nothing to forward'}; use DS_ENV_FILE={path.absolute()} deepspeed …")
    secrets = [name for name in names if environment.is_secret(name)]
    if secrets:
        print(f"note: deepspeed prints the values of {', '.join(secrets)} unless started with --log_level warning")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, StartFailure) as error:
        exit_with(error)
    except KeyboardInterrupt:
        exit_interrupted()
