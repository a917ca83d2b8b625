"""The argument `comm` of `init()`: an MPI communicator, or a list of ranks, that selects the ranks of the job."""

from __future__ import annotations

import dataclasses
from typing import Any

from hvkeras.control.launch_environments.launch import Launch, Rendezvous
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.host.mpi import is_communicator, ranks_within, world_size


def launch_of(launch: Launch, comm: Any) -> Launch:
    """Return the launch of the ranks in a communicator.

    Args:
        comm: An `mpi4py.MPI.Comm`, a list of ranks, or None for all.

    Returns:
        `launch` if these are all ranks in their order. Otherwise the launch of a separate job of the communicator's
        ranks.

    Raises:
        UnsupportedError: `comm` is a list of some of the ranks.
        UsageError: `comm` is none of these, or its MPI has another number of ranks than were launched.
    """
    if comm is None or isinstance(comm, (list, tuple, range)):
        if sorted(comm or ()) not in ([], list(range(launch.size))):
            raise UnsupportedError(explain(
                "A job must consist of all launched ranks, or of those of an MPI communicator", "leave comm out, and"
                " use process_set= for a subset of the ranks, or pass MPI.COMM_WORLD.Split(color)", comm=comm))
        return launch
    if not is_communicator(comm):
        raise UsageError(explain("comm must be a communicator of mpi4py or a list of ranks",
                                 "leave it out to train on all ranks", comm=comm))
    if comm.Get_size() == launch.size and ranks_within(comm) == list(range(launch.size)):
        return launch
    if (world := world_size()) != launch.size:
        raise UsageError(explain(
            f"comm must belong to the job, but {launch.launcher} has started {launch.size} ranks, and MPI"
            f" has {world}", "launch with mpirun, or leave comm out", comm_size=comm.Get_size()))
    return dataclasses.replace(launch, rank=comm.Get_rank(), size=comm.Get_size(), local_rank=None, local_size=None,
                               rendezvous=Rendezvous("mpi", communicator=comm))
