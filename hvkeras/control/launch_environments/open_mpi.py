"""Open MPI's `mpirun`, by itself or started by `horovodrun --mpi`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hvkeras.control.launch_environments.launch import Launch, Names, Rendezvous, is_launched_by, launch_from

PROCESS_ID = "OMPI_COMM_WORLD_RANK"
PROCESS_COUNT = "OMPI_COMM_WORLD_SIZE"
LOCAL_PROCESS_ID = "OMPI_COMM_WORLD_LOCAL_RANK"
LOCAL_PROCESS_COUNT = "OMPI_COMM_WORLD_LOCAL_SIZE"
JOB_ID = "PMIX_NAMESPACE"
# With MPI, horovodrun itself sets no variable. It is detected by the options that it always passes to mpirun: tagged
# output, these transports, and NCCL's interface. Only the printed name depends on it.
_HOROVODRUN = {"OMPI_MCA_orte_tag_output": "1", "OMPI_MCA_btl": "^openib"}
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_MPIRUN, _HOROVODRUN_MPI = "mpirun (Open MPI)", "horovodrun (MPI)"
LAUNCHERS = (_MPIRUN, _HOROVODRUN_MPI)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Detect a process of Open MPI's `mpirun`."""
    by_horovodrun = _NCCL_INTERFACE in environ and all(environ.get(name) == value
                                                       for name, value in _HOROVODRUN.items())
    launcher = _HOROVODRUN_MPI if by_horovodrun else _MPIRUN
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    if not is_launched_by(launcher, environ, (PROCESS_ID, PROCESS_COUNT), dataclasses.astuple(names)):
        return None
    job = environ.get(JOB_ID, "")
    rendezvous = Rendezvous("mpi", job=f"open-mpi-{job}" if job.isalnum() else "")
    return launch_from(launcher, environ, names, rendezvous, mpi=True)
