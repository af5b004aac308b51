"""Every question to a cluster, as a plain function from what the nodes told to one `Finding`.

No process, file or collective here: `examination` gathers, and tests inject.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leviathan_ds import recipe as recipes
from leviathan_ds.doctor import environment
from leviathan_ds.doctor.facts import NodeFacts

Status = Literal["ok", "note", "failed"]

CLOCK_NOTE_S, CLOCK_FAILED_S = 2.0, 60.0
"""Nothing here computes with clocks: beyond the first, logs of two nodes are hard to put in order; beyond the
second, certificates and wandb's server refuse."""


@dataclass(frozen=True)
class Finding:
    """A row of the doctor's table. `sentence` says what is wrong and the way out, empty if all is well."""

    check: str
    status: Status
    found: str
    sentence: str = ""


@dataclass(frozen=True)
class Measured:
    """What only all ranks together can tell, one entry for each rank."""

    clocks_s: Sequence[float]
    """Time of each rank's clock minus rank 0's, at one moment."""
    sums_right: Sequence[bool]
    """Whether each rank got the right sum from an all-reduce."""
    bus_bandwidth: float | None = None
    """Of an all-reduce, bytes per second on each rank's link (2·(n - 1)/n of the buffer); None: not measured."""
    buffer_bytes: int = 0


def examine(nodes: Sequence[NodeFacts], measured: Measured, starting: bool = False) -> list[Finding]:
    """All findings, in the order of the table. The same on every rank.

    Args:
        starting: the run starts now if nothing failed; False where only the doctor asks.
    """
    return [
        check_hostfile(nodes),
        check_nodes(nodes),
        check_versions(nodes),
        check_code(nodes),
        check_environment(nodes),
        check_recipe(nodes),
        check_batch(nodes),
        check_data(nodes),
        check_run_dir(nodes),
        check_disk(nodes, starting),
        check_clocks(nodes, measured),
        check_all_reduce(nodes, measured),
    ]


def check_hostfile(nodes: Sequence[NodeFacts]) -> Finding:
    """The hostfile that was given exists, and the ranks that run are its slots."""
    problem = _problem(nodes, "hostfile")
    if problem is not None:
        return Finding("hostfile", "failed", "missing", problem)
    started = {node.first_rank: node.num_ranks for node in nodes}
    running = f"{sum(started.values())} ranks on {_count(len(nodes), 'node')}"
    seen = next((node for node in nodes if node.hostfile is not None), None)
    if seen is None:
        return Finding("hostfile", "ok", f"none to be seen; {running}")
    wanted = sum(seen.hostfile_slots.values())
    found = f"{seen.hostfile}: {wanted} slots on {_count(len(seen.hostfile_slots), 'host')}; {running}"
    agrees = sorted(seen.hostfile_slots.values()) == sorted(started.values())
    if agrees:
        return Finding("hostfile", "ok", found)
    if seen.hostfile_selects:
        return Finding("hostfile", "note", found, f"options of deepspeed take only {running} of {seen.hostfile}")
    told = ", ".join(f"{host} {slots}" for host, slots in seen.hostfile_slots.items())
    ours = ", ".join(f"{node.name} {node.num_ranks}" for node in nodes)
    return Finding(
        "hostfile",
        "failed",
        found,
        f"{seen.hostfile} promises other ranks than those that run: slots {told}; running {ours}. Is it the same "
        "file on every node? Correct it, or start with the launcher that reads it",
    )


def check_nodes(nodes: Sequence[NodeFacts]) -> Finding:
    """Which nodes came, that no two are one machine, and that tensor-parallel groups stay inside a node."""
    found = ", ".join(f"{node.name} ({node.num_ranks} × {node.device})" for node in nodes)
    twice = [node.name for node in nodes if sum(other.machine == node.machine for other in nodes) > 1]
    if twice:
        sentence = f"{len(twice)} nodes of the job are the one machine {twice[0]}, and share its devices"
        return Finding("nodes", "note", found, sentence + "; give each line of the hostfile another machine")
    devices = {node.device for node in nodes}
    if len(devices) > 1:
        sentence = f"the devices differ ({', '.join(sorted(devices))}): every step waits for the slowest"
        return Finding("nodes", "note", found, sentence)
    tp = nodes[0].plan.recipe.parallel.tensor_model_parallel_size
    torn = [node.name for node in nodes if node.num_ranks % tp]
    if torn and len(nodes) > 1:
        sentence = (
            f"tensor-parallel groups of {tp} cross nodes, whose network is far slower than the inside of one: "
            f"start a multiple of {tp} ranks on {', '.join(torn)}"
        )
        return Finding("nodes", "note", found, sentence)
    return Finding("nodes", "ok", found)


def check_versions(nodes: Sequence[NodeFacts]) -> Finding:
    """Every package has one version."""
    first = nodes[0]
    differing = []
    for package in sorted(set().union(*(node.versions for node in nodes))):
        told = _differing(nodes, lambda node, package=package: node.versions.get(package, "absent"))
        if told:
            differing.append(f"{package} is {told}")
    found = ", ".join(f"{package} {version}" for package, version in first.versions.items())
    if not differing:
        return Finding("versions", "ok", found)
    sentence = f"{'; '.join(differing)}. Install constraints.txt on every node, or start the same container"
    return Finding("versions", "failed", found, sentence)


def check_code(nodes: Sequence[NodeFacts]) -> Finding:
    """Every node runs the same code of this project, at one commit."""
    found = nodes[0].commit or f"no git; source {nodes[0].source}"
    told = _differing(nodes, lambda node: f"{node.commit or 'without git'}, source {node.source}")
    if not told:
        return Finding("code", "ok", found)
    if _differing(nodes, lambda node: node.source):
        sentence = (
            f"nodes run different code: {told}. Check out one commit everywhere (git pull), or share the folder"
        )
        return Finding("code", "failed", found, sentence)
    if None in {node.commit for node in nodes}:  # a copy without .git, or a repository of another owner
        return Finding("code", "ok", f"{found}; the same source {nodes[0].source} where there is no git")
    sentence = f"nodes are at different commits, whose code is the same: {told}"
    return Finding("code", "note", found, sentence)


def check_environment(nodes: Sequence[NodeFacts]) -> Finding:
    """The variables that a rank needs are the same everywhere, and those of the shell that started the ranks.

    A failure only if one of `environment.MUST_AGREE` is not.
    """
    first = nodes[0]
    caller = next((node.launcher_variables for node in nodes if node.launcher_variables is not None), {})
    lost = sorted(caller.keys() - first.variables.keys())
    told = [f"{', '.join(lost)} of the shell that typed deepspeed did not reach the ranks"] if lost else []
    unequal = []
    for name in sorted(set().union(*(node.variables for node in nodes))):
        differing = _differing(nodes, lambda node, name=name: _value_that_counts(node, name))
        if differing and not name.startswith(environment.WANDB):  # wandb runs on rank 0 alone
            unequal.append(name)
            told.append(f"{name} is {differing}")
    count = f"{len(first.variables)} variables of interest on {first.name}"
    if not told:
        return Finding("environment", "ok", count)
    sentence = (
        f"{'; '.join(told)}. Write them to a file and start with it: "
        "python launchers/doctor.py --write_env_file /path/env; DS_ENV_FILE=/path/env deepspeed … "
        "(without deepspeed's ssh: set them on every node alike)"
    )
    serious = environment.MUST_AGREE & {*lost, *unequal}
    return Finding("environment", "failed" if serious else "note", count, sentence)


def _value_that_counts(node: NodeFacts, name: str) -> str:
    if name not in node.variables:
        return "absent"
    return "set" if environment.may_differ(name) else node.variables[name]


# Where the data lie may differ; what they are has its own row.
_OF_THE_DATA = {
    "data.prefixes",
    "data.validation_prefixes",
    "data.blend",
    "data.index_cache",
    "data.tokenizer_fingerprint",
    "model.vocab_size",
}


def check_recipe(nodes: Sequence[NodeFacts]) -> Finding:
    """All nodes read one recipe and one DeepSpeed configuration; only where the data lie may differ."""
    first = nodes[0]
    for node in nodes[1:]:
        differing = {
            key: values
            for key, values in recipes.differences(first.plan.recipe, node.plan.recipe).items()
            if key not in _OF_THE_DATA
        }
        if differing:
            key, (here, there) = next(iter(differing.items()))
            sentence = (
                f"{key} is {here!r} on {first.name} and {there!r} on {node.name}"
                f"{f', and {len(differing) - 1} other keys differ' if len(differing) > 1 else ''}: copy one "
                "recipe to all nodes and start all with the same options"
            )
            return Finding("recipe", "failed", "differs", sentence)
        if _comparable(first.plan.ds_config) != _comparable(node.plan.ds_config) and None not in (
            first.plan.ds_config,
            node.plan.ds_config,
        ):
            sentence = f"--ds_config differs between {first.name} and {node.name}: copy one file to all nodes"
            return Finding("recipe", "failed", "differs", sentence)
    return Finding("recipe", "ok", "the same everywhere" if len(nodes) > 1 else "read")


def _comparable(value: Any) -> Any:
    return value if value is None else sorted(map(repr, value.items()))


def check_batch(nodes: Sequence[NodeFacts]) -> Finding:
    """micro-batch × data-parallel size × accumulation is the global batch, and DeepSpeed's JSON agrees."""
    problem = _problem(nodes, "batch")
    if problem is not None:
        return Finding("batch", "failed", "", problem)
    recipe, world_size = nodes[0].plan.recipe, sum(node.num_ranks for node in nodes)
    tp = recipe.parallel.tensor_model_parallel_size
    accumulation, training = recipe.gradient_accumulation_steps(world_size), recipe.training
    found = (
        f"micro {training.micro_batch_size} × DP {world_size // tp} × accumulation {accumulation} = "
        f"{training.global_batch_size} sequences; {world_size} ranks = TP {tp} × DP {world_size // tp}"
    )
    return Finding("batch", "ok", found)


def check_data(nodes: Sequence[NodeFacts]) -> Finding:
    """Every node can read the datasets, and their content is the same."""
    problem = _problem(nodes, "data")
    if problem is not None:
        return Finding("data", "failed", "not readable", problem)
    first = nodes[0]
    found = f"{_count(len(first.plan.fingerprints), 'dataset')}, fingerprint {_short(first)}"
    told = _differing(nodes, lambda node: f"{_short(node)} ({_data_of(node)})")
    if _differing(nodes, lambda node: str(node.plan.fingerprints)):
        sentence = f"nodes hold different datasets: {told}. Copy {first.name}'s to the others (all four files)"
        return Finding("data", "failed", found, sentence)
    return Finding("data", "ok", found)


def _data_of(node: NodeFacts) -> str:
    data = node.plan.recipe.data
    return data.blend or ", ".join(data.prefixes)


def _short(node: NodeFacts) -> str:
    return " ".join(fingerprint[:12] for fingerprint in node.plan.fingerprints)


def check_run_dir(nodes: Sequence[NodeFacts]) -> Finding:
    """Every node sees what rank 0 writes."""
    problem = _problem(nodes, "run_dir")
    run_dir = nodes[0].plan.run_dir
    if problem is not None:
        return Finding("run_dir", "failed", str(run_dir), problem)
    blind = [node.name for node in nodes if not node.run_dir_shared]
    if not blind:
        found = f"{run_dir}: seen by {'all nodes' if len(nodes) > 1 else 'this node'}"
        return Finding("run_dir", "ok", found)
    sentence = (
        f"what rank 0 on {nodes[0].name} wrote to {run_dir} is not there on {', '.join(blind)}: put --run_dir on "
        "a disk that all nodes share, by its absolute path"
    )
    return Finding("run_dir", "failed", str(run_dir), sentence)


def check_disk(nodes: Sequence[NodeFacts], starting: bool) -> Finding:
    """The run directory's disk holds the checkpoints that are kept, and the one being written.

    At a start no failure: a run survives a full disk (training/checkpoint.py), and room may be made meanwhile.
    """
    first = nodes[0]
    free = f"{_size(first.free_bytes)} free"
    if first.checkpoint_bytes is None:
        return Finding(
            "disk", "note", free, "the size of a checkpoint is not known until configuration and data are"
        )
    number = first.plan.recipe.run.keep_checkpoints + 1
    needed = first.checkpoint_bytes * max(0, number - first.num_checkpoints)
    found = f"{free}; {number} checkpoints of {_size(first.checkpoint_bytes)}, {first.num_checkpoints} there"
    if needed <= first.free_bytes:
        return Finding("disk", "ok", found)
    sentence = (
        f"the disk of {first.plan.run_dir} has {free}, and run.keep_checkpoints = {number - 1} with one being "
        f"written need {_size(needed)} more: free some, or choose a smaller run.keep_checkpoints or another "
        "--run_dir"
    )
    return Finding("disk", "note" if starting else "failed", found, sentence)


def check_clocks(nodes: Sequence[NodeFacts], measured: Measured) -> Finding:
    """The nodes' clocks agree."""
    offsets = {node.name: measured.clocks_s[node.first_rank] for node in nodes}
    name, worst = max(offsets.items(), key=lambda item: abs(item[1]))
    found = f"within {abs(worst) * 1000:,.1f} ms"
    if abs(worst) < CLOCK_NOTE_S:
        return Finding("clocks", "ok", found)
    sentence = (
        f"the clock of {name} is {abs(worst):.0f} s {'ahead of' if worst > 0 else 'behind'} {nodes[0].name}'s; "
        "start a time service (chrony) on both"
    )
    return Finding("clocks", "failed" if abs(worst) >= CLOCK_FAILED_S else "note", found, sentence)


def check_all_reduce(nodes: Sequence[NodeFacts], measured: Measured) -> Finding:
    """The sum over all ranks is right on every rank; its speed is for the reader to judge."""
    wrong = [rank for rank, right in enumerate(measured.sums_right) if not right]
    found = f"sum right on {_count(len(measured.sums_right) - len(wrong), 'rank')}"
    if measured.bus_bandwidth is not None and len(measured.sums_right) > 1:
        size = measured.buffer_bytes / 2**20
        found += f"; {measured.bus_bandwidth / 1e9:.2f} GB/s per rank's link, {size:.0f} MiB"
    if not wrong:
        return Finding("all-reduce", "ok", found)
    where = ", ".join(
        f"{rank} on {node.name}"
        for node in nodes
        for rank in wrong
        if node.first_rank <= rank < node.first_rank + node.num_ranks
    )
    sentence = (
        f"an all-reduce gave a wrong sum on rank {where}: no result of this cluster can be trusted; leave these "
        "nodes out, and test their devices and network cards"
    )
    return Finding("all-reduce", "failed", found, sentence)


def _problem(nodes: Sequence[NodeFacts], check: str) -> str | None:
    """What nodes that could not use their part of the plan say, with their names unless all say the same."""
    said: dict[str, list[str]] = {}
    for node in nodes:
        if check in node.plan.problems:
            said.setdefault(node.plan.problems[check], []).append(node.name)
    if not said:
        return None
    text, names = next(iter(said.items()))
    return text if len(names) == len(nodes) else "; ".join(f"on {', '.join(n)}: {t}" for t, n in said.items())


def _differing(nodes: Sequence[NodeFacts], value: Callable[[NodeFacts], str]) -> str:
    """`value` of each node by name, nodes with an equal one together; empty if there is one value only."""
    names: Mapping[str, list[str]] = {}
    for node in nodes:
        names.setdefault(value(node), []).append(node.name)
    if len(names) == 1:
        return ""
    return ", ".join(f"{text} on {_some(each)}" for text, each in names.items())


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
