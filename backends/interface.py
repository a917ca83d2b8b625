"""Interface of a collective engine. hvkeras uses engines only through it."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hvkeras.typing import Tensor as Tensor  # noqa: PLC0414 - re-exported for backends

if TYPE_CHECKING:

    from hvkeras.control.launch_environments import Launch
    from hvkeras.host.topology import Topology
    from hvkeras.settings import Settings


class Reduction(enum.Enum):
    """Reduction operation of an allreduce. Averages are sums that hvkeras divides above the interface."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True)
class Availability:
    """Availability of a backend in this environment, with a reason that the command line prints."""

    ok: bool
    reason: str


class Control(Protocol):
    """The part of the control channel that backends may use."""

    @property
    def local_address(self) -> str:
        """This host's address on the route to the control server, and therefore to the other hosts."""

    def gather(
        self, key: str, value: Any, timeout: float, on_missing: Callable[[list[int], float], None] | None = None,
        describe: Callable[[list[int]], str] | None = None, given_up: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Gather one value from every rank; see `hvkeras.control.exchange.Exchange.gather`."""


@dataclass(frozen=True)
class Start:
    """Arguments of `Backend.start()`.

    Attributes:
        topology: The ranks and hosts, agreed on by all ranks: `topology.rank` is this rank, `topology.size` the number
            of ranks, `topology.hosts` the host of each rank, `topology.is_one_host` true if all hosts are the same.
        control: The connected control channel, for exchanging addresses (never tensor data). None for a single process,
            whose collectives are still called, with `ranks=(0,)`. `control.gather(key, value, timeout)` returns the
            values of all ranks in rank order. Every rank calls it with the same key and a JSON-serializable value; keys
            may be reused. After `timeout` seconds it raises PeerError, which names the missing ranks.
        launch: How this process was launched; `launch.mpi` is true under an MPI launcher.
        settings: The settings in force; `settings.start_timeout` limits the entire start, in seconds.
        gpus: Globally unique name of each rank's GPU, in rank order; equal for ranks that share a GPU, "" for a CPU.
        session: Number of this start on this control channel, the same on all ranks, beginning at 1.
    """

    topology: Topology
    control: Control | None
    launch: Launch
    settings: Settings
    gpus: tuple[str, ...] = ()
    session: int = 1


class Backend(abc.ABC):
    """Abstract base class of collective engines.

    An engine declares its features in the class attributes below, and by also inheriting from classes of `capabilities`
    (`CompiledByXla`, `RecordsTimes`, `ReducesParts`, `HostsStrategies`). All methods of these classes are abstract.
    Nothing outside an engine's folder depends on its name.

    **Keys.** Each collective has a `key`: a name that is the same on all ranks and differs from the key of any other
    collective. It is a hash of what is communicated, see `hvkeras.job.plans`. The key recurs in every step, but a rank
    never has two collectives with the same key in flight.

    **Ranks.** `ranks` holds the participating global ranks in ascending order. Only these ranks call the collective.

    **Dtypes.** Every engine supports float32, float64, int32 and int64, and bool in allgather and broadcast. For other
    dtypes it may raise `UnsupportedError`, with the name of the backend and of the dtype in its message.

    **Calls.** Collectives are called in three situations:

    - *Eagerly*, from any thread: the call may block until the result is available.
    - *While a `tf.function` is traced*: tensors are symbolic. The call must return immediately, with symbolic results
      whose static shapes are set as far as they are known. The collective runs each time the graph runs, on
      TensorFlow's threads, and must be **asynchronous** there. TensorFlow starts operations without data dependencies
      in any order, different on each rank, and has few threads. A collective that blocked its thread while waiting for
      other ranks could prevent the start of the collective that they wait for. One rank may retrace a function when
      the others do not, so collectives must be matched by key, never by counting calls.
    - *While XLA compiles*, only for `CompiledByXla`: all ranks compile the same clusters.

    Attributes:
        name: The name that users pass to `init(backend=...)`.
        scales: Names of the dtypes for which reductions apply `before` and `after`. For other dtypes both are 1.0, and
            hvkeras scales above the interface.
        rounds_once: Names of the half-precision dtypes for which reductions accumulate in float32, including `before`
            and `after`, and round once. Other half-precision tensors are cast to float32 above the interface.
        compares_shapes: True if a mismatch of shapes that are known only at run time fails the collective on all ranks,
            with an error of TensorFlow's (`tf.errors.OpError`) that names both shapes and the ranks (`rank 1`).
        outlives_errors_in_graphs: True if collectives still work after another operation of a graph has failed on all
            ranks, after all of them had submitted that graph's collectives. Late results must not reach the next run.
        starts_after_failure: True if the engine can start again in a process where it was aborted because another rank
            failed. The surviving ranks of an elastic job then keep their processes.
        loses_collectives: True if a collective in a graph may hang forever after an abort. A rank that hangs there
            restarts its program.
        has_ranks: False in a worker that waits to join an elastic job, and has no ranks to communicate with yet.
        objection_to_sessions: Reason why TensorFlow 1 sessions cannot run the collectives; "" if they can.
        reads_horovods_variables: True if the environment variables for tuning Horovod affect this engine.
    """

    name: ClassVar[str]
    scales: ClassVar[frozenset[str]] = frozenset()
    rounds_once: ClassVar[frozenset[str]] = frozenset()
    compares_shapes: ClassVar[bool] = False
    outlives_errors_in_graphs: ClassVar[bool] = False
    starts_after_failure: ClassVar[bool] = False
    loses_collectives: ClassVar[bool] = False
    has_ranks: ClassVar[bool] = True
    objection_to_sessions: ClassVar[str] = "it supports tf.function only"
    reads_horovods_variables: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def availability(cls) -> Availability:
        """Return whether the engine is installed. No side effects: starts, imports and sets nothing."""

    @classmethod
    @abc.abstractmethod
    def objection(cls, launch: Launch, several_hosts: bool) -> str:
        """Return why this engine cannot serve a launch, and what to use instead; "" if it can. No side effects.

        Args:
            launch: How the process was launched.
            several_hosts: Whether the ranks run on more than one host. hvkeras calls this method with both values
                before the hosts are known, so the result must depend on the arguments only.
        """

    @classmethod
    @abc.abstractmethod
    def preference(cls, launch: Launch, has_gpu: bool) -> int | None:
        """Return the position of this engine in the order in which the backend `auto` tries engines, lowest first.

        The built-in engines use 0 to 20. None excludes the engine from `auto`, so that it is used only by name. Called
        in the main thread, before the engine starts.

        Args:
            launch: How the process was launched.
            has_gpu: Whether every rank has a GPU to itself.
        """

    @classmethod
    @abc.abstractmethod
    def built_with(cls) -> frozenset[str]:
        """Return which of `MPI`, `Gloo` and `NCCL` the installed engine was built with. No side effects.

        `hvd.mpi_built()`, `hvd.gloo_built()` and `hvd.nccl_built()` report them.
        """

    @abc.abstractmethod
    def start(self, start: Start) -> int:
        """Start the engine on all ranks. Called in the main thread, and again after `stop()`.

        It may block until all ranks have called it, for at most `start.settings.start_timeout` seconds. Use
        `start.control.gather` to exchange addresses.

        Returns:
            The number of ranks as seen by the engine; `init()` checks it.

        Raises:
            HvkerasError: The engine cannot start; the message includes a fix.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop the engine. It may be started again later in the same process.

        Called in the main thread, on all ranks, when no collective is in flight on this rank, or after `abort`. Other
        ranks may still be in collectives among themselves. It may block for seconds, but must not wait for a dead rank.
        Join the threads and close the files of `start()`. Other ranks may still be reading what this rank has sent:
        flush before closing, and do not treat a connection that another rank closes as a failure.
        """

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Fail all collectives in flight and all later ones with an error, which may contain `reason`.

        Called at most once, from another thread, when a rank has failed. It must return within a second, whatever the
        other ranks do, and the collectives must fail within seconds. hvkeras detects dead ranks and calls this method,
        so engines need no failure detection.
        """

    @abc.abstractmethod
    def is_peer_failure(self, error: BaseException) -> bool:
        """Return whether an exception of this engine reports the failure of another rank. Called from any thread.

        The exception may come from a graph, where TensorFlow includes the engine's text in its own message.
        """

    @property
    @abc.abstractmethod
    def engine(self) -> str:
        """Short description of the transport, for the line that `init()` prints. Also valid before `start()`."""

    @property
    @abc.abstractmethod
    def transport(self) -> str:
        """Transport in use: `MPI`, `Gloo` or `NCCL`, which Horovod's queries compare with, or any other name."""

    @abc.abstractmethod
    def add_process_set(self, ranks: Sequence[int]) -> None:
        """Prepare collectives among a subset of the ranks.

        Called by all ranks, members or not, in the same order, while no collective is in flight. It may block until all
        ranks have called it.
        """

    @abc.abstractmethod
    def remove_process_set(self, ranks: Sequence[int]) -> None:
        """Remove a subset of the ranks. Called like `add_process_set`. Graphs that use the subset do not run again."""

    @abc.abstractmethod
    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        """Reduce a bucket of tensors elementwise over `ranks`.

        Args:
            tensors: One or more tensors of one dtype, with the same shapes on every rank.
            key: The collective's name.
            reduction: How to combine the values.
            ranks: The participating ranks.
            before: Factor applied to each rank's values before the reduction; 1.0 unless `scales` contains the dtype.
            after: Factor applied to the result; 1.0 unless `scales` contains the dtype.

        Returns:
            The reduced tensors, with the shapes and dtype of `tensors`.
        """

    @abc.abstractmethod
    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        """Concatenate tensors along the first dimension, which may differ between ranks.

        Args:
            tensor: At least one-dimensional; the other dimensions and the dtype are equal on every rank.
            key: The collective's name.
            ranks: The participating ranks, in the order of the result.

        Returns:
            A tensor of shape `[sum of first dimensions, ...]`.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        """Broadcast the root's tensor to every rank. Shape and dtype are equal on every rank.

        Args:
            tensor: The value to send on the root; on other ranks, any tensor of the same shape and dtype.
            root_rank: The global rank of the root, which is one of `ranks`, not its index in `ranks`.
            key: The collective's name.
            ranks: The participating ranks.

        Returns:
            The root's value.
        """

    @abc.abstractmethod
    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Send different rows to each rank.

        Args:
            tensor: At least one-dimensional; all dimensions except the first, and the dtype, are equal on every rank.
            splits: int64 of shape `[len(ranks)]`: the number of consecutive rows to send to each of `ranks`. The
                numbers are not negative, and their sum is the first dimension.
            key: The collective's name.
            ranks: The participating ranks.

        Returns:
            The received rows in the order of `ranks`, and the number of rows from each rank: int64 of shape
            `[len(ranks)]`.
        """

    @abc.abstractmethod
    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        """Sum tensors and scatter the rows over `ranks`. If they are uneven, the first ranks get one more row.

        Args:
            tensor: At least one-dimensional, the same shape and dtype on every rank.
            key: The collective's name.
            ranks: The participating ranks, in the order of their rows.
            before: Factor applied to each rank's values before the reduction, as for `allreduce`.
            after: Factor applied to the result, as for `allreduce`.

        Returns:
            This rank's rows of the sum.
        """
