"""The interface that every collective engine implements; engines are used only through it."""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from hvkeras.control.client import ControlClient
    from hvkeras.host.topology import Topology
    from hvkeras.launch_environments import Launch
    from hvkeras.settings import Settings

Tensor = Any  # tf.Tensor; TensorFlow ships no types


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


@dataclass(frozen=True)
class Start:
    """The start parameters of a backend.

    Attributes:
        topology: The ranks and hosts, agreed upon by all ranks.
        control: The connected control channel, for exchanging addresses (never tensor data); None
            for a single process.
        launch: How this process was launched.
        settings: The settings in force.
        keeps_gpus: Whether a rank that is alone on its host keeps all GPUs instead of one, for a strategy.
    """

    topology: Topology
    control: ControlClient | None
    launch: Launch
    settings: Settings
    keeps_gpus: bool = False


class Backend(abc.ABC):
    """One collective engine.

    Every collective takes a `key`: a name that is the same on all ranks for the same collective and different for any
    other collective (it is a hash of what is communicated, see `hvkeras.plans.plan`). `ranks` holds the participating
    global ranks in ascending order; only these ranks make the call. Tensors may be eager or symbolic. Collectives
    without a data dependency may run concurrently and in any order.

    Attributes:
        name: The name that users pass to `init(backend=...)`.
        scales: The names of the dtypes for which reductions apply `before` and `after` themselves. For all other
            dtypes these are 1.0, and scaling is done above the interface.
        rounds_once: The names of the half-precision dtypes that reductions compute in float32, including `before` and
            `after`, and round once. Others are cast to float32 above the interface, so that sums have its range.
        compares_shapes: Whether shapes that are known only when a graph runs, and differ between ranks, make the
            collective fail on all ranks with an error that names both shapes and ranks.
        outlives_errors_in_graphs: Whether collectives still work after a graph has failed.
    """

    name: ClassVar[str]
    scales: ClassVar[frozenset[str]] = frozenset()
    rounds_once: ClassVar[frozenset[str]] = frozenset()
    compares_shapes: ClassVar[bool] = False
    outlives_errors_in_graphs: ClassVar[bool] = True

    @classmethod
    @abc.abstractmethod
    def availability(cls) -> Availability:
        """Reports, without side effects, whether the engine is installed."""

    @classmethod
    @abc.abstractmethod
    def objection(cls, launch: Launch) -> str:
        """Explains why this engine cannot serve a launch, and what to use instead; "" if it can."""

    @classmethod
    def objection_to_hosts(cls, launch: Launch) -> str:  # noqa: ARG003 - for overriding methods
        """Explains why this engine cannot serve a launch on several hosts, and what to use instead; "" if it can."""
        return ""

    @abc.abstractmethod
    def start(self, start: Start) -> int:
        """Starts the engine on all ranks.

        Returns:
            The number of ranks as seen by the engine; `init()` checks it.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Stops the engine; it may be started again later in the same process."""

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Makes every collective in flight fail with an error; called from another thread, at most once."""

    @abc.abstractmethod
    def is_peer_failure(self, error: BaseException) -> bool:
        """Whether an exception is this engine's way of reporting the failure of another rank."""

    @property
    @abc.abstractmethod
    def engine(self) -> str:
        """A short description of the transport, for the line that `init()` prints."""

    @property
    def supports_xla(self) -> bool:
        """Whether the collectives can be compiled with `jit_compile=True`."""
        return not self.objection_to_xla

    @property
    def objection_to_xla(self) -> str:
        """Explains why XLA cannot compile the collectives; "" if it can."""
        return "the engine has none for XLA"

    @property
    def objection_to_sessions(self) -> str:
        """Explains why TensorFlow 1 sessions cannot run the collectives; "" if they can."""
        return ""

    def enter(self, key: str) -> None:
        """Makes an XLA graph count at run time that this rank enters a plan before the collectives that follow.

        The engine counts, because XLA publishes updates of variables only after the whole graph has run.

        Args:
            key: The key of the plan, see `hvkeras.plans.plan`.
        """
        raise NotImplementedError

    def entered(self, key: str) -> int:  # noqa: ARG002 - for overriding methods
        """Returns how often graphs compiled by XLA have entered a plan; called from any thread."""
        return 0

    def keep_times(self, key: str, capacity: int) -> bool:  # noqa: ARG002 - for overriding methods
        """Makes the engine record when each run of a collective begins and ends on this rank, if it supports this.

        Args:
            key: The collective's key.
            capacity: The number of latest runs to keep.

        Returns:
            Whether the engine records the times. If not, the graph takes timestamps before and after the collective.
        """
        return False

    def times(self, key: str, capacity: int) -> tuple[Any, int]:
        """Returns when the latest runs of a collective began and ended, as recorded since `keep_times`.

        Args:
            key: The collective's key.
            capacity: The same value as for `keep_times`.

        Returns:
            A float64 array of shape [runs, 2] in seconds since the epoch, the oldest run first; and the number of the
            oldest run among all runs since recording began.
        """
        raise NotImplementedError(key, capacity)

    @abc.abstractmethod
    def add_process_set(self, ranks: Sequence[int]) -> None:
        """Prepares collectives among a subset of the ranks; called by all ranks."""

    @abc.abstractmethod
    def remove_process_set(self, ranks: Sequence[int]) -> None:
        """Removes a subset of the ranks; called by all ranks."""

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
            before: Factor applied to each rank's values before the reduction.
            after: Factor applied to the result.

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
            root_rank: The global rank that sends; one of `ranks`.
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
