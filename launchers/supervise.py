"""Run a job, and start it again after a fault: python launchers/supervise.py --auto_restart 3 -- deepspeed …

SIGTERM, SIGUSR1 or one Ctrl-C to this process makes the job save and stop; it is then not started again.
"""

from __future__ import annotations

import argparse
import sys

from data_prep.errors import UserError
from leviathan_ds.parallel.launch import exit_interrupted, exit_with
from leviathan_ds.parallel.supervision import Supervisor, run_dir_of


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--auto_restart", type=int, default=3, help="restarts at the most (default 3)")
    parser.add_argument(
        "--rendezvous_timeout_minutes",
        type=float,
        default=15.0,
        help="for a start until all ranks have met, with the building of index caches (default 15)",
    )
    parser.add_argument("--restart_delay_s", type=float, default=10.0, help="before a restart (default 10)")
    parser.add_argument(
        "--restart_stopped",
        action="store_true",
        help="start again also after a run that saved and stopped on request (code 75)",
    )
    options, rest = parser.parse_known_args(arguments[:split])
    if rest:
        raise UserError(
            f"unknown option {rest[0]}; the command comes after `--`, as in supervise.py -- deepspeed …"
        )
    command = arguments[split + 1 :]
    if not command:
        raise UserError("no command: give it after `--`, as in supervise.py --auto_restart 3 -- deepspeed …")
    return Supervisor(
        command,
        run_dir_of(command),
        options.auto_restart,
        60 * options.rendezvous_timeout_minutes,
        options.restart_stopped,
        options.restart_delay_s,
    ).run()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:
        exit_interrupted()
