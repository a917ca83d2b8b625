"""Features of the installed Horovod, detected from its files without importing it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import mmap
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hvkeras.backends.interface import Availability
from hvkeras.control.launch_environments import open_mpi
from hvkeras.errors import INSTALL_TENSORFLOW
from hvkeras.horovod.as_horovod import horovod_itself

if TYPE_CHECKING:
    from hvkeras.control.launch_environments import Launch

BUILD = "run hvkeras build-horovod"
# Strings in the binary of Horovod's library.
_MPI_SIGN = b"libmpi"  # the MPI library that Horovod is linked with
_OPEN_MPI_SIGN = b"libmpi.so.40"
_MPICH_SIGN = b"libmpi.so.12"  # also of Intel MPI
_NCCL_SIGN = b"NCCLAllreduce"
_GLOO_SIGN = b"GlooAllreduce"  # a class that exists only in builds with Gloo

_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tf-nightly")  # packages that provide TensorFlow


def availability() -> Availability:
    """Return whether Horovod is installed with TensorFlow support, and was built for this version of TensorFlow."""
    root = _root()
    if root is None:
        return Availability(False, f"Horovod is not installed; {BUILD}")
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:  # pip writes this last
        return Availability(False, f"the installation of Horovod is not complete; {BUILD}")
    if _library() is None:
        return Availability(False, f"Horovod was built without TensorFlow; {BUILD}")
    built_for = json.loads((root / "metadata.json").read_text()).get("tensorflow", "another version")
    installed = _tensorflow_version()
    if installed is None:
        return Availability(False, f"TensorFlow is not installed: {INSTALL_TENSORFLOW}")
    if built_for != installed:
        return Availability(False, f"Horovod was built for TensorFlow {built_for}, not this {installed}; {BUILD}")
    parts = [name for name, present in (("MPI", has_mpi()), ("Gloo", has_gloo())) if present]
    return Availability(True, f"Horovod {version} is installed, with {' and '.join(parts)}")


def has_mpi() -> bool:
    """Return whether Horovod was built with MPI."""
    return _contains(_MPI_SIGN)


def serves_mpi(launch: Launch) -> bool:
    """Return whether an MPI launcher started the job, and Horovod was built with the same MPI."""
    is_open_mpi = launch.launcher in open_mpi.LAUNCHERS
    return launch.mpi and _contains(_OPEN_MPI_SIGN if is_open_mpi else _MPICH_SIGN)


def has_nccl() -> bool:
    """Return whether Horovod was built with NCCL."""
    return _contains(_NCCL_SIGN)


def has_gloo() -> bool:
    """Return whether Horovod was built with Gloo."""
    return _contains(_GLOO_SIGN)


def _root() -> Path | None:
    with horovod_itself():
        spec = importlib.util.find_spec("horovod")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _library() -> Path | None:
    root = _root()
    return next((root / "tensorflow").glob("mpi_lib*.so"), None) if root is not None else None


@functools.cache
def _contains(sign: bytes) -> bool:
    library = _library()
    if library is None:
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(sign) >= 0


def _tensorflow_version() -> str | None:
    spec = importlib.util.find_spec("tensorflow")
    if spec is None:
        return None
    for name in _TENSORFLOWS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    # Any other build of TensorFlow; finding its name requires reading the file lists of all packages.
    return next((metadata.version(name) for name in metadata.packages_distributions().get("tensorflow", [])), None)
