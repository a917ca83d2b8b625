"""Command lines of the launchers, and their environment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import costs

LAUNCHERS = ("hvkeras_run", "mpirun", "horovodrun_mpi", "horovodrun_gloo", "tf_config")
ROLES = ("chief", "worker", "ps", "evaluator")
ENGINES = ("native", "tfdist", "horovod")
# Environment variables of schedulers for ranks on one host, whose processes the harness starts itself.
SCHEDULERS = ("torchrun_variables", "keras_variables", "slurm_step")
PAIRS = tuple((launcher, engine) for launcher in LAUNCHERS for engine in ENGINES)

PRELOAD = "HARNESS_PRELOAD"  # environment variable: the modules of `pytest --preload`
FIRST_PORT = 20_000  # lowest port on which tests listen

BIN = Path(sys.executable).parent
TESTS = Path(__file__).resolve().parent.parent
_FOREIGN = re.compile(
    r"(OMPI|OPAL|ORTE|PMI|PMIX|MPI|HYDRA|I_MPI|MPIR|HOROVOD|HVKERAS|SLURM|HARNESS|TORCHELASTIC|MASTER|PET)_|"
    r"KERAS_DISTRIBUTION_|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|JOB_COMPLETION_INDEX)$|"
    # The import of TensorFlow in this process has set the last two.
    r"(TF_CONFIG|TF_CPP_MIN_LOG_LEVEL|PYTHONPATH|OMP_NUM_THREADS|TF2_BEHAVIOR|ENABLE_RUNTIME_UPTIME_TELEMETRY)$"
)


@dataclass(frozen=True)
class Command:
    """Command of a launcher or of a single rank.

    Attributes:
        arguments: The command line.
        environment: Variables in addition to the clean environment.
        rank: The rank, if the process is one; None for a launcher.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None


def clean_environment(folder: Path) -> dict[str, str]:
    """Return this process's environment without the variables of launchers, with `folder` for temporary files."""
    inherited = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name) or name == costs.FOLDER}
    preload = {"HVKERAS_PRELOAD": os.environ[PRELOAD]} if PRELOAD in os.environ else {}
    return inherited | preload | {
        "PATH": f"{BIN}{os.pathsep}{inherited.get('PATH', os.defpath)}",
        "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'harness' / 'hidden'}",
        "PYTHONFAULTHANDLER": "1",  # prints stacks on SIGABRT, which is sent at the deadline
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        "OMPI_MCA_btl_vader_backing_directory": str(folder),  # otherwise killed ranks leave segments in /dev/shm
        "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks of several tests share the cores
    }


def commands(launcher: str, np: int, script: Sequence[str], logs: Path, roles: Sequence[str] = (),
             python: Sequence[str] = (sys.executable,)) -> list[Command]:
    """Return the command lines that start `np` ranks of a script.

    Args:
        launcher: One of `LAUNCHERS` or of `SCHEDULERS`, or `none` for plain Python.
        np: Number of ranks.
        script: The Python script and its arguments.
        logs: Folder in which the launcher writes `rank.<n>/stdout` and `rank.<n>/stderr`.
        roles: With TF_CONFIG, the role of each rank, in the order of `ROLES`; all are workers by default.
        python: Command that runs the script.

    Returns:
        The launcher's command or, without a launcher (TF_CONFIG, schedulers, `none`), one command per rank.
    """
    python = (*python, *script)
    ranks = ("-np", str(np), "--output-filename", str(logs))
    if launcher == "hvkeras_run":
        return [Command((str(BIN / "hvkeras"), "run", *ranks, *python))]
    if launcher == "mpirun":
        flags = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
        return [Command((str(BIN / "mpirun"), *flags, *ranks, *python))]
    if launcher in ("horovodrun_mpi", "horovodrun_gloo"):
        return [Command((str(BIN / "horovodrun"), "--" + launcher.split("_")[1], *ranks, *python))]
    if launcher == "none":
        return [Command(python, {}, rank) for rank in range(np)]  # independent processes
    if launcher == "tf_config":
        roles = roles or ["worker"] * np
        cluster: dict[str, list[str]] = {}
        for role, port in zip(roles, free_ports(np), strict=True):
            cluster.setdefault(role, []).append(f"localhost:{port}")
        tasks = [{"cluster": cluster, "task": {"type": role, "index": list(roles[:rank]).count(role)}}
                 for rank, role in enumerate(roles)]
        return [Command(python, {"TF_CONFIG": json.dumps(task)}, rank) for rank, task in enumerate(tasks)]
    if launcher in SCHEDULERS:
        return [Command(python, variables, rank) for rank, variables in enumerate(_scheduler_variables(launcher, np))]
    raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}. Received: launcher={launcher!r}.")


def _scheduler_variables(launcher: str, np: int) -> list[dict[str, str]]:
    (number,) = free_ports(1)  # also serves as a unique job id
    if launcher == "torchrun_variables":
        shared = {"WORLD_SIZE": str(np), "LOCAL_WORLD_SIZE": str(np), "MASTER_ADDR": "localhost",
                  "MASTER_PORT": str(number)}
        return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(np)]
    if launcher == "keras_variables":
        names = ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
        return [{f"KERAS_DISTRIBUTION_{name}": str(value) for name, value in
                 zip(names, (f"localhost:{number}", np, rank), strict=True)} for rank in range(np)]
    shared = {"SLURM_JOB_ID": str(number), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(np),
              "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": str(np)}
    return [{**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(np)]


def free_ports(count: int) -> list[int]:
    """Return distinct free ports below the ephemeral ones, of which each worker of pytest has its own."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    candidates = list(range(FIRST_PORT + int(worker), end, int(workers)))
    random.SystemRandom().shuffle(candidates)  # other programs search at the same time
    found: list[int] = []
    for port in candidates:
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"{len(found)} of {count} ports are free from {FIRST_PORT} to {end}")


def announced_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank in a process's environment; None if there is none."""
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "HVKERAS_RUN_RANK", "RANK", "JOB_COMPLETION_INDEX",
                 "KERAS_DISTRIBUTION_PROCESS_ID", "SLURM_PROCID"):
        if environ.get(name):
            return int(environ[name])
    if environ.get("TF_CONFIG"):
        config = json.loads(environ["TF_CONFIG"])
        task, earlier = config["task"], ROLES[: ROLES.index(config["task"]["type"])]
        return int(task["index"]) + sum(len(config["cluster"].get(role, ())) for role in earlier)
    return None
