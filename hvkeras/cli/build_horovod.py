"""`hvkeras build-horovod`: build Horovod against the installed TensorFlow."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from rich.console import Console

from hvkeras.backends.horovod import installed
from hvkeras.errors import MachineError
from hvkeras.horovod import building
from hvkeras.horovod.prerequisites import build_environment, find_prerequisites


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(
        prog="hvkeras build-horovod",
        description="Build Horovod 0.28.1 against the installed TensorFlow (2.16 to 2.21), with Gloo, and with MPI"
        " where mpicxx is found. It takes a few minutes, and must be repeated after an upgrade of TensorFlow.",
    )
    mpi = options.add_mutually_exclusive_group()
    mpi.add_argument("--with-mpi", dest="mpi", action="store_true", default=None,
                     help="fail rather than build without MPI")
    mpi.add_argument("--without-mpi", dest="mpi", action="store_false",
                     help="build without MPI, even if it is installed")
    options.add_argument("--cuda", nargs="?", const="", metavar="FOLDER",
                         help="build with NCCL for GPUs, optionally with the CUDA toolkit of that folder (not tested)")
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                         help="compilers that run in parallel (default: one per core, %(default)s here)")
    options.add_argument("--force", action="store_true", help="build even if the installed Horovod is suitable")
    return options


def build_horovod(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: Arguments of `hvkeras build-horovod`.

    Returns:
        Exit code.

    Raises:
        MachineError: A prerequisite is missing, or the build failed.
    """
    return _build(parser().parse_args(arguments), Console(soft_wrap=True))


def _build(options: argparse.Namespace, console: Console) -> int:
    environ = build_environment(os.environ)
    found = find_prerequisites(options.mpi, options.cuda, environ)
    if not options.force and options.cuda is None and (built := _usable(bool(found.mpi), environ)):
        console.print(f"Horovod is already built against TensorFlow {found.tensorflow}, with {built}.", highlight=False)
        return 0
    for notice in found.notices:
        console.print(notice, highlight=False)
    building.install_packages(found.missing_packages, environ, console)
    console.print(f"Building Horovod 0.28.1 against TensorFlow {found.tensorflow} with {found.compiler}"
                  f" ({'MPI and Gloo' if found.mpi else 'Gloo'}); this takes a few minutes.", highlight=False)
    building.build(found, max(options.jobs, 1), options.cuda, environ, console)
    features = building.verify(bool(found.mpi), environ)
    console.print(f"Horovod is built and imports, with {_feature_names(features)}.", highlight=False)
    return 0


def _usable(with_mpi: bool, environ: dict[str, str]) -> str:
    """Return the build features of the installed Horovod as text; "" if there is no suitable Horovod."""
    if not installed.availability().ok or (with_mpi and not installed.has_mpi()):
        return ""
    try:
        return _feature_names(building.verify(with_mpi, environ))
    except MachineError:
        return ""


def _feature_names(features: dict[str, bool]) -> str:
    return ", ".join(name.upper() if name != "gloo" else "Gloo" for name, has in features.items() if has)
