"""Hydra's `mpiexec`, the launcher of MPICH and of Intel MPI."""

from __future__ import annotations

from collections.abc import Mapping

from hvkeras.launch_environments import slurm
from hvkeras.launch_environments.launch import Launch, Rendezvous
from hvkeras.launch_environments.variables import Names, launch_from

PROCESS_ID = "PMI_RANK"
PROCESS_COUNT = "PMI_SIZE"
LOCAL_PROCESS_ID = "MPI_LOCALRANKID"
LOCAL_PROCESS_COUNT = "MPI_LOCALNRANKS"
_INTEL = "I_MPI_HYDRA_UUID"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Recognises a process of Hydra; Slurm's own PMI, which sets the first two variables as well, is not it."""
    if LOCAL_PROCESS_ID not in environ and slurm.PROCESS_ID in environ:
        return None
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    if not names.announced(environ):
        return None
    launcher = f"mpiexec ({'Intel MPI' if _INTEL in environ else 'MPICH'})"
    return launch_from(launcher, environ, names, Rendezvous("mpi"), mpi=True)
