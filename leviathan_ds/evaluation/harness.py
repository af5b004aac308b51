"""The trainer's model for EleutherAI's lm-evaluation-harness: `LeviathanLM`, registered there as "leviathan".

Any tensor-parallel degree, ZeRO stage and number of ranks: all ranks call the same methods with all requests, the
data-parallel ranks share the passes, and all get all answers.

A context begins with an end-of-document id, as a document does in training: what `lm_eval --model hf` does of an
export with `add_bos_token=True`. (Only `loglikelihood_rolling` equals that without it: with it, `hf` scores
the prefix too.)
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from data_prep.errors import UserError, one_line
from data_prep.tokenizers import Tokenizer
from leviathan_ds.parallel import topology
from leviathan_ds.parallel.agreement import of_all_ranks
from leviathan_ds.trained_model import find_trained_model

try:
    from lm_eval import utils as harness_utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
except ModuleNotFoundError as error:
    raise UserError(f"tasks need EleutherAI's harness ({error}); pip install 'leviathan_ds[eval]'") from None

SAMPLE_TASKS = Path(__file__).parent / "tasks"
"""The tasks that ship, made of the sample corpus."""

Request = tuple[Any, list[int], list[int]]  # whatever it was made of, ids of context and continuation
Answer = tuple[float, bool]  # log-likelihood, and whether greedy decoding gives it

logging.getLogger("lm_eval").setLevel(logging.ERROR)
# For standard errors it would fork a pool: a fork of a process with threads, as every rank is, can hang.
os.environ["DISABLE_MULTIPROC"] = "1"


class LeviathanLM(TemplateLM):
    """A language model of the trainer, or the engine around it, as the harness sees one.

    rank and world_size stay the base class's 0 and 1: the harness hands all requests to every rank.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, max_length: int, batch_size: int = 8) -> None:
        """max_length: ids that the model reads at once, the training length; batch_size: sequences a pass."""
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self.max_length, self.batch_size = max_length, batch_size

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: Any = None) -> LeviathanLM:
        """Of `checkpoint`, a run or one of its checkpoints: `simple_evaluate(model="leviathan", model_args=…)`.

        Needs `topology.initialize`.
        """
        trained = find_trained_model(Path(arg_dict["checkpoint"]))
        batch_size = (additional_config or {}).get("batch_size") or 8
        return cls(trained.build(), trained.tokenizer, trained.recipe.data.sequence_length, int(batch_size))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Any = None) -> LeviathanLM:
        return cls.create_from_arg_obj(harness_utils.simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        prefix = [] if add_special_tokens is False else [self.eot_token_id]
        return [*prefix, *self._tokenizer.encode(string)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Answer]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[Answer]:
        """Of each continuation; the context loses its beginning where both exceed max_length + 1 ids.

        Raises UserError for a continuation that is longer than max_length alone.
        """
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise UserError(
                f"a task scores a continuation of {longest} tokens, the model reads {self.max_length}; take "
                "another task, or a model of longer training sequences"
            )
        whole = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        by_length = sorted(range(len(whole)), key=lambda place: -len(whole[place]))
        batches = [by_length[i : i + self.batch_size] for i in range(0, len(by_length), self.batch_size)]
        answers: dict[int, Answer] = {}
        size, rank = topology.data_parallel_size(), topology.data_parallel_rank()
        for first in range(0, len(batches), size):
            # The same number of passes on every rank; a batch too many is scored twice.
            batch = batches[min(first + rank, len(batches) - 1)]
            losses, likeliest = self._scores([whole[place] for place in batch])
            for row, place in enumerate(batch):
                continuation, end = requests[place][2], len(whole[place]) - 1
                scored = slice(end - len(continuation), end)
                answers[place] = (
                    -float(losses[row, scored].double().sum()),
                    likeliest[row, scored].tolist() == continuation,
                )
        answers = {place: answer for each in of_all_ranks(answers) for place, answer in each.items()}
        return [answers[place] for place in range(len(requests))]

    @torch.no_grad()
    def _scores(self, rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, s] on the CPU, of each row's ids but the first: the loss, and the id that the model finds likeliest.

        Rows are padded at the end, where causal attention does not look.
        """
        shards = topology.tensor_parallel_size()  # sequence parallelism wants whole parts
        width = -(-(max(map(len, rows)) - 1) // shards) * shards
        ids = torch.full((len(rows), width + 1), self.eot_token_id)
        for row, values in zip(ids, rows, strict=True):
            row[: len(values)] = torch.tensor(values)
        ids = ids.to(topology.device())
        scores = self._model(ids[:, :-1], ids[:, 1:], reduction="none")
        return scores.losses.cpu(), scores.likeliest.cpu()

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Of whole texts, in windows of max_length that do not overlap but in their context."""
        owners: list[int] = []
        windows: list[Request] = []
        for place, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in harness_utils.get_rolling_token_windows(ids, self.eot_token_id, self.max_length, 1):
                owners.append(place)
                windows.append((None, *harness_utils.make_disjoint_window(window)))
        sums = [0.0] * len(requests)
        for place, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[place] += value
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations, each pass over the whole text so far: the trainer's model keeps no KV cache.

        All data-parallel ranks do the same, and take rank 0's tokens. Raises UserError for a task that samples.
        """
        continuations = [self._begin(*request.args) for request in requests]
        for first in range(0, len(continuations), self.batch_size):
            going = continuations[first : first + self.batch_size]
            while going := [each for each in going if not self._is_over(each)]:
                _, likeliest = self._scores([[*each.context, *each.answer, self.eot_token_id] for each in going])
                ends = torch.tensor([len(each.context) + len(each.answer) - 1 for each in going])
                chosen = likeliest.gather(1, ends[:, None])[:, 0].to(topology.device())
                dist.broadcast(chosen, 0)
                for each, token in zip(going, chosen.tolist(), strict=True):
                    # Ids beyond the tokenizer were never trained on; were one the likeliest, the answer would end.
                    each.answer.append(token if token < self._tokenizer.vocab_size else self.eot_token_id)
        return [
            postprocess_generated_text(self._tokenizer.decode(each.answer), each.until, None)
            for each in continuations
        ]

    def _begin(self, context: str, gen_kwargs: dict[str, Any]) -> _Continuation:
        options: Any = normalize_gen_kwargs(gen_kwargs)
        if options["do_sample"]:
            raise UserError("a task samples its answers; score it on an export, by lm_eval --model hf")
        limit = options["max_gen_toks"]
        if limit >= self.max_length:
            raise UserError(
                f"a task generates {limit} tokens, the model reads {self.max_length}; take another task"
            )
        until = [stop for stop in options["until"] if stop]
        return _Continuation(self.tok_encode(context)[-(self.max_length - limit) :], limit, until)

    def _is_over(self, each: _Continuation) -> bool:
        if len(each.answer) == each.limit or each.answer[-1:] == [self.eot_token_id]:
            return True
        return any(stop in self._tokenizer.decode(each.answer) for stop in each.until)


register_model("leviathan")(LeviathanLM)


@dataclass
class _Continuation:
    """Ids of the context and of the answer so far, at most `limit` of them, and the strings that end it."""

    context: list[int]
    limit: int
    until: list[str]
    answer: list[int] = field(default_factory=list)


def task_manager(names: Sequence[str], include_path: str | None) -> TaskManager:
    """The harness's index with these tasks in it: of the shipped ones and include_path, or of all that there are.

    Raises UserError naming an unknown task and where was looked. Indexing the harness's own thousands of tasks
    takes seconds; it is done only where a name asks for it.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"{include_path}: no such folder of task files")
    folders: list[str | Path] = [SAMPLE_TASKS, *([include_path] if include_path else [])]
    for defaults in (False, True):
        manager = TaskManager(include_path=folders, include_defaults=defaults)
        missing = [name for name in names if name not in manager.task_index]
        if not missing:
            return manager
    raise UserError(
        f"no task {missing[0]!r} in {', '.join(map(str, folders))} or in the harness itself; "
        "`lm_eval ls tasks` lists those"
    )


def check_tasks(names: Sequence[str], include_path: str | None) -> None:
    """Load tasks and their data once, so that what is missing comes to light now. Raises UserError."""
    manager = task_manager(names, include_path)
    for name in names:
        try:
            with redirect_stderr(io.StringIO()):
                manager.load([name])
        except Exception as error:  # of any kind: a hub that is not there, a broken file, code of the task's own
            raise UserError(f"the task {name} cannot be loaded: {one_line(error)}") from error


def run_tasks(
    model: LeviathanLM, names: Sequence[str], include_path: str | None, limit: int | None, bootstrap_iters: int = 0
) -> dict[str, dict[str, float]]:
    """The metrics of each task, by name. Collective; model is one that is `evaluating`.

    limit: examples of each task, None for all. bootstrap_iters: for standard errors, 0 for none.
    Raises UserError as `task_manager`, `LeviathanLM`.
    """
    manager = task_manager(names, include_path)
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):  # its progress bars, of every rank
        found: Any = simple_evaluate(
            model,
            tasks=list(names),
            task_manager=manager,
            limit=limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=False,
            # Training's random states are not the harness's to set; of ours nothing is random.
            random_seed=None,  # pyright: ignore[reportArgumentType]
            numpy_random_seed=None,  # pyright: ignore[reportArgumentType]
            torch_random_seed=None,  # pyright: ignore[reportArgumentType]
        )
    results = found["results"] if found is not None else {}
    return {name: dict(_numbers(values)) for name, values in results.items()}


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Of the harness's "metric,filter" keys; the filter "none" is left out of the name."""
    for key, value in values.items():
        if isinstance(value, (int, float)) and "," in key:
            yield key.removesuffix(",none"), float(value)
