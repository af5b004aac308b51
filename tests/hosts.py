"""Hosts of a cluster on one machine: network namespaces, each with its own processes, host name, sshd and disk.

Needs root, iproute2, util-linux, openssh-server; pdsh to start DeepSpeed over them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "ssh-keygen": "openssh-client", "pdsh": "pdsh"}
SSHD = Path("/usr/sbin/sshd")
START_LIMIT_S = 60


def why_impossible() -> str | None:
    """The reason why this machine cannot have such hosts, None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    packages += [] if SSHD.is_file() else ["openssh-server"]
    if packages:
        return f"apt-get install {' '.join(packages)}"
    allowed = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return (
        f"this kernel or container gives no network namespaces: {allowed.stderr.strip()}"
        if allowed.returncode
        else None
    )


class Host:
    """One host; `start` after a `kill` gives a fresh machine under the old name and address."""

    def __init__(self, cluster: Cluster, name: str, address: str) -> None:
        self.cluster, self.name, self.address = cluster, name, address
        self.namespace = f"lev{os.getpid()}{name}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Boot: an empty disk of its own at `cluster.disk`, then sshd, until that answers."""
        boot = (
            f"hostname {self.name} && ip link set lo up && mount -t tmpfs tmpfs {self.cluster.disk} && "
            f"exec {SSHD} -D -f {self.cluster.folder}/sshd_config"
        )
        namespaces = ["unshare", "--pid", "--uts", "--mount", "--mount-proc", "--fork", "--kill-child"]
        command = ["ip", "netns", "exec", self.namespace, *namespaces, "sh", "-c", boot]
        self._process = subprocess.Popen(command)
        deadline = time.monotonic() + START_LIMIT_S
        while self.run("true", check=False).returncode:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"the sshd of {self.name} does not answer")
            time.sleep(0.2)

    def kill(self) -> None:
        """End the host and everything on it at once, its disk included."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def command(self, line: str) -> list[str]:
        """The command that runs a shell line on this host, as a user who has logged in there."""
        config = str(self.cluster.folder / "ssh_config")
        return ["ip", "netns", "exec", self.namespace, "ssh", "-F", config, self.name, line]

    def run(self, line: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a shell line on this host; the output has its error messages in it."""
        result = subprocess.run(
            self.command(line), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert not check or result.returncode == 0, result.stdout
        return result


class Cluster:
    """Two hosts, node-a and node-b, joined by a cable. `folder` is the disk that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"  # the same path on both, another file system on each
        self.a, self.b = Host(self, "node-a", "10.77.0.1"), Host(self, "node-b", "10.77.0.2")
        self.hosts = (self.a, self.b)

    def __enter__(self) -> Cluster:
        self.disk.mkdir(parents=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host_key", "user_key"):
            _run(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder / key}")
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/user_key.pub\nStrictModes no\n"
            "PermitRootLogin yes\nUsePAM no\nPidFile none\nMaxStartups 100\n"
        )
        options = f"  IdentityFile {self.folder}/user_key\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
        options += "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        (self.folder / "ssh_config").write_text(
            "".join(f"Host {host.name}\n  HostName {host.address}\n{options}" for host in self.hosts)
        )
        try:
            for host in self.hosts:
                _run(f"ip netns add {host.namespace}")
            a, b = (host.namespace for host in self.hosts)
            _run(f"ip -n {a} link add eth0 type veth peer name eth0 netns {b}")
            for host in self.hosts:
                _run(f"ip -n {host.namespace} address add {host.address}/24 dev eth0")
                _run(f"ip -n {host.namespace} link set eth0 up")
                host.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for host in self.hosts:
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False)


def _run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)
