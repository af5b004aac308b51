"""Continue a text with a trained model: `python launchers/generate.py --checkpoint runs/NAME --prompt "…"`."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from data_prep.cli import CommandParser


def build_parser() -> CommandParser:
    """The command line's options; the defaults are those of `leviathan_ds.export.generate.Sampling`."""
    parser = CommandParser("python launchers/generate.py", "Continue a text with a trained model.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a run (its last checkpoint) or one of its checkpoints")
    add("--prompt", required=True, help="how the text begins; may be empty")
    add("--max_new_tokens", type=int, default=200, help="stop here if the text does not end by itself")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top_k", type=int, default=0, help="draw among the k likeliest; 0: among all")
    add("--top_p", type=float, default=1.0, help="draw among the likeliest that have this probability together")
    add("--seed", type=int, default=0, help="the same seed gives the same text")
    add("--stream", action="store_true", help="print the text while it comes")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for the user's mistake."""
    options = build_parser().parse_args(arguments)

    warnings.filterwarnings("ignore", module="megatron")  # it misses Transformer Engine, unused here
    from transformers.utils import logging

    from leviathan_ds.export.generate import Sampling, generate, prompt_ids
    from leviathan_ds.export.llama import to_llama
    from leviathan_ds.parallel import topology
    from leviathan_ds.trained_model import find_trained_model

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        sampling = Sampling(**{name: getattr(options, name) for name in names})
        trained = find_trained_model(options.checkpoint)
        prompt_ids(trained.tokenizer, options.prompt)
        llama = to_llama(trained).to(topology.device())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = generate(llama, trained.tokenizer, options.prompt, sampling, options.stream)
    if not options.stream:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
