"""Hydra's `mpiexec`, the launcher of MPICH and of Intel MPI."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hvkeras.control.launch_environments import slurm
from hvkeras.control.launch_environments.launch import Launch, Names, Rendezvous, is_launched_by, launch_from

PROCESS_ID = "PMI_RANK"
PROCESS_COUNT = "PMI_SIZE"
LOCAL_PROCESS_ID = "MPI_LOCALRANKID"
LOCAL_PROCESS_COUNT = "MPI_LOCALNRANKS"
_INTEL = "I_MPI_HYDRA_UUID"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Detect a process of Hydra, but not one of Slurm's own PMI, which also sets the first two variables."""
    if LOCAL_PROCESS_ID not in environ and slurm.PROCESS_ID in environ:
        return None
    launcher = f"mpiexec ({'Intel MPI' if _INTEL in environ else 'MPICH'})"
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    if not is_launched_by(launcher, environ, (PROCESS_ID, PROCESS_COUNT), dataclasses.astuple(names)):
        return None
    return launch_from(launcher, environ, names, Rendezvous("mpi"), mpi=True)
