"""Continue texts with a trained model: `python launchers/generate.py --checkpoint runs/NAME --prompt "…"`.

From a checkpoint of any tensor-parallel size (one process joins its parts) or an export, whose folder is named
instead.
"""

import sys
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from data_prep.cli import CommandParser, positive_int, run
from data_prep.errors import UserError


def build_parser() -> CommandParser:
    """The command line's options; the defaults are those of `leviathan_ds.export.generate.Sampling`."""
    parser = CommandParser("python launchers/generate.py", "Continue texts with a trained model.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a run (its last checkpoint), a checkpoint or an export")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="how the text begins; may be empty")
    source.add_argument(
        "--prompts", type=Path, help="a file with a prompt on each line, or .jsonl with a text each"
    )
    source.add_argument("--interactive", action="store_true", help="a prompt from each line typed; Ctrl-D ends")
    add("--max_new_tokens", type=int, default=200, help="stop here if the text does not end by itself")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top_k", type=int, default=0, help="draw among the k likeliest; 0: among all")
    add("--top_p", type=float, default=1.0, help="draw among the likeliest that have this probability together")
    add("--repetition_penalty", type=float, default=1.0, help="above 1: what has occurred becomes less likely")
    add("--seed", type=int, default=0, help="seed and number of the prompt decide what is drawn")
    add("--stop", action="append", default=[], help="end the text before this string; may be given several times")
    add("--batch_size", type=positive_int, default=8, help="prompts of a file that are continued together")
    add("--stream", action="store_true", help="print the text while it comes, one prompt after the other")
    add("--json", action="store_true", help="print a JSON object per prompt: prompt, text, tokens, finish_reason")
    add("--trust_remote_code", action="store_true", help="let an export run the modeling file that it brings")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake."""
    options = build_parser().parse_args(arguments)
    warnings.filterwarnings("ignore", module="megatron")  # it misses Transformer Engine, unused here
    return run(lambda: generate(options))


def generate(options) -> None:
    """Print what the model makes of the prompts."""
    from transformers.utils import logging

    from leviathan_ds.export import generate as texts
    from leviathan_ds.export.loaded import load_for_text

    if options.stream and options.json:
        raise UserError("--stream prints text and --json objects; take one of them")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
    sampling = texts.Sampling(**{name: getattr(options, name) for name in names}, stop=tuple(options.stop))
    one_by_one = options.stream or options.interactive
    if options.interactive:
        prompts = texts.typed_prompts(sys.stdin.buffer)
    elif options.prompts is not None:
        prompts = iter(texts.read_prompts(options.prompts))
    else:
        prompts = iter([texts.check_text(options.prompt)])
    llama, tokenizer = load_for_text(options.checkpoint, options.trust_remote_code)
    number = 0
    while batch := list(islice(prompts, 1 if one_by_one else options.batch_size)):
        for found in texts.generate(llama, tokenizer, batch, sampling, one_by_one and not options.json, number):
            if options.json:
                print(texts.json_line(found), flush=True)
            elif not one_by_one:
                print(found.prompt + found.text, flush=True)
        number += len(batch)


if __name__ == "__main__":
    sys.exit(main())
