"""Build of Horovod: pip and cmake in a child process, with a progress bar and a log of their output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hvkeras.errors import MachineError, explain
from hvkeras.horovod.prerequisites import Prerequisites
from hvkeras.horovod.stubs import write_cmake, write_compiler, write_stubs

HOROVOD = "horovod==0.28.1"
_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]\s*(.*)")
_LINES_OF_FAILURE = 40
_PLAIN_STEP = 10


def horovod_variables(found: Prerequisites, stubs: Path, jobs: int, cuda: str | None,
                      environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for Horovod's build.

    Args:
        found: Compiler and MPI of the machine.
        stubs: Folder of the header stubs.
        cuda: Folder of the CUDA toolkit, "" for the default, None for no GPU.
        environ: The current environment, whose `CXXFLAGS` are appended.
    """
    variables = {
        "CXX": found.compiler,
        "CXXFLAGS": f"-I{stubs} {environ.get('CXXFLAGS', '')}".strip(),
        "MAKEFLAGS": f"-j{jobs}",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if found.mpi else "HOROVOD_WITHOUT_MPI": "1",
    }
    if cuda is not None:
        variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        if cuda:
            variables["HOROVOD_CUDA_HOME"] = cuda
    return variables


def install_packages(packages: tuple[str, ...], environ: Mapping[str, str], console: Console) -> None:
    """Install packages that the build needs with pip."""
    if packages:
        console.print(f"Installing what the build needs: {', '.join(packages)}", highlight=False)
        run_shown([*_pip("install"), "--quiet", *packages], environ, console, "Installing")


def build(found: Prerequisites, jobs: int, cuda: str | None, environ: Mapping[str, str], console: Console) -> None:
    """Build and install Horovod.

    Raises:
        MachineError: The build failed; the message ends with the path of the log.
    """
    with tempfile.TemporaryDirectory(prefix="hvkeras-horovod-") as stubs:
        variables = horovod_variables(found, write_stubs(Path(stubs)), jobs, cuda, environ)
        variables["CXX"] = write_compiler(Path(stubs), found.compiler)
        # A unity build of the sources for GPUs is not tested.
        variables["HOROVOD_CMAKE"] = write_cmake(Path(stubs), environ.get("HOROVOD_CMAKE", "cmake"), cuda is None)
        # Without the cache, which may have a wheel that was built against another TensorFlow.
        options = ["--no-build-isolation", "--no-cache-dir", "--no-binary", "horovod", "--no-deps", "--force-reinstall"]
        command = [*_pip("install"), "--verbose", *options, HOROVOD]
        run_shown(command, {**environ, **variables}, console, "Building Horovod")


def verify(with_mpi: bool, environ: Mapping[str, str]) -> dict[str, bool]:
    """Import the installed Horovod in a separate process.

    Args:
        with_mpi: Whether to require MPI.
        environ: Environment variables of that process.

    Returns:
        Features of the build: `mpi`, `gloo`, `nccl`.

    Raises:
        MachineError: Horovod cannot be imported, or lacks a required feature.
    """
    program = ("import json, horovod.tensorflow as hvd; print('built', json.dumps({'mpi': bool(hvd.mpi_built()),"
               " 'gloo': bool(hvd.gloo_built()), 'nccl': bool(hvd.nccl_built())}))")
    done = subprocess.run([sys.executable, "-I", "-c", program], env=dict(environ), capture_output=True, text=True,
                          timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("built ")]
    if done.returncode or not lines:
        raise MachineError(explain("The installed Horovod must be importable", "build it again with --force",
                                   error=(done.stderr.strip().splitlines() or ["no output"])[-1]))
    features: dict[str, bool] = json.loads(lines[0].removeprefix("built "))
    if not features["gloo"] or (with_mpi and not features["mpi"]):
        raise MachineError(explain("Horovod must have been built with Gloo" + (" and MPI" if with_mpi else ""),
                                   "build it again with --force", **features))
    return features


def _pip(command: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", command]


def run_shown(command: list[str], environ: Mapping[str, str], console: Console, title: str) -> None:
    """Run a command with a progress bar.

    Args:
        environ: Environment variables of the command.
        console: Console for the progress bar.
        title: Short description of the command.

    Raises:
        MachineError: The command failed; the message contains the end of its output.
    """
    with (
        tempfile.NamedTemporaryFile("w", prefix="hvkeras-", suffix=".log", delete=False) as log,
        subprocess.Popen(command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         stdin=subprocess.DEVNULL, text=True, errors="replace") as child,
    ):
        assert child.stdout is not None
        lines = _follow(child.stdout, log, console, title)
    if child.returncode:
        reason = explain(f"{title} must succeed", f"see the reason above; the complete output is in {log.name}",
                         exit_code=child.returncode)
        raise MachineError("\n".join([*lines[-_LINES_OF_FAILURE:], reason]))
    Path(log.name).unlink()


def _follow(output: IO[str], log: IO[str], console: Console, title: str) -> list[str]:
    """Show a progress bar on a terminal, or print a line every ten percent elsewhere; return the output."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
               TimeElapsedColumn(), TextColumn("{task.fields[what]}", style="dim"))
    lines, shown, began = [], -_PLAIN_STEP, time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=100, what="")
        for line in output:
            log.write(line)
            lines.append(line.rstrip())
            if match := _PERCENT.match(line):
                percent, what = int(match[1]), match[2].strip()[:60]
                progress.update(task, completed=percent, what=what)
                if not console.is_terminal and percent >= shown + _PLAIN_STEP:
                    shown = percent
                    console.print(f"{title}: {percent} % after {time.monotonic() - began:.0f} s", highlight=False)
    return lines
