"""The paper's comparisons: `python launchers/study.py run studies/NAME.yaml` and more, docs/studies.md.

plan lists the runs with sizes, tokens and predicted time; run trains those that are not done, one after the other;
collect writes their numbers as tables; report draws figures and writes the page; theorem demonstrates Theorem 1.1.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.cli import CommandParser, open_console, run


def build_parser() -> CommandParser:
    """The command line's options."""
    parser = CommandParser("python launchers/study.py", str(__doc__).splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, description: str) -> CommandParser:
        return commands.add_parser(name, prog=f"{parser.prog} {name}", description=description)

    def of_study(name: str, description: str, nargs: str | None = None) -> CommandParser:
        added = command(name, description)
        added.add_argument("study", type=Path, nargs=nargs, help="a study file, see studies/")
        added.add_argument(
            "--runs_dir", type=_from_here, default="runs/studies", help="RUNS_DIR/STUDY has its runs"
        )
        return added

    for name, description in (
        ("plan", "List the runs of a study with parameters, tokens and predicted time."),
        ("run", "Train the runs of a study that are not done, one after the other; again to go on."),
    ):
        added = of_study(name, description)
        added.add_argument("--only", default="*", help="runs whose names match, as 'iso_body/*' or '*-s1'")
    commands.choices["plan"].add_argument(
        "--slurm",
        type=Path,
        default=None,
        help="write a script that submits them, and their recipes below RUNS_DIR",
    )
    collecting = of_study("collect", "Measure what is not measured and write the tables of a study.")
    reporting = of_study("report", "Draw the figures of studies from their tables and write the page.", nargs="+")
    reporting.add_argument(
        "--page",
        type=Path,
        default=Path("docs/results.md"),
        help="the page to write, this project's own by default",
    )
    demonstrating = command("theorem", "Approximate smooth functions by sums of products of B-splines.")
    for added in (collecting, reporting, demonstrating):
        added.add_argument(
            "--results", type=Path, default=Path("docs/results"), help="folder of tables and figures"
        )
    measuring = command("measure", "Measure a finished run: losses by frequency, embeddings.")
    measuring.add_argument("run_dir", type=Path)
    return parser


def _from_here(text: str) -> Path:
    """Runs are started in the project's folder, wherever this command is."""
    return Path(text).absolute()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake, 1 if runs failed, 75 after a stop."""
    options = build_parser().parse_args(arguments)
    code = 0

    def execute() -> None:
        nonlocal code
        code = COMMANDS[options.command](options) or 0

    return run(execute) or code


def plan(options) -> None:
    from leviathan_ds import run_directory
    from leviathan_ds.studies import report, runner
    from leviathan_ds.studies.study import load

    study = load(options.study)
    folder = options.runs_dir / study.name
    runs = study.matching(options.only, runner.tuned_tries(study, folder))
    open_console().print(report.plan_table(study, runs))
    for lack in runner.lacking(study, folder, runs):  # a plan may be made before there are data
        print(f"before these can run: {lack}")
    if options.slurm is not None:
        due = [each for each in runs if not runner.finished(each, folder / each.name)]
        able = [each for each in due if runner.obstacle_to(each, folder / each.name) is None]
        ready = [each for each in able if each.missing is None]
        run_directory.write_text(options.slurm, runner.slurm_script(study, ready, folder))
        counts = f"{len(runs) - len(due)} are finished, {len(able) - len(ready)} wait for a tuned learning rate"
        counts += f", {len(due) - len(able)} diverged or have another recipe"
        print(f"wrote {options.slurm}: {len(ready)} jobs; {counts}")


def train(options) -> int:
    from leviathan_ds.studies.runner import run_study
    from leviathan_ds.studies.study import load

    study = load(options.study)
    return run_study(study, options.runs_dir / study.name, options.only, lambda line: print(line, flush=True))


def collect(options) -> int:
    from leviathan_ds.parallel.launch import EXIT_STOPPED, InUse
    from leviathan_ds.studies import results, runner
    from leviathan_ds.studies.study import load

    study = load(options.study)
    folder, output, failed = options.runs_dir / study.name, options.results / study.name, False
    for each in study.runs(runner.tuned_tries(study, folder)):  # trained elsewhere, as by a cluster's jobs
        run_dir = folder / each.name
        if runner.measured(run_dir) or each.missing:
            continue
        if not runner.finished(each, run_dir) or runner.obstacle_to(each, run_dir):
            continue
        try:
            with runner.reserved(run_dir):
                code = runner.measure_run(run_dir)
        except InUse:
            print(f"{each.name}: is being measured by another process")
            continue
        if code == EXIT_STOPPED:
            print(f"stopped in {each.name}; the same command goes on there")
            return code
        if code:
            print(f"{each.name}: could not be measured, see {run_dir}.log")
            failed = True
    rows = results.collect(study, folder, output)
    others = [row for row in rows if row["status"] != results.DONE]
    print(f"{output}: {len(rows) - len(others)} of {len(rows)} runs", end="")
    names = [results.name_of(row) for row in others]
    more = ", …" if len(names) > 3 else ""
    print(f"; {len(names)} missing: {', '.join(names[:3])}{more}" if names else "")
    return 1 if failed else 0


def report(options) -> None:
    from leviathan_ds.studies import report
    from leviathan_ds.studies.study import load

    report.write([load(each) for each in options.study], options.results, options.page)
    print(f"wrote {options.page}")


def theorem(options) -> None:
    from leviathan_ds.studies import report

    print(report.demonstrate_theorem(options.results))


def measure(options) -> None:
    from leviathan_ds.parallel import launch

    launch.share_cores_politely()
    launch.quiet_libraries()
    from leviathan_ds.studies import measure

    measure.write(options.run_dir)


COMMANDS = {
    "plan": plan,
    "run": train,
    "collect": collect,
    "report": report,
    "theorem": theorem,
    "measure": measure,
}

if __name__ == "__main__":
    sys.exit(main())
