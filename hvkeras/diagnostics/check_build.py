"""`hvkeras run --check-build`: compatibility of launchers and backends on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvkeras import __version__
from hvkeras.backends import ONE_PROCESS, backend_class, backend_names, importable_backends
from hvkeras.backends.capabilities import SharesMemory
from hvkeras.backends.horovod import installed
from hvkeras.control.launch_environments import Launch, Rendezvous, indexed_job, keras_distribution, torchrun
from hvkeras.errors import MachineError
from hvkeras.host.machine import SharedMemory

PACKAGES = ("tensorflow", "keras", "tf_keras", "mpi4py", "horovod", "ray", "pyspark")
INSTALL_JAVA = "apt-get install openjdk-17-jre-headless (Debian), or set JAVA_HOME"
WIDTH = 120  # columns of the tables if the output is not a terminal
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
    problem = launcher_problem or why_not_here(name, 1 if several_hosts else launch.local_size or launch.size)
    return problem or backend_class(name).objection(launch, several_hosts)


def why_not_here(name: str, ranks: int = 2) -> str:
    """Return why a backend does not work on this machine, whatever the launcher; "" if it does.

    Args:
        name: The backend.
        ranks: Number of ranks on this machine, all ranks of the job.
    """
    try:
        backend = backend_class(name)
    except MachineError as error:
        return str(error)
    available = backend.availability()
    if not available.ok or not issubclass(backend, SharesMemory) or ranks < 2:
        return "" if available.ok else available.reason
    needed, memory = backend.shared_memory(ranks, 1), SharedMemory.here()
    objection = memory.objection(needed, ranks)
    return objection and f"{objection}: {memory.fix(needed)}"


def check_build() -> int:
    """Print a table of the backends, one of the launchers, and the installed versions.

    Returns:
        The exit code, 0.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    for title, headers, rows in (("Backends", ("backend", "works here", ""), _backend_rows()),
                                 ("Launchers", ("launcher", "works with", ""), _launcher_rows()),
                                 ("Installed", ("", "", ""), facts())):
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
                      show_edge=False, show_header=any(headers))
        for header in headers:
            table.add_column(header, overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        print_unpadded(console, table)
        print()
    return 0


def print_unpadded(console: Console, table: Table) -> None:
    """Print a table without the blanks that Rich pads its lines with."""
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _backend_rows() -> list[tuple[str, str, str]]:
    known = importable_backends()
    reasons = {name: why_not_here(name) for name in backend_names()}
    return [(name, "no" if reason else "yes", reason or known[name].availability().reason)
            for name, reason in reasons.items()]


def _launcher_rows() -> list[tuple[str, str, str]]:
    """Return a row for each launcher: its name, the backends that work with it, and why others do not.

    Backends that do not work here at all are in the other table, and `local` is for one process.
    """
    names = [name for name in backend_names() if not why_not_here(name)]
    found = []
    for title, launch, problem in _rows():
        serving = [name for name in names if launch.size == 1 or name != ONE_PROCESS]
        reasons = {name: why_not(name, launch, problem) for name in serving}
        works = [name for name, reason in reasons.items() if not reason]
        others = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
        why = problem or "; ".join(others) or ("one process needs no engine" if launch.size == 1 else "")
        found.append((title, ", ".join(works) or "none", why))
    return found


def facts() -> list[tuple[str, str, str]]:
    """Return the installed packages and commands: name, version or "no", and place."""
    rows = [("hvkeras", __version__, ""), ("Python", sys.version.split()[0], sys.executable)]
    rows += [(name, version_of(name) or "no", "") for name in PACKAGES]
    for launcher in ("mpirun", "horovodrun", "srun", "java", "ssh"):
        path = find_command(launcher)
        state = "no" if not path else _version_line(path) if launcher == "mpirun" else (
            "hvkeras's link" if launcher == "horovodrun" and _is_link(path) else "yes")
        rows.append((launcher, state, path))
    return rows


def _is_link(path: str) -> bool:
    """Return whether a horovodrun is the command of `hvkeras link-horovodrun`, and starts `hvkeras run`."""
    try:
        return not horovod_is_installed() and "hvkeras link-horovodrun" in Path(path).read_text(errors="replace")
    except OSError:
        return False


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
        return "does not start"
    return answer.splitlines()[0].strip().removeprefix("mpirun ") if answer else "yes"


def horovod_is_installed() -> bool:
    """Return whether Horovod's launcher can be imported."""
    try:
        return importlib.util.find_spec("horovod.runner.launch") is not None
    except ImportError:
        return False
