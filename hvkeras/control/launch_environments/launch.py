"""Launch of this process (rank, size, rendezvous), read from the variables of its launcher.

Impossible values are errors: text instead of a number, or a rank not below the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvkeras.errors import UsageError, explain


@dataclass(frozen=True)
class Rendezvous:
    """SyncPoint point of the ranks of one launch.

    Attributes:
        kind: `none` (one process), `run` (our launcher serves the control channel at `address`), `standby` (the
            process joins an elastic job of our launcher that runs already), `spark` (rank 0's task serves the channel),
            `mpi` (exchange over MPI), `horovod_store` (horovodrun's key-value store at `address`),
            `tf_config` (rank 0 listens at its own TF_CONFIG `address`), `address` (rank 0 listens at
            `address`, which all ranks were given), `folder` (rank 0 writes address and secret to a
            private shared folder, under `job`).
        address: `host:port`, or "".
        job: A text that distinguishes this job from others of the same user; "" if not needed.
        communicator: With `mpi`, the `mpi4py.MPI.Comm` of the ranks that form the job; None for all.
    """

    kind: str
    address: str = ""
    job: str = ""
    communicator: Any = None


@dataclass(frozen=True)
class Launch:
    """A launcher's description of this process and its job.

    Attributes:
        launcher: The launcher's name, as printed: `mpirun (Open MPI)`, `TF_CONFIG`, ...
        rendezvous: The point where the ranks meet.
        local_rank: The announced local rank, if the launcher announces one.
        local_size: The announced local size, if the launcher announces one.
        cluster: With TF_CONFIG, `host:port` of every rank, in rank order.
        tasks: The users' names of the ranks, in rank order: with TF_CONFIG the task (`chief 0`, `worker 0`, ...), in a
            Kubernetes Job the pod; empty where ranks have only numbers.
        mpi: True if an MPI launcher started the process.
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

    @property
    def started_by(self) -> str:
        """The launcher in a sentence: `launched by srun`, or `no launcher`."""
        return "no launcher" if self.rendezvous.kind == self.launcher == "none" else f"launched by {self.launcher}"

    def task_name(self, rank: int) -> str:
        """Return the user's name of a rank: `worker 1 (10.0.0.2:2222)` under TF_CONFIG, a pod, or `rank 1`."""
        if rank >= len(self.tasks):
            return f"rank {rank}"
        return self.tasks[rank] + (f" ({self.cluster[rank]})" if self.cluster else f" (rank {rank})")


class IncompleteLaunchError(UsageError):
    """Some of a launcher's variables are set, but others that it always sets are missing."""


@dataclass(frozen=True)
class Names:
    """One launcher's variable names for rank, size, local rank and local size.

    Attributes:
        size: The variable of the number of ranks.
        local_rank: The variable of the rank within the host; "" if the launcher has none.
        local_size: The variable of the number of ranks on the host; "" if the launcher has none.
    """

    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""


def is_launched_by(launcher: str, environ: Mapping[str, str], needed: Sequence[str],
                   distinctive: Sequence[str]) -> bool:
    """Return whether a launcher started this process, that is, whether all needed variables are set.

    Args:
        needed: The variables that are read, which the launcher sets on every rank.
        distinctive: The variables that nothing else sets, so that a single one identifies the launcher.

    Raises:
        IncompleteLaunchError: Some are set, but not all that are needed: assuming a job of one process would be wrong.
    """
    missing = [name for name in needed if not _is_set(environ, name)]
    present = {name: environ[name] for name in distinctive if _is_set(environ, name)}
    if missing and present:
        are = "are" if len(missing) > 1 else "is"
        raise IncompleteLaunchError(explain(
            f"A process that {launcher} starts must get all of its variables, but {', '.join(missing)} {are} missing",
            f"pass {'them' if len(missing) > 1 else 'it'} on to this process as well (containers, sudo and env -i leave"
            f" variables out), or unset {', '.join(present)} to run a single process", **present))
    return not missing


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return bool(environ.get(name, "").strip())


def number(environ: Mapping[str, str], name: str, launcher: str, least: int = 0) -> int:
    """Read one variable as an integer.

    Args:
        launcher: The launcher that set it, for the message.

    Raises:
        UsageError: It is not a number, or too small.
    """
    text = environ[name].strip()
    if text.isascii() and text.isdigit() and int(text) >= least:
        return int(text)
    raise UsageError(explain(f"{name} must be an integer of at least {least}, as {launcher} sets it",
                             f"let the launcher set {name}, or unset it to run a single process",
                             **{name: environ[name]}))


def launch_from(launcher: str, environ: Mapping[str, str], names: Names, rendezvous: Rendezvous,
                mpi: bool = False) -> Launch:
    """Build the `Launch` of a launcher that sets numeric ranks and sizes.

    Args:
        environ: The environment, which contains rank and size.
        rendezvous: The point where the ranks meet.
        mpi: True for an MPI launcher.

    Raises:
        UsageError: A number cannot be read, or a rank is not below its size.
    """
    rank, size = number(environ, names.rank, launcher), number(environ, names.size, launcher, least=1)
    _check_below(rank, size, names.rank, names.size, launcher)
    local_rank = number(environ, names.local_rank, launcher) if environ.get(names.local_rank) else None
    local_size = number(environ, names.local_size, launcher, least=1) if environ.get(names.local_size) else None
    if local_rank is not None and local_size is not None:
        _check_below(local_rank, local_size, names.local_rank, names.local_size, launcher)
    return Launch(launcher, rank, size, rendezvous, local_rank, local_size, mpi=mpi)


def served_launch(launcher: str, kind: str, environ: Mapping[str, str], names: Names, control: str) -> Launch | None:
    """Detect a rank of one of our own launchers, which serves the control channel and sets its address.

    Args:
        names: The launcher's variable names; they begin like `control`.
        control: The variable of the control channel's address.

    Returns:
        The launch; None if this launcher did not start the process.

    Raises:
        UsageError: A variable is missing or cannot be read.
    """
    needed = (names.rank, names.size, names.local_rank, names.local_size, control)
    if not is_launched_by(launcher, environ, needed, needed):
        return None
    address = environ[control]
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(explain(f"{control} must be host:port, as {launcher} sets it",
                                 f"unset the variables that begin with {control.rpartition('_')[0]}_, or start with"
                                 f" {launcher}", **{control: address}))
    return launch_from(launcher, environ, names, Rendezvous(kind, address))


def _check_below(rank: int, size: int, rank_name: str, size_name: str, launcher: str) -> None:
    if rank >= size:
        raise UsageError(explain(f"{rank_name} must be below {size_name}, as {launcher} sets them",
                                 "let the launcher set both; do not export one of them by hand",
                                 **{rank_name: rank, size_name: size}))
