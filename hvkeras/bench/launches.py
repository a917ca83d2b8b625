"""Launch commands of a benchmark's jobs, for each launcher, on this host or on hosts that are network namespaces."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvkeras.bench.namespaces import NETWORK, Host, VirtualNetwork, remote_shell
from hvkeras.comparison.trial import hvkeras_run
from hvkeras.control.launch_environments import Launch, Rendezvous
from hvkeras.diagnostics.check_build import find_command, version_of, why_not
from hvkeras.errors import MachineError, explain

LAUNCHERS = {"hvkeras": ("hvkeras run", "run"), "mpirun": ("mpirun (Open MPI)", "mpi"),
             "tf_config": ("TF_CONFIG", "tf_config")}
# Variables of all ranks, under every launcher: what Python reads when it starts, and no second fork server.
START = {"PYTHONUNBUFFERED": "1", "HVKERAS_PRELOAD": ""}
_PORTS = range(23451, 32000, 100)  # of the first workers in TF_CONFIG; all ports of a new network namespace are free

# Program of a rank; not with `-m`, which would search the current folder first.
_RANK = """import sys
sys.path[:] = filter(None, sys.path)
from pathlib import Path
from hvkeras.bench.worker import main
main(Path(sys.argv[1]))"""
# Starts commands, each with its own variables and the last argument appended, and exits when one of them fails.
_START_ALL = """import json, os, subprocess, sys, time
ranks = [subprocess.Popen([*command, sys.argv[-1]], env={**os.environ, **variables})
         for command, variables in json.loads(sys.argv[1])]
while all(rank.poll() in (None, 0) for rank in ranks) and any(rank.poll() is None for rank in ranks):
    time.sleep(0.1)
for rank in ranks:
    try:
        rank.wait(20)
    except subprocess.TimeoutExpired:
        rank.kill()
sys.exit(next((abs(rank.wait()) for rank in ranks if rank.wait()), 0))"""
# Variables that mpirun forwards to ranks on other hosts.
_FORWARDED = ("HVKERAS_", "HOROVOD_", "TF_", "UCX_", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")


def objection(launcher: str, backend: str, ranks: int, several_hosts: bool) -> str:
    """Return why a backend does not support jobs of a launcher, or "".

    Args:
        launcher: The launcher's name in `LAUNCHERS`.
        several_hosts: Whether they are on several hosts.
    """
    title, kind = LAUNCHERS[launcher]
    launch = Launch(title, 0, ranks, Rendezvous(kind), mpi=launcher == "mpirun")
    return why_not(backend, launch, "", several_hosts)


@dataclass(frozen=True)
class Starter:
    """Commands of one launcher.

    Each job with TF_CONFIG gets new ports, since stopped jobs still use theirs.

    Attributes:
        launcher: Name in `LAUNCHERS`.
        folder: Folder of the benchmark.
        network: The hosts; None for this host only.
        per_host: Maximum number of ranks on a host.
        forks: Returns the command that precedes a rank's command line, to fork it.
    """

    launcher: str
    folder: Path
    network: VirtualNetwork | None = None
    per_host: int = 0
    forks: Callable[[], Sequence[str]] = list
    _ports: Iterator[int] = field(default_factory=lambda: iter(_PORTS))

    @property
    def title(self) -> str:
        """Short name for users."""
        return LAUNCHERS[self.launcher][0].partition(" (")[0]

    def environment(self) -> Mapping[str, str]:
        """Return the additional environment variables of the jobs."""
        if self.network is None:
            return START
        path = f"{self.folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**START, "PATH": path, "HVKERAS_SECRET": secrets.token_hex(16)}

    def command(self, ranks: int) -> list[str]:
        """Return the command line for a number of ranks; the caller appends the job's folder."""
        rank = [*self.forks(), sys.executable, "-c", _RANK]
        if self.network is None:
            return self._on_this_host(ranks, rank)
        remote_shell(self.network.hosts, self.folder)
        hosts = self._hosts_of_ranks(ranks)
        if self.launcher == "tf_config":
            return [sys.executable, "-c", _START_ALL, json.dumps(_tasks(hosts, rank, next(self._ports)))]
        slots = [f"{host.address}:{hosts.count(host)}" for host in dict.fromkeys(hosts)]
        if self.launcher == "hvkeras":
            return hosts[0].command(*hvkeras_run(["-np", str(ranks), "-H", ",".join(slots), "--", *rank]))
        names = [name for name in {**os.environ, **self.environment()} if name.startswith(_FORWARDED)]
        only = f"{NETWORK}.0/24"
        return hosts[0].command(
            *_mpirun(ranks), "-H", ",".join(slots), "--mca", "plm_rsh_agent", str(self.folder / "ssh"), "--mca", "btl",
            "self,vader,tcp", "--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", only, "--mca", "oob_tcp_if_include",
            only, *(word for name in names for word in ("-x", name)), *rank)

    def _on_this_host(self, ranks: int, rank: Sequence[str]) -> list[str]:
        if self.launcher == "hvkeras":
            return hvkeras_run(["-np", str(ranks), "--", *rank])
        return [*_mpirun(ranks), *rank]

    def _hosts_of_ranks(self, ranks: int) -> list[Host]:
        assert self.network is not None
        return [host for host in self.network.hosts for _ in range(self.per_host)][:ranks]


def _tasks(hosts: Sequence[Host], rank: Sequence[str], port: int) -> list[tuple[list[str], dict[str, str]]]:
    cluster = {"worker": [f"{host.address}:{port + index}" for index, host in enumerate(hosts)]}
    return [(host.command(*rank), {"TF_CONFIG": json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": index}})}) for index, host in enumerate(hosts)]


def _mpirun(ranks: int) -> list[str]:
    mpirun = find_command("mpirun")
    if not mpirun or not version_of("mpi4py"):
        raise MachineError(explain("--launcher mpirun needs Open MPI and mpi4py", "pip install 'hvkeras[mpi]'"))
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
