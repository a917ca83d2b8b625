"""The one interface that every collective engine implements, and the only road to it."""

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
    """How allreduce combines the ranks' values; averages are sums divided above the interface."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True)
class Availability:
    """Whether a backend can serve here, and why, in words that the command line prints."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Start:
    """All that a backend is told when it starts.

    Attributes:
        topology: Ranks and hosts, agreed by all ranks.
        control: The connected control channel, for exchanging addresses (never tensor data); None
            for a single process.
        launch: How this process was launched.
        settings: The settings in force.
        keeps_gpus: Whether a rank that has its host to itself keeps all GPUs rather than one, for a strategy.
    """

    topology: Topology
    control: ControlClient | None
    launch: Launch
    settings: Settings
    keeps_gpus: bool = False


class Backend(abc.ABC):
    """One collective engine.

    Every collective takes a `key`: a name that is the same on all ranks for the same collective
    and different for any other (it is a hash of what is communicated, see `hvkeras.plans.plan`).
    `ranks` are the global ranks that take part, ascending; only they call. Tensors may be eager
    or symbolic. Collectives without a data dependency may run in any order and at the same time.

    Attributes:
        name: The name that users give to `init(backend=...)`.
        scales: The dtypes' names of which reductions multiply by `before` and `after` themselves; of all others
            these are 1.0, and it is done above the interface.
        rounds_once: The names of the half precisions that reductions compute in float32, with `before` and `after`, and
            round once; others are made float32 above the interface, so that sums have its range.
        compares_shapes: Whether tensors whose shapes differ between ranks are an error of the collective on all ranks,
            with both shapes and ranks, where the shapes are known only when a graph runs.
        outlives_errors_in_graphs: Whether collectives still work after a graph has ended in an error.
    """

    name: ClassVar[str]
    scales: ClassVar[frozenset[str]] = frozenset()
    rounds_once: ClassVar[frozenset[str]] = frozenset()
    compares_shapes: ClassVar[bool] = False
    outlives_errors_in_graphs: ClassVar[bool] = True

    @classmethod
    @abc.abstractmethod
    def availability(cls) -> Availability:
        """Says, without any side effect, whether the engine is installed here."""

    @classmethod
    @abc.abstractmethod
    def objection(cls, launch: Launch) -> str:
        """Says why this engine cannot serve that launch, and what would; "" when it can."""

    @classmethod
    def objection_to_hosts(cls, launch: Launch) -> str:  # noqa: ARG003 - for those that override it
        """Says why this engine cannot serve that launch on more than one host, and what would; "" when it can."""
        return ""

    @abc.abstractmethod
    def start(self, start: Start) -> int:
        """Brings the engine up on all ranks.

        Returns:
            The number of ranks that the engine itself counts; `init()` compares it.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Takes the engine down; it may be started again later in the same process."""

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Ends every collective in flight with an error; called from another thread, at most once."""

    @abc.abstractmethod
    def is_peer_failure(self, error: BaseException) -> bool:
        """Says whether an exception is this engine's way of reporting trouble at another rank."""

    @property
    @abc.abstractmethod
    def engine(self) -> str:
        """What moves the bytes, in a few words, for the line that `init()` prints."""

    @property
    def supports_xla(self) -> bool:
        """Whether the collectives compile inside `jit_compile=True`."""
        return not self.objection_to_xla

    @property
    def objection_to_xla(self) -> str:
        """Says why XLA cannot compile the collectives here; "" when it can."""
        return "the engine has none for XLA"

    @property
    def objection_to_sessions(self) -> str:
        """Says why sessions of TensorFlow 1 cannot run the collectives; "" when they can."""
        return ""

    def enter(self, key: str) -> None:
        """Has a graph for XLA count, when it runs, that this rank enters a plan with the collectives that follow.

        XLA keeps what a graph does to variables until all of it has run, so the engine counts.

        Args:
            key: The plan's, see `hvkeras.plans.plan`.
        """
        raise NotImplementedError

    def entered(self, key: str) -> int:  # noqa: ARG002 - for those that override it
        """How often graphs compiled by XLA entered a plan; called from any thread."""
        return 0

    def keep_times(self, key: str, capacity: int) -> bool:  # noqa: ARG002 - for those that override it
        """Has the engine keep when each run of a collective begins and ends on this rank, if it can.

        Args:
            key: The collective's key.
            capacity: How many runs are kept, the latest ones.

        Returns:
            Whether it does; else the graph asks for the time before and after.
        """
        return False

    def times(self, key: str, capacity: int) -> tuple[Any, int]:
        """When the latest runs of a collective began and ended, whose times are kept.

        Args:
            key: The collective's key.
            capacity: As it was for `keep_times`.

        Returns:
            float64, [runs, 2], seconds since the epoch, the oldest run first; and the number of that one among all runs
            since the times are kept.
        """
        raise NotImplementedError(key, capacity)

    @abc.abstractmethod
    def add_process_set(self, ranks: Sequence[int]) -> None:
        """Prepares collectives among a subset of the ranks; called by all ranks."""

    @abc.abstractmethod
    def remove_process_set(self, ranks: Sequence[int]) -> None:
        """Forgets a subset; called by all ranks."""

    @abc.abstractmethod
    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        """Reduces tensors of one dtype elementwise over `ranks`, as one bucket.

        Args:
            tensors: One or more tensors of one dtype, the same shapes on every rank.
            key: The collective's name.
            reduction: How to combine.
            ranks: Who takes part.
            before: Multiplies each rank's values first.
            after: Multiplies the result.

        Returns:
            The reduced tensors, with the shapes and dtype of the given ones.
        """

    @abc.abstractmethod
    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        """Concatenates tensors along the first dimension, which may differ between ranks.

        Args:
            tensor: At least one-dimensional; other dimensions and dtype equal on every rank.
            key: The collective's name.
            ranks: Who takes part; their order is the order of the result.

        Returns:
            A tensor of shape `[sum of first dimensions, ...]`.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        """Gives every rank the root's tensor, of equal shape and dtype everywhere.

        Args:
            tensor: The value to send on the root; elsewhere a tensor of its shape and dtype.
            root_rank: The global rank that sends; one of `ranks`.
            key: The collective's name.
            ranks: Who takes part.

        Returns:
            The root's value.
        """

    @abc.abstractmethod
    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Sends to each rank rows of its own.

        Args:
            tensor: At least one-dimensional; dimensions but the first, and the dtype, equal on every rank.
            splits: int64 of shape `[len(ranks)]`: so many rows, one after the other, go to each of `ranks`. None is
                negative, and they add up to the first dimension.
            key: The collective's name.
            ranks: Who takes part.

        Returns:
            The rows received, in the order of `ranks`, and an int64 tensor of how many came from each.
        """

    @abc.abstractmethod
    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        """Sums tensors and gives each rank a part of the rows; the first ranks get one more where it does not divide.

        Args:
            tensor: At least one-dimensional, the same shape and dtype on every rank.
            key: The collective's name.
            ranks: Who takes part; their order is that of the parts.
            before: Multiplies each rank's values first.
            after: Multiplies the result.

        Returns:
            This rank's rows of the sum.
        """
