"""Checks of the installed software: versions, imports and compatibility.

This includes the requirements of Spark jobs, and schedulers: their environment variables and installed clients.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from hvkeras import __version__
from hvkeras.backends import cpp_library
from hvkeras.backends.horovod import installed
from hvkeras.backends.native import NativeBackend
from hvkeras.control.launch_environments import detect_launch, slurm
from hvkeras.diagnostics.check_build import INSTALL_JAVA, find_command, java, version_of, version_output
from hvkeras.diagnostics.check_build import find_command as path_of
from hvkeras.diagnostics.doctor.machine import NOTE, OK, PROBLEM, CheckResult, check_result
from hvkeras.errors import INSTALL_TENSORFLOW, UsageError
from hvkeras.host.mpi import mpi_of
from hvkeras.host.network import split_address
from hvkeras.settings import Settings

OLDEST_JAVA = 17
_DEADLINE = 20.0  # seconds for `java -version`


def spark(version: str, environ: Mapping[str, str]) -> CheckResult:
    """Check whether `hvkeras.spark` works here.

    Args:
        version: Installed version of pyspark.
        environ: Environment variables, which may set Spark's Python.
    """
    command = java()
    if not command:
        return CheckResult("Spark", NOTE, f"pyspark {version} is installed, but no Java", INSTALL_JAVA)
    major = _java_major(command)
    if major is None:
        return CheckResult("Spark", NOTE, f"pyspark {version} is installed, but {command} does not start", INSTALL_JAVA)
    if major < OLDEST_JAVA:
        return CheckResult("Spark", NOTE,
                           f"pyspark {version} needs Java {OLDEST_JAVA} or later, and {command} is {major}",
                       INSTALL_JAVA)
    named = environ.get("PYSPARK_PYTHON") or "python3"
    python = shutil.which(named) or named
    if _bin_folder(python) != _bin_folder(sys.executable):
        return CheckResult("Spark", NOTE, f"pyspark {version} and Java {major}, but Spark's workers would run {python}",
                       f"export PYSPARK_PYTHON={sys.executable}")
    if not version_of("pyarrow"):
        return CheckResult("Spark", NOTE, f"pyspark {version} and Java {major}; KerasEstimator needs pyarrow as well",
                       "pip install 'hvkeras[spark]'")
    return CheckResult("Spark", OK, f"pyspark {version}, Java {major}")


def _bin_folder(python: str) -> str:  # the same for all names of a Python in its environment
    return os.path.dirname(os.path.abspath(python))


def _java_major(command: str) -> int | None:
    """Return the major version of a `java` command; None if it does not start."""
    try:
        done = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=_DEADLINE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found else None


_UNSUPPORTED_RAY = 3  # first major version that hvkeras.ray does not support


def scheduler_findings(environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check the schedulers.

    Args:
        environ: Environment variables.

    Yields:
        A result for the launch environment of this process, and for Slurm, Ray and Spark if they are installed.
    """
    yield _launch(environ)
    if srun := find_command("srun"):
        known = [name for name in environ if name.startswith("SLURM_")]
        here = f"in job {environ[slurm.JOB]}" if slurm.JOB in known else "outside of a job"
        yield CheckResult("Slurm", OK, f"{srun}, {here}")
    if ray := version_of("ray"):
        yield check_result("Ray", ray, "" if int(ray.partition(".")[0]) < _UNSUPPORTED_RAY else
                           "hvkeras.ray is made for Ray 2", "pip install 'hvkeras[ray]'", NOTE)
    if version := version_of("pyspark"):
        yield spark(version, environ)


def _launch(environ: Mapping[str, str]) -> CheckResult:
    try:
        launch = detect_launch(environ)
    except UsageError as error:
        text, _, fix = str(error).partition(" HINT: ")
        return CheckResult("launch environment", PROBLEM, text, fix)
    if launch.launcher == "none":
        return CheckResult("launch environment", OK, "none: each process is a separate job")
    found = f"rank {launch.rank} of {launch.size}, launched by {launch.launcher}"
    unknown = [name for name in dict.fromkeys(split_address(task)[0] for task in launch.cluster) if not _resolves(name)]
    return check_result("launch environment", found, f"no address here for {', '.join(unknown)}" if unknown else "",
                        "correct TF_CONFIG, or add the hosts to DNS or /etc/hosts on every host")


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


PROBE_DEADLINE = 60.0  # seconds for all imports
_INSTALL_TENSORFLOW = INSTALL_TENSORFLOW
_INSTALL_MPI = "pip install 'hvkeras[mpi]'"

Facts = dict[str, dict[str, Any]]


def probe_imports() -> Facts:
    """Import the installed packages in a separate process.

    Returns:
        Properties of each installed part, or its `error`.
    """
    modules = {"tensorflow": "tensorflow", "keras": "tensorflow", "mpi": "mpi4py", "horovod": "horovod"}
    parts = [part for part, module in modules.items() if importlib.util.find_spec(module)]
    parts += [] if cpp_library.objection() else ["native"]
    parts += ["data parallel"] if "tensorflow" in parts else []
    facts: Facts = {}
    while parts:  # continues after a part that takes down the process
        answers, failure = _probe(parts)
        facts |= answers
        parts = [part for part in parts if part not in facts]
        if parts and failure:
            facts[parts.pop(0)] = {"error": failure}
    return facts


def _probe(parts: list[str]) -> tuple[Facts, str]:
    """Return the output of the parts, and the failure of the process, used if a part is missing from the output."""
    command = [sys.executable, "-m", "hvkeras.diagnostics.doctor.probe", *parts]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_DEADLINE, check=False)
        output, failure = done.stdout, f"the import ended with code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
        failure = f"the import took longer than {PROBE_DEADLINE:g} s"
    facts: Facts = {}
    for line in output.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    return facts, failure


def findings(facts: Facts, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check the installed software.

    Args:
        facts: Result of `probe_imports`.
        environ: Environment variables, which may have settings.

    Yields:
        A result for each part.
    """
    yield CheckResult("hvkeras", OK, f"{__version__}, Python {sys.version.split()[0]} at {sys.executable}")
    yield _settings(environ)
    yield from _tensorflow(facts)
    yield _native(facts)
    yield from _data_parallel(facts)
    yield from _mpi(facts)
    yield _horovod(facts)
    yield from scheduler_findings(environ)
    yield _gpus(facts)


def _settings(environ: Mapping[str, str]) -> CheckResult:
    chosen = sorted(name for name in environ if name.startswith("HVKERAS_"))
    try:
        Settings(environ)
    except UsageError as error:
        text, _, fix = str(error).partition(" HINT: ")
        return CheckResult("settings", PROBLEM, text, fix)
    return CheckResult("settings", OK,
                       ", ".join(f"{name}={environ[name]}" for name in chosen) or "all are the defaults")


def _tensorflow(facts: Facts) -> Iterator[CheckResult]:
    known = facts.get("tensorflow")
    if known is None:
        yield CheckResult("TensorFlow", PROBLEM, "it is not installed", _INSTALL_TENSORFLOW)
        return
    if "error" in known:
        yield CheckResult("TensorFlow", PROBLEM, f"it cannot be imported ({known['error']})",
                      "reinstall it: pip install --force-reinstall " + _distribution("tensorflow"))
        return
    minor = tuple(int(number) for number in known["version"].split(".")[:2])
    yield check_result("TensorFlow", known["version"], "" if (2, 16) <= minor <= (2, 21) else
                       "hvkeras is tested with 2.16 to 2.21", "pip install 'tensorflow>=2.16,<2.22'", NOTE)
    keras = facts.get("keras", {})
    if "error" in keras:
        yield CheckResult("Keras", PROBLEM, f"tf.keras cannot be imported ({keras['error']})",
                      "pip install --upgrade keras, or tf_keras if TF_USE_LEGACY_KERAS=1 is set")
    else:
        other = keras.get("backend", "tensorflow") not in ("tensorflow", "")
        yield check_result("Keras", f"tf.keras is {keras['name']} {keras['version']}",
                           f"its backend is {keras['backend']}" if other else "", "KERAS_BACKEND=tensorflow")


def _distribution(module: str) -> str:
    return next(iter(metadata.packages_distributions().get(module, [])), module)


def _native(facts: Facts) -> CheckResult:
    if "tensorflow" not in facts:
        return CheckResult("backend native", NOTE, "it needs TensorFlow", _INSTALL_TENSORFLOW)
    available = NativeBackend.availability()
    if not available.ok:
        return CheckResult("backend native", NOTE, available.reason.split("; ")[0], cpp_library.INSTALL)
    known = facts.get("native", {})
    if "error" in known:
        return CheckResult("backend native", PROBLEM, known["error"], cpp_library.INSTALL)
    return check_result("backend native", available.reason, known["xla"], "jit_compile=False", NOTE)


def _data_parallel(facts: Facts) -> Iterator[CheckResult]:
    known = facts.get("data parallel")
    if known is None:
        return
    problem = f"a step cannot be divided ({known['error']})" if "error" in known else \
        f"this TensorFlow lacks {', '.join(known['lacks'])}" if known["lacks"] else \
        "a step that two ranks divide differs from that of one process" if known["differs"] else ""
    if problem:
        yield CheckResult("--data-parallel", NOTE, problem,
                          "pip install 'tensorflow>=2.16,<2.22', or write the lines of hvkeras (README)")
    else:
        yield CheckResult("--data-parallel", OK, f"two ranks divide {known['divided']:.1%} of the work of a step, with"
                          f" {known['rounds']} rounds of collectives and the results of one process")


def _mpi(facts: Facts) -> Iterator[CheckResult]:
    launcher = path_of("mpirun") or path_of("mpiexec")
    launcher_version = _launcher_version(launcher) if launcher else ""
    known = facts.get("mpi")
    if not launcher and known is None:
        yield CheckResult("MPI", NOTE, "neither mpirun nor mpi4py is installed; hvkeras run and TF_CONFIG do not"
                          " need them",
                      _INSTALL_MPI)
        return
    if not launcher:
        yield CheckResult("MPI", NOTE, "mpi4py is installed, but no mpirun", _INSTALL_MPI)
    elif known is None:
        yield CheckResult("MPI", NOTE, f"{launcher} is installed, but ranks need mpi4py to find each other",
                          _INSTALL_MPI)
    elif "error" in known:
        yield CheckResult("MPI", NOTE, f"mpi4py cannot be imported ({known['error']})", "pip install --force-reinstall"
                      " --no-binary :all: mpi4py, for the MPI that is installed")
    else:
        yield _compare_mpi(launcher, launcher_version, known["library"])


def _launcher_version(launcher: str) -> str:
    """Return a launcher's MPI version in the format of its MPI library; "" if it does not start."""
    answer = version_output(launcher) or ""
    if match := re.search(r"\(Open MPI\) (\S+)", answer):
        return f"Open MPI v{match[1]}"
    if match := re.search(r"Version:\s+(\S+)", answer):  # Hydra, the launcher of MPICH and Intel MPI
        return f"MPICH Version: {match[1]}"
    return answer.partition("\n")[0]


def _compare_mpi(launcher: str, launcher_version: str, library: str) -> CheckResult:
    here, loaded = mpi_of(launcher_version), mpi_of(library)
    if not launcher_version:
        return CheckResult("MPI", PROBLEM, f"{launcher} does not start", _INSTALL_MPI)
    # Hydra also starts the ranks of Intel MPI.
    hydra = here[0] != "Open MPI" and loaded[0] != "Open MPI"
    compatible = hydra or (here[0] == loaded[0] and _major(here[1]) == _major(loaded[1]))
    return check_result("MPI", f"{launcher} is from {' '.join(here)}, mpi4py loads {' '.join(loaded)}",
                        "" if compatible else "they are not compatible, and each rank would run as a separate job",
                        f"use the mpirun of {' '.join(loaded)}, or install mpi4py for {' '.join(here)}")


def _major(version: str) -> str:
    return version.partition(".")[0]


def _horovod(facts: Facts) -> CheckResult:
    available = installed.availability()
    if "tensorflow" not in facts and version_of("horovod"):
        return CheckResult("backend horovod", NOTE, "it needs TensorFlow", _INSTALL_TENSORFLOW)
    if not available.ok:
        state = NOTE if "is not installed" in available.reason else PROBLEM
        text, _, fix = available.reason.partition("; ")
        return CheckResult("backend horovod", state, text, fix)
    known = facts.get("horovod", {})
    return check_result("backend horovod", available.reason + (", and NCCL" if known.get("nccl") else ""),
                        f"it cannot be imported ({known['error']})" if "error" in known else "",
                        installed.BUILD)


def _gpus(facts: Facts) -> CheckResult:
    known = facts.get("tensorflow", {})
    seen = known.get("gpus", [])
    smi = path_of("nvidia-smi")
    if seen:
        slow = version_of("horovod") and not facts.get("horovod", {}).get("nccl")
        return check_result("GPUs", f"TensorFlow (CUDA {known['cuda']}) sees {len(seen)}",
                            "Horovod was built without NCCL, and moves their tensors through the host" if slow else "",
                            f"{installed.BUILD} --with-mpi --cuda", NOTE)
    if smi and "error" not in known:
        return CheckResult("GPUs", NOTE, f"{smi} is installed, but TensorFlow sees no GPU"
                       + ("" if known.get("cuda") else ": it was built without CUDA"), "pip install 'hvkeras[cuda]'")
    return CheckResult("GPUs", OK, "none; training runs on the CPUs")


def versions(facts: Facts) -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    return {
        "hvkeras": __version__,
        "Python": ".".join(sys.version.split()[0].split(".")[:2]),
        "TensorFlow": facts.get("tensorflow", {}).get("version", ""),
        "Keras": " ".join(facts.get("keras", {}).get(name, "") for name in ("name", "version")).strip(),
        "Horovod": version_of("horovod"),
        "MPI": " ".join(mpi_of(facts.get("mpi", {}).get("library", ""))).strip(),
    }
