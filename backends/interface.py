"""The interface that every collective engine implements; engines are used only through it."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hvkeras.typing import Tensor as Tensor  # noqa: PLC0414 - backends import all they need from here

if TYPE_CHECKING:

    from hvkeras.control.launch_environments import Launch
    from hvkeras.host.topology import Topology
    from hvkeras.settings import Settings


class Reduction(enum.Enum):
    """How allreduce combines the ranks' values; averages are sums that are divided above the interface."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True)
class Availability:
    """Whether a backend is available in this environment, and the reason, as printed by the command line."""

    ok: bool
    reason: str


class Control(Protocol):
    """What a backend may use of the control channel."""

    @property
    def local_address(self) -> str:
        """This host's address on the route to the server, and therefore to the other hosts."""

    def gather(
        self, key: str, value: Any, timeout: float, on_missing: Callable[[list[int], float], None] | None = None,
        describe: Callable[[list[int]], str] | None = None, given_up: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Collects one value from every rank; see `hvkeras.control.exchange.Exchange.gather`."""


@dataclass(frozen=True)
class Start:
    """The start parameters of a backend.

    Attributes:
        topology: The ranks and hosts, agreed upon by all ranks: `topology.rank` is this rank, `topology.size` the
            number of ranks, `topology.hosts` the host of each rank, `topology.is_one_host` whether all are the same.
        control: The connected control channel, for exchanging addresses (never tensor data); None for a single process,
            whose collectives are still called, with `ranks=(0,)`. `control.gather(key, value, timeout)` returns the
            value of each rank, in their order: every rank calls it with the same key and anything that JSON holds; a
            key may be used again. It raises PeerError, which names the missing ranks, after `timeout` seconds.
        launch: How this process was launched: `launch.mpi` says whether MPI's launcher did.
        settings: The settings in force; `settings.start_timeout` is the time for the whole start, in seconds.
        gpus: What each rank computes on, in rank order: a name that no other GPU has, or "" for a CPU.
        session: The number of this start on this control channel, the same on all ranks; 1 for the first.
    """

    topology: Topology
    control: Control | None
    launch: Launch
    settings: Settings
    gpus: tuple[str, ...] = ()
    session: int = 1


class Backend(abc.ABC):
    """One collective engine.

    An engine declares what it can do: by the attributes below, and by the further classes of `capabilities` that it
    inherits (`CompiledByXla`, `RecordsTimes`, `HostsStrategies`). Every method of every class is abstract, and nothing
    outside an engine's folder depends on its name.

    Collectives take a `key`: a name that is the same on all ranks for the same collective and different for any other
    collective (it is a hash of what is communicated, see `hvkeras.job.plans`). The same key recurs in every step, and
    a rank never has two runs of one key in flight. `ranks` holds the participating global ranks in ascending order;
    only these ranks make the call.

    Every engine serves float32, float64, int32 and int64, and moves bool (allgather, broadcast). For any other dtype it
    may raise `UnsupportedError`, which names the backend and the dtype.

    Collectives are called in three situations:

    - *Eagerly*, from any thread: the call may block until the result is there.
    - *While a `tf.function` is traced*: tensors are symbolic, and the call must return at once, with symbolic results
      whose static shapes are set as far as they are known. It runs whenever the graph runs, on TensorFlow's threads.
      There it must be **asynchronous**: TensorFlow starts collectives without a data dependency in any order and on few
      threads, a different order on each rank, and a collective that blocks a thread while it waits for other ranks
      may keep the one from starting for which they wait. A rank may trace a function again when others do not, so
      that the key alone, and no counter of calls, identifies a collective.
    - *While XLA compiles*, only for `CompiledByXla`: TensorFlow's clusters are compiled by every rank alike.

    Attributes:
        name: The name that users pass to `init(backend=...)`.
        scales: The names of the dtypes for which reductions apply `before` and `after` themselves. For all other
            dtypes these are 1.0, and scaling is done above the interface.
        rounds_once: The names of the half-precision dtypes that reductions compute in float32, including `before` and
            `after`, and round once. Others are cast to float32 above the interface, so that sums have its range.
        compares_shapes: Whether shapes that are known only when a graph runs, and differ between ranks, make the
            collective fail on all ranks with an error that names both shapes and ranks.
        outlives_errors_in_graphs: Whether collectives still work after another operation of a graph has failed on all
            ranks while collectives of that graph were in flight; results that arrive late must not reach the next run.
        starts_after_failure: Whether the engine can start again in a process in which it was aborted, because another
            rank had failed, so that the ranks of an elastic job that are left keep their processes.
        loses_collectives: Whether a collective in a graph may never end after an abort. A rank that does not come back
            from one starts its program anew.
        has_ranks: Whether there are ranks to communicate with: not in a worker that waits to join an elastic job.
        objection_to_sessions: Why TensorFlow 1 sessions cannot run the collectives; "" if they can.
        reads_horovods_variables: Whether the variables by which users tune Horovod have their effect on it.
    """

    name: ClassVar[str]
    scales: ClassVar[frozenset[str]] = frozenset()
    rounds_once: ClassVar[frozenset[str]] = frozenset()
    compares_shapes: ClassVar[bool] = False
    outlives_errors_in_graphs: ClassVar[bool] = False
    starts_after_failure: ClassVar[bool] = False
    loses_collectives: ClassVar[bool] = False
    has_ranks: ClassVar[bool] = True
    objection_to_sessions: ClassVar[str] = "it was written for functions"
    reads_horovods_variables: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def availability(cls) -> Availability:
        """Reports whether the engine is installed. No side effects: nothing is started, imported or set for it."""

    @classmethod
    @abc.abstractmethod
    def objection(cls, launch: Launch, several_hosts: bool) -> str:
        """Explains why this engine cannot serve a launch, and what to use instead; "" if it can. No side effects.

        Args:
            launch: How the process was launched.
            several_hosts: Whether the ranks run on more than one host. hvkeras asks with False and with True before it
                knows the hosts, so that the answer must follow from the arguments alone.
        """

    @classmethod
    @abc.abstractmethod
    def preference(cls, launch: Launch, has_gpu: bool) -> int | None:
        """Says when the backend `auto` tries this engine: engines with smaller numbers come first.

        The built-in engines use 0 to 20, so that 5 is tried before most of them and 100 after all. None: only when
        asked for by name. Called in the main thread, before the engine starts.

        Args:
            launch: How the process was launched.
            has_gpu: Whether every rank has a GPU that no other rank uses.
        """

    @classmethod
    @abc.abstractmethod
    def built_with(cls) -> frozenset[str]:
        """The libraries of `MPI`, `Gloo` and `NCCL` that the installed engine's collectives can run on.

        `hvd.mpi_built()`, `hvd.gloo_built()` and `hvd.nccl_built()` report them. No side effects.
        """

    @abc.abstractmethod
    def start(self, start: Start) -> int:
        """Starts the engine on all ranks; called in the main thread, and again after `stop()`.

        It may block until all ranks are there, at most for `start.settings.start_timeout` seconds; the control channel
        (`start.control.gather`) exchanges addresses and the like within that time.

        Returns:
            The number of ranks as seen by the engine; `init()` checks it.

        Raises:
            HvkerasError: The engine cannot start; the message says what to do.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Stops the engine; it may be started again later in the same process.

        Called in the main thread, on all ranks, when no collective is in flight, or after `abort`. It may block for
        seconds, and never for a rank that has died. Other ranks may still be reading what this rank has sent: flush
        before closing, and take a connection that another rank closes for no failure. Threads and files that `start()`
        opened are closed.
        """

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Makes every collective in flight, and every later one, fail with an error, which may contain `reason`.

        Called at most once, from another thread, when a rank has failed: it must return within a second, whatever the
        other ranks do, and collectives must fail within seconds. hvkeras notices dead ranks and calls this, so that an
        engine need not look for them.
        """

    @abc.abstractmethod
    def is_peer_failure(self, error: BaseException) -> bool:
        """Whether an exception is this engine's way of reporting the failure of another rank.

        The exception may come from a graph, with the engine's text inside a message of TensorFlow's. Any thread.
        """

    @property
    @abc.abstractmethod
    def engine(self) -> str:
        """A short description of the transport, for the line that `init()` prints; valid before `start()` as well."""

    @property
    @abc.abstractmethod
    def transport(self) -> str:
        """What carries the data now: `MPI`, `Gloo` or `NCCL`, by which Horovod's queries go, else a name of its own."""

    @abc.abstractmethod
    def add_process_set(self, ranks: Sequence[int]) -> None:
        """Prepares collectives among a subset of the ranks.

        Called by all ranks, members or not, in the same order and while no collective is in flight; may block for them.
        """

    @abc.abstractmethod
    def remove_process_set(self, ranks: Sequence[int]) -> None:
        """Removes a subset of the ranks; called as `add_process_set` is. Graphs that use it are not run again."""

    @abc.abstractmethod
    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        """Reduces tensors of one dtype elementwise over `ranks`, as one bucket.

        Args:
            tensors: One or more tensors of one dtype, the same shapes on every rank.
            key: The collective's name.
            reduction: How to combine the values.
            ranks: The participating ranks.
            before: Factor applied to each rank's values before the reduction; 1.0 unless `scales` has the dtype.
            after: Factor applied to the result; the same.

        Returns:
            The reduced tensors, with the shapes and dtype of `tensors`.
        """

    @abc.abstractmethod
    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        """Concatenates tensors along the first dimension, which may differ between ranks.

        Args:
            tensor: At least one-dimensional; the other dimensions and the dtype are equal on every rank.
            key: The collective's name.
            ranks: The participating ranks; their order is the order of the result.

        Returns:
            A tensor of shape `[sum of first dimensions, ...]`.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        """Broadcasts the root's tensor to every rank; shape and dtype are equal on every rank.

        Args:
            tensor: The value to send on the root; on other ranks, a tensor of the same shape and dtype.
            root_rank: The global rank that sends, not its place in `ranks`; one of `ranks`.
            key: The collective's name.
            ranks: The participating ranks.

        Returns:
            The root's value.
        """

    @abc.abstractmethod
    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Sends different rows to each rank.

        Args:
            tensor: At least one-dimensional; all dimensions except the first, and the dtype, are equal on every rank.
            splits: int64 of shape `[len(ranks)]`: the number of consecutive rows for each of `ranks`. The numbers are
                not negative, and add up to the first dimension.
            key: The collective's name.
            ranks: The participating ranks.

        Returns:
            The received rows in the order of `ranks`, and an int64 tensor with the number of rows from each rank.
        """

    @abc.abstractmethod
    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        """Sums tensors and gives each rank a part of the rows; if uneven, the first ranks get one more row.

        Args:
            tensor: At least one-dimensional, the same shape and dtype on every rank.
            key: The collective's name.
            ranks: The participating ranks; their order is that of the parts.
            before: Factor applied to each rank's values before the reduction.
            after: Factor applied to the result.

        Returns:
            This rank's rows of the sum.
        """
