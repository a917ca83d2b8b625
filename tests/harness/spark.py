"""Spark for tests: the Python that has it, and a standalone cluster of a master and a worker on each host."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.hosts import Host
from harness.launchers import clean_environment
from harness.processes import MARK, end_marked

_CLUSTERS = Path(__file__).resolve().parents[2] / ".venv-clusters"
_READY_SECONDS = 60.0
CORES = 2  # per worker


def python() -> str:
    """Return the Python that has pyspark: this one, or that of `.venv-clusters`; "" if there is none."""
    if importlib.util.find_spec("pyspark") is not None:
        return sys.executable
    return str(_CLUSTERS / "bin" / "python") if (_CLUSTERS / ".has-spark").exists() else ""


def missing() -> str:
    """Return the reason why Spark cannot run on this machine, or ""."""
    if not python():
        return "pyspark is not installed: make .venv-clusters/.has-spark"
    return "" if shutil.which("java") else "there is no Java"


def environment() -> dict[str, str]:
    """Return the environment variables of a driver."""
    return {"PYSPARK_PYTHON": python(), "SPARK_LOCAL_IP": "127.0.0.1"}


@dataclass(frozen=True)
class Cluster:
    """A running standalone cluster.

    Attributes:
        master: Its URL.
        hosts: The hosts of its workers; the master is on the first one.
        mark: The mark of its processes, including executors and ranks.
    """

    master: str
    hosts: Sequence[Host]
    mark: str


@contextlib.contextmanager
def standalone(hosts: Sequence[Host], folder: Path, settings: Mapping[str, str]) -> Iterator[Cluster]:
    """Start a master on the first host and a worker on each, and kill them and their executors at the end.

    Args:
        hosts: The hosts.
        folder: Folder for logs and work folders.
        settings: Spark's settings for its daemons.
    """
    mark = uuid.uuid4().hex
    home = Path(subprocess.run([python(), "-I", "-c", "import pyspark; print(pyspark.__path__[0])"], check=True,
                               capture_output=True, text=True, timeout=60).stdout.strip())
    options = " ".join(f"-D{name}={value}" for name, value in settings.items())
    variables = clean_environment(folder) | {MARK: mark, "SPARK_DAEMON_JAVA_OPTS": options, "SPARK_HOME": str(home)}

    daemons: list[subprocess.Popen[bytes]] = []

    def daemon(host: Host, name: str, *arguments: str) -> Path:
        log = folder / f"{name}.log"
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name.partition('-')[0]}", *arguments]
        with log.open("wb") as file:
            daemons.append(subprocess.Popen(
                host.command("env", f"SPARK_LOCAL_IP={host.address}", *command), env=variables, cwd=folder,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True))
        return log

    try:
        log = daemon(hosts[0], "master.Master", "--host", hosts[0].address, "--port", "0", "--webui-port", "0")
        master = _wait_for(log, r"spark://[\d.]+:\d+")
        for index, host in enumerate(hosts):
            log = daemon(host, f"worker.Worker-{index}", "--host", host.address, "--cores", str(CORES), "--memory",
                         "2g", "--webui-port", "0", "--work-dir", str(folder / f"work-{index}"), master)
            _wait_for(log, "Successfully registered")
        yield Cluster(master, hosts, mark)
    finally:
        end_marked(mark)
        for process in daemons:
            process.wait(timeout=10)


def _wait_for(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"{log} has no {pattern!r}:\n{log.read_text(errors='replace')[-3000:]}")
