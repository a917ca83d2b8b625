"""`hvkeras run --check-build`: compatibility of launchers and backends on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hvkeras import __version__
from hvkeras.backends import backend_class, backend_names, importable_backends
from hvkeras.backends.horovod import installed
from hvkeras.control.launch_environments import Launch, Rendezvous, indexed_job, keras_distribution, torchrun
from hvkeras.errors import MachineError

PACKAGES = ("tensorflow", "keras", "tf_keras", "mpi4py", "horovod", "ray", "pyspark")
INSTALL_JAVA = "apt-get install openjdk-17-jre-headless (Debian), or set JAVA_HOME"
_VERSION_DEADLINE = 10.0  # seconds for `mpirun --version`


def _rows() -> list[tuple[str, Launch, str]]:
    """Return (name, launch that its ranks would detect, reason why it is not available or "") for each launcher."""
    has_mpi = find_command("mpirun") or find_command("mpiexec")
    no_mpi = "" if has_mpi else "mpirun is not installed: pip install 'hvkeras[mpi]'"
    no_horovod = "" if horovod_is_installed() else "Horovod's horovodrun is not installed: " + installed.BUILD
    no_slurm = "" if find_command("srun") else "srun is not installed"
    no_ray = "" if version_of("ray") else "Ray is not installed: pip install 'hvkeras[ray]'"
    return [
        ("hvkeras run", Launch("hvkeras run", 0, 2, Rendezvous("run")), ""),
        ("mpirun", Launch("mpirun (Open MPI)", 0, 2, Rendezvous("mpi"), mpi=True), no_mpi or _no_mpi4py()),
        ("horovodrun --mpi", Launch("horovodrun (MPI)", 0, 2, Rendezvous("mpi"), mpi=True),
         no_horovod or no_mpi or _no_mpi4py() or _built_without("MPI", installed.has_mpi())),
        ("horovodrun --gloo", Launch("horovodrun (Gloo)", 0, 2, Rendezvous("horovod_store")),
         no_horovod or _built_without("Gloo", installed.has_gloo())),
        ("TF_CONFIG", Launch("TF_CONFIG", 0, 2, Rendezvous("tf_config")), ""),
        ("keras.distribution", Launch(keras_distribution.LAUNCHER, 0, 2, Rendezvous("address")), ""),
        ("torchrun's variables", Launch(torchrun.LAUNCHER, 0, 2, Rendezvous("address")), ""),
        ("Kubernetes Indexed Job", Launch(indexed_job.LAUNCHER, 0, 2, Rendezvous("address")), ""),
        ("srun", Launch("srun (Slurm)", 0, 2, Rendezvous("folder")), no_slurm),
        ("Ray", Launch("Ray", 0, 2, Rendezvous("run")), no_ray),
        ("Spark", Launch("Spark", 0, 2, Rendezvous("spark")), _no_spark()),
        ("python (one process)", Launch("none"), ""),
    ]


def _no_mpi4py() -> str:
    return "" if version_of("mpi4py") else "ranks need mpi4py to find each other: pip install 'hvkeras[mpi]'"


def _no_spark() -> str:
    if not version_of("pyspark"):
        return "pyspark is not installed: pip install 'hvkeras[spark]'"
    return "" if java() else f"Spark needs Java: {INSTALL_JAVA}"


def java() -> str:
    """Return the path of the `java` command that Spark would run, or ""."""
    home = os.environ.get("JAVA_HOME", "")
    return os.path.join(home, "bin", "java") if home else shutil.which("java") or ""


def _built_without(part: str, is_built: bool) -> str:
    return "" if is_built else f"Horovod was built without {part}: {installed.BUILD}"


def why_not(name: str, launch: Launch, launcher_problem: str, several_hosts: bool = False) -> str:
    """Return why a backend does not work with a launcher on this machine; "" if it does."""
    try:
        backend = backend_class(name)
    except MachineError as error:
        return launcher_problem or str(error)
    available = backend.availability()
    unavailable = "" if available.ok else available.reason
    return launcher_problem or unavailable or backend.objection(launch, several_hosts)


def check_build() -> int:
    """Print the table, the reasons below it, and the installed versions.

    Returns:
        The exit code, 0.
    """
    console = Console(highlight=False, soft_wrap=True)
    names = backend_names()
    table = Table(title="Which launcher works with which backend here", title_justify="left")
    table.add_column("launcher")
    for name in names:
        table.add_column(name, justify="center")
    reasons: dict[str, int] = {}
    for title, launch, problem in _rows():
        cells = []
        for name in names:
            reason = why_not(name, launch, problem)
            if reason:
                cells.append(f"no ({reasons.setdefault(reason, len(reasons) + 1)})")
            else:
                cells.append("yes")
        table.add_row(title, *cells)
    console.print(table)
    for reason, number in reasons.items():
        console.print(f"({number}) {reason}", markup=False)
    console.print()
    for line in facts():
        console.print(line, markup=False)
    return 0


def facts() -> list[str]:
    """Return the installed versions and commands, one per line."""
    lines = [f"hvkeras {__version__}, Python {sys.version.split()[0]} at {sys.executable}"]
    lines += [f"{name} {version_of(name) or 'is not installed'}" for name in PACKAGES]
    lines += [f"backend {name}: {backend.availability().reason}" for name, backend in importable_backends().items()]
    for launcher in ("mpirun", "horovodrun", "srun", "java", "ssh"):
        path = find_command(launcher)
        lines.append(f"{launcher}: {path}{_version_line(path) if launcher == 'mpirun' else ''}" if path else
                     f"{launcher}: not installed")
    return lines


def version_of(package: str) -> str:
    """Return the installed version of a package, given its import name, or ""."""
    for distribution in (package, f"{package}-cpu", f"{package}-intel", package.replace("_", "-")):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def find_command(command: str) -> str:
    """Return a command's path or "", searching this Python's environment first, which may not be activated."""
    beside = Path(sys.executable).parent / command
    return str(beside) if beside.is_file() else shutil.which(command) or ""


def version_output(launcher: str) -> str | None:
    """Return the output of `launcher --version`; None if it does not start."""
    try:
        return subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=_VERSION_DEADLINE,
                              check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None


def _version_line(path: str) -> str:
    answer = version_output(path)
    if answer is None:
        return " (does not start)"
    return f" ({answer.splitlines()[0].strip()})" if answer else ""


def horovod_is_installed() -> bool:
    """Return whether Horovod's launcher can be imported."""
    try:
        return importlib.util.find_spec("horovod.runner.launch") is not None
    except ImportError:
        return False
