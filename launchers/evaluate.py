"""Score a trained model: `python launchers/evaluate.py --checkpoint runs/NAME --data data/pile`.

Held-out loss, perplexity and bits per byte of a checkpoint or an export: overall, by dataset, by token frequency;
with --compare the difference to a second model. --tasks runs tasks of EleutherAI's harness on a checkpoint.
Under `deepspeed` or torchrun all ranks share the work.
"""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

from data_prep.cli import CommandParser, positive_int, run
from data_prep.errors import UserError
from leviathan_ds.export.evaluation_options import EvaluationOptions, SplitName
from leviathan_ds.parallel.launch import LaunchEnvironment, exit_with, quiet_libraries


def build_parser() -> CommandParser:
    """The command line's options."""
    parser = CommandParser("python launchers/evaluate.py", "Score a trained model on held-out text and on tasks.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a run (its last checkpoint), a checkpoint or an export")
    add("--compare", type=Path, help="another one, of the same tokenizer: where do the two differ?")
    add("--data", nargs="+", help="prefixes of datasets of the same tokenizer, or blend files (.yaml)")
    add("--split", choices=get_args(SplitName), help="which documents; all: every one of the dataset")
    add("--samples", type=positive_int, help="sequences of the training length per dataset, at most")
    add("--micro_batch_size", type=positive_int, help="sequences at once")
    add("--train_data", nargs="+", help="whose token counts make the deciles; default: the training's")
    add("--config", type=Path, help="the recipe that says what is held out; default: the checkpoint's own")
    add("--tasks", type=lambda text: text.split(","), help="tasks of the harness, a,b,c")
    add("--include_path", help="a folder with task files of your own")
    add("--limit", type=positive_int, help="examples of each task, at most")
    add("--tensor_model_parallel_size", type=positive_int, help="ranks that share a checkpoint's model")
    add("--trust_remote_code", action="store_true", help="let an export run the modeling file that it brings")
    add("--json", type=Path, help="write all figures here")
    defaults = {each.name: each.default for each in fields(EvaluationOptions) if each.default is not MISSING}
    parser.set_defaults(**defaults)
    add("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    return parser


def parse(arguments: Sequence[str] | None = None) -> EvaluationOptions:
    """What a command line asks for."""
    options = vars(build_parser().parse_args(arguments))
    del options["local_rank"]
    return EvaluationOptions(**options)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake."""
    options = parse(arguments)
    if LaunchEnvironment.read().local_rank == 0:
        return run(lambda: evaluate(options))
    try:
        evaluate(options)
    except UserError as error:
        exit_with(error)  # the node's first rank has said it
    return 0


def evaluate(options: EvaluationOptions) -> None:
    """Score; print and write on rank 0."""
    quiet_libraries()
    from leviathan_ds.export.evaluate import Evaluation
    from leviathan_ds.parallel import topology

    evaluation = Evaluation.prepare(options)
    topology.initialize(options.tensor_model_parallel_size)
    result = evaluation.run()
    if topology.rank() == 0:
        evaluation.publish(result)
    topology.shutdown()


if __name__ == "__main__":
    sys.exit(main())
