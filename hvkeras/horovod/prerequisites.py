"""Search for prerequisites of a Horovod build, without side effects; a missing one is an error with its fix."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvkeras.errors import INSTALL_TENSORFLOW, MachineError, UsageError, explain

TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")
OLDEST_TENSORFLOW = (2, 16)
NEWEST_TENSORFLOW = (2, 21)
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)

# Distributions and their supported versions. pip installs missing ones.
PYTHON_PACKAGES = {
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "pyyaml": "pyyaml",
    "setuptools": "setuptools<81",  # later ones lack pkg_resources
    "wheel": "wheel",
}
CMAKE = "cmake>=3.13,<4"  # cmake 4 rejects the old policies of the libraries bundled with Horovod


@dataclass(frozen=True)
class Prerequisites:
    """Prerequisites that were found on this machine.

    Attributes:
        tensorflow: Version of the installed TensorFlow.
        mpi: Path of the MPI compiler wrapper `mpicxx`, or "" for a build without MPI.
        missing_packages: Packages that pip must install first.
        notices: Messages for the user before the build.
    """

    tensorflow: str
    compiler: str
    mpi: str
    missing_packages: tuple[str, ...]
    notices: tuple[str, ...]


def find_prerequisites(with_mpi: bool | None, cuda: str | None, environ: Mapping[str, str]) -> Prerequisites:
    """Find all prerequisites of the build.

    Args:
        with_mpi: True to require MPI, False to build without it, None to use it if it is available.
        cuda: Folder of the CUDA toolkit for a build with NCCL, "" to search for it, None for no GPU.
        environ: Environment variables of the build; `PATH` and `CXX` are read.

    Raises:
        MachineError: A prerequisite is missing that pip cannot install.
        UsageError: This version of Python or TensorFlow is not supported.
    """
    check_python(sys.version_info[:2])
    tensorflow = check_tensorflow(installed_tensorflow())
    path = environ.get("PATH", "")
    compiler = find_compiler(environ.get("CXX", ""), path)
    find_tool("make", path, "install it (Debian, Ubuntu: apt-get install make)")
    notices = []
    if cuda is not None:
        find_tool("nvcc", f"{cuda}/bin:{path}" if cuda else path,
                  "install the CUDA toolkit, or specify it: --cuda FOLDER")
        notices.append("Building with NCCL for GPUs, which hvkeras's tests do not cover.")
    mpi = "" if with_mpi is False else shutil.which("mpicxx", path=path) or ""
    if not mpi and with_mpi:
        raise MachineError(explain("A build with MPI needs its compiler wrapper mpicxx in the PATH",
                                   "pip install 'hvkeras[mpi]', or build with Gloo only: --without-mpi"))
    if not mpi and with_mpi is None:
        notices.append("No MPI found: building with Gloo only. For mpirun and horovodrun --mpi, first run:"
                       " pip install 'hvkeras[mpi]'")
    return Prerequisites(tensorflow, compiler, mpi, missing_packages(path), tuple(notices))


def check_python(version: tuple[int, ...]) -> None:
    """Raise UsageError if a Python version is not supported."""
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        raise UsageError(explain("Horovod builds here with Python 3.10 to 3.13",
                                 "create a virtual environment with one of these", python=".".join(map(str, version))))


def installed_tensorflow() -> str:
    """Return the version of the installed TensorFlow, from any distribution; "" if there is none."""
    for name in TENSORFLOWS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_tensorflow(version: str) -> str:
    """Return the TensorFlow version if it is supported.

    Raises:
        MachineError: TensorFlow is not installed.
        UsageError: This version is not supported.
    """
    if not version:
        raise MachineError(explain("Horovod is built against an installed TensorFlow, and there is none",
                                   f"{INSTALL_TENSORFLOW}, first"))
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST_TENSORFLOW <= number <= NEWEST_TENSORFLOW:
        raise UsageError(explain("Horovod 0.28.1 builds this way against TensorFlow 2.16 to 2.21",
                                 "pip install 'tensorflow-cpu>=2.16,<2.22'", tensorflow=version))
    return version


def find_compiler(wanted: str, path: str) -> str:
    """Return the path of the C++ compiler: the requested one, else g++, c++ or clang++."""
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        if found := shutil.which(name, path=path):
            return found
    if wanted:
        raise MachineError(explain("CXX must name a C++ compiler", "unset CXX, or install that compiler", CXX=wanted))
    raise MachineError(explain("Building Horovod needs a C++ compiler: g++, c++ or clang++",
                               "install one (Debian, Ubuntu: apt-get install g++)"))


def find_tool(name: str, path: str, hint: str) -> str:
    """Return the path of a program, or raise MachineError with the hint."""
    if found := shutil.which(name, path=path):
        return found
    raise MachineError(explain(f"Building Horovod needs {name} in the PATH", hint))


def missing_packages(path: str) -> tuple[str, ...]:
    """Return the packages that pip must install, including cmake if that in the PATH is unsuitable."""
    missing = [wanted for name, wanted in PYTHON_PACKAGES.items() if not _is_installed(name, wanted)]
    return (*missing, *(() if (3, 13) <= _cmake_version(path) < (4,) else (CMAKE,)))


def _is_installed(name: str, wanted: str) -> bool:
    try:
        major = int(metadata.version(name).split(".")[0])
    except metadata.PackageNotFoundError:
        return False
    return "<" not in wanted or major < int(wanted.split("<")[1])


def _cmake_version(path: str) -> tuple[int, ...]:
    found = shutil.which("cmake", path=path)
    if found is None:
        return ()
    try:
        text = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def build_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the build, with the programs of this Python environment first in the PATH."""
    return {**environ, "PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', '')}"}
