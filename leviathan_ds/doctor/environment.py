"""Which environment variables a rank needs from the shell that started the job, and how they get there.

`deepspeed --hostfile` starts ranks through pdsh and ssh in a fresh environment, and forwards little by itself
(docs/multi_node.md). `DS_ENV_FILE` names a file of more; `write_env_file` makes it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from data_prep.errors import UserError

MUST_AGREE = {
    # How NCCL sends: ranks that choose differently wait for each other for ever, or cannot connect.
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NET",
    "NCCL_IB_DISABLE",
    # How NVIDIA's libraries multiply: in TF32 or not, in which workspace and so in which order of sums.
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
}
"""Variables without which, or with another value of which, a node does not compute or talk as the others do."""
WANDB = ("WANDB_",)
_PREFIXES = (*WANDB, "NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "TORCH_", "PYTORCH_", "HF_", "OMP_", "MKL_", "KMP_")
_PREFIXES += ("DS_", "TRITON_", "TOKENIZERS_")
_PLACES = {"PYTHONPATH", "LD_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "CC"}
_PLACES |= {"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
# Of one node, or of the launcher itself.
_NEVER = {"CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_VERSION", "NCCL_VERSION"}
_NEVER |= {"DS_ENV_FILE", "WANDB_SERVICE"}
_MAY_DIFFER = ("NCCL_IB_", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_")
_SHELL_SPECIAL, _ESCAPED = re.compile(r'([$`"\\])'), r"\\\1"  # within double quotes
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that every rank of a job should have from the shell that starts it, sorted by name."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _PLACES | MUST_AGREE) and name not in _NEVER
    }


def is_secret(name: str) -> bool:
    """Whether the value of a variable may not be shown."""
    return _SECRET.search(name) is not None


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """`forwarded`, secrets replaced by a digest that tells two of them apart."""
    return {
        name: "secret " + hashlib.sha256(value.encode()).hexdigest()[:8] if is_secret(name) else value
        for name, value in forwarded(environment).items()
    }


def may_differ(name: str) -> bool:
    """Whether nodes may rightly have different values of a variable: names of their network cards."""
    return name.startswith(_MAY_DIFFER) and name not in MUST_AGREE


def write_env_file(path: Path, environment: Mapping[str, str]) -> list[str]:
    """Write the file that DS_ENV_FILE names, readable by its owner alone; returns the variables in it.

    DeepSpeed splits each line at the first `=`, puts double quotes around a value with unusual characters, and
    hands it to the remote shell: what that shell would take apart is escaped here.

    Raises UserError for a value of several lines, which the file cannot hold, and where it cannot be written.
    """
    chosen = forwarded(environment)
    for name, value in chosen.items():
        if "\n" in value or value != value.strip():
            raise UserError(
                f"{name} has {'several lines' if chr(10) in value else 'spaces around its value'}, which "
                "DeepSpeed's environment file cannot hold; unset it here and set it in each node's shell profile"
            )
    lines = [f"{name}={_SHELL_SPECIAL.sub(_ESCAPED, value)}\n" for name, value in chosen.items()]
    aside = path.with_name(path.name + ".partial")
    try:
        aside.unlink(missing_ok=True)
        # Created for the owner alone: a secret must not be readable even for a moment.
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(lines)
        aside.replace(path)
    except OSError as error:
        raise UserError(
            f"--write_env_file {path}: {error.strerror}; name a file in a folder that exists"
        ) from None
    return list(chosen)
