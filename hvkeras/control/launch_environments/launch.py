"""What a launch environment says about this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one launch can find each other.

    Attributes:
        kind: `none` (one process), `run` (our launcher serves the control channel at `address`), `standby` (the
            process joins an elastic job of our launcher that runs already), `spark` (rank 0's task serves the channel),
            `mpi` (exchange over MPI), `horovod_store` (horovodrun's key-value store at `address`),
            `tf_config` (rank 0 listens at its own TF_CONFIG `address`), `address` (rank 0 listens at
            `address`, which all ranks were given), `folder` (rank 0 writes address and secret to a
            private shared folder, under `job`).
        address: `host:port`, or "".
        job: A text that distinguishes this job from others of the same user; "" where not needed.
        communicator: With `mpi`, the `mpi4py.MPI.Comm` of the ranks that form the job; None for all.
    """

    kind: str
    address: str = ""
    job: str = ""
    communicator: Any = None


@dataclass(frozen=True)
class Launch:
    """What a launcher announced to this process.

    Attributes:
        launcher: The launcher's name, as printed: `mpirun (Open MPI)`, `TF_CONFIG`, ...
        rank: The announced rank.
        size: The announced number of ranks.
        rendezvous: Where the ranks find each other.
        local_rank: The announced local rank, if the launcher announces one.
        local_size: The announced local size, if the launcher announces one.
        cluster: With TF_CONFIG, `host:port` of every rank, in rank order.
        tasks: What users call each rank, in rank order: with TF_CONFIG its task (`chief 0`, `worker 0`, ...), in a
            Kubernetes Job its pod; empty where ranks are known by their numbers.
        mpi: Whether the process was started by an MPI launcher.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    rendezvous: Rendezvous = field(default_factory=lambda: Rendezvous("none"))
    local_rank: int | None = None
    local_size: int | None = None
    cluster: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    mpi: bool = False

    def task_name(self, rank: int) -> str:
        """The name by which users know a rank: `worker 1 (10.0.0.2:2222)` under TF_CONFIG, a pod, or `rank 1`."""
        if rank >= len(self.tasks):
            return f"rank {rank}"
        return self.tasks[rank] + (f" ({self.cluster[rank]})" if self.cluster else f" (rank {rank})")
