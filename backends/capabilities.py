"""What an engine can do beyond the collectives: classes that it inherits together with `Backend`."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvkeras.backends.interface import Backend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hvkeras.typing import Strategy


class CompiledByXla(Backend):
    """An engine whose collectives can be compiled with `jit_compile=True`."""

    @property
    @abc.abstractmethod
    def objection_to_xla(self) -> str:
        """Explains why XLA cannot compile the collectives on this machine; "" if it can. Valid after `start()`."""

    @abc.abstractmethod
    def enter(self, key: str) -> None:
        """Makes an XLA graph count at run time that this rank enters a plan before the collectives that follow.

        The engine counts, because XLA publishes updates of variables only after the whole graph has run. Called while
        XLA compiles.

        Args:
            key: The key of the plan, see `hvkeras.job.plans`.
        """

    @abc.abstractmethod
    def entered(self, key: str) -> int:
        """Returns how often graphs compiled by XLA have entered a plan; called from any thread, and must not block."""


class RecordsTimes(Backend):
    """An engine that records when its collectives run; for others, graphs take timestamps around each collective."""

    @abc.abstractmethod
    def keep_times(self, key: str, capacity: int) -> bool:
        """Makes the engine record when each run of a collective begins and ends on this rank.

        Args:
            key: The collective's key.
            capacity: The number of latest runs to keep.

        Returns:
            Whether the engine records this collective. If not, the graph takes timestamps.
        """

    @abc.abstractmethod
    def times(self, key: str, capacity: int) -> tuple[NDArray[Any], int]:
        """Returns when the latest runs of a collective began and ended; called from any thread, and must not block.

        Args:
            key: The collective's key.
            capacity: The same value as for `keep_times`.

        Returns:
            A float64 array of shape [runs, 2] in seconds since the epoch, the oldest run first; and the number of the
            oldest run among all runs since recording began.
        """


class ReducesParts(Backend):
    """An engine that reduces parts of tensors, each for one rank, and gathers parts, without packing them."""

    @abc.abstractmethod
    def reduce_parts(
        self, tensors: Sequence[Any], key: str, ranks: Sequence[int], bounds: Sequence[Sequence[int]],
        before: float = 1.0, after: float = 1.0,
    ) -> list[Any]:
        """Sums tensors of one dtype, of each of which every rank gets a part.

        Args:
            tensors: One or more tensors of one dtype, the same shapes on every rank.
            key: The collective's name.
            ranks: The participating ranks.
            bounds: For each tensor, as a flat array: the rank at place r of `ranks` gets elements [bounds[r],
                bounds[r + 1]). The same on every rank.
            before: Factor applied to each rank's values before the reduction; 1.0 unless `scales` has the dtype.
            after: Factor applied to the result; the same.

        Returns:
            Tensors of the same shapes, which hold the results where this rank's parts are, and anything elsewhere. They
            may take the memory of `tensors`.
        """

    @abc.abstractmethod
    def gather_parts(
        self, tensors: Sequence[Any], key: str, ranks: Sequence[int], bounds: Sequence[Sequence[int]], results: int,
    ) -> list[Any]:
        """Gathers tensors of one dtype, of each of which every rank has a part.

        Args:
            tensors: For each tensor that is not all this rank's, one of its shape, whose memory the result may take;
                then this rank's parts, of any shape, of those tensors that it has a part of.
            key: The collective's name.
            ranks: The participating ranks.
            bounds: The bounds of the tensors' parts, as for `reduce_parts`.
            results: How many of `tensors` are for results.

        Returns:
            The whole tensors, for those that are not all this rank's.
        """


class HostsStrategies(Backend):
    """An engine on whose cluster a strategy of `tf.distribute` can span all ranks."""

    @abc.abstractmethod
    def strategy(self, **options: Any) -> Strategy:
        """Builds a `MultiWorkerMirroredStrategy` of all ranks on the running cluster.

        Args:
            **options: As for its constructor, except for `cluster_resolver`.
        """


def objection_to_xla(backend: Backend) -> str:
    """Explains why XLA cannot compile a backend's collectives; "" if it can."""
    return backend.objection_to_xla if isinstance(backend, CompiledByXla) else "the engine has none for XLA"
