"""Optional capabilities of an engine: classes that it may inherit from, in addition to `Backend`."""

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
        """Reason why XLA cannot compile the collectives on this machine; "" if it can. Valid after `start()`."""

    @abc.abstractmethod
    def enter(self, key: str) -> None:
        """Add a counter to an XLA graph, which counts runs of a plan before the collectives that follow.

        The engine counts, because variables that an XLA graph updates change only when the entire graph has run. Called
        while XLA compiles.

        Args:
            key: The key of the plan, see `hvkeras.job.plans`.
        """

    @abc.abstractmethod
    def entered(self, key: str) -> int:
        """Return how often graphs compiled by XLA have entered a plan. Called from any thread; must not block."""


class SharesMemory(Backend):
    """An engine whose ranks on a host share memory in /dev/shm. `auto` chooses it only if every host has enough."""

    @classmethod
    @abc.abstractmethod
    def shared_memory(cls, ranks: int, hosts: int) -> int:
        """Return the bytes that the ranks of a host need in /dev/shm. No side effects.

        Args:
            ranks: Number of ranks on that host.
            hosts: Number of hosts of the job.
        """


class RecordsTimes(Backend):
    """An engine that records when its collectives run. For others, graphs take timestamps around each collective."""

    @abc.abstractmethod
    def keep_times(self, key: str, capacity: int) -> bool:
        """Start recording when each run of a collective begins and ends on this rank.

        Args:
            key: The collective's key.
            capacity: The number of most recent runs to keep.

        Returns:
            Whether the engine records this collective. If not, the graph takes timestamps.
        """

    @abc.abstractmethod
    def times(self, key: str, capacity: int) -> tuple[NDArray[Any], int]:
        """Return when the most recent runs of a collective began and ended. Called from any thread; must not block.

        Args:
            key: The collective's key.
            capacity: The same value as for `keep_times`.

        Returns:
            A float64 array of shape `[runs, 2]` with the begin and end of each run, in seconds since the epoch, oldest
            first; and the index of the oldest of these runs among all runs since recording began.
        """


class ReducesParts(Backend):
    """An engine that reduces parts of tensors, one for each rank, and gathers such parts, without packing them.

    These are the collectives of sharded optimizer updates (ZeRO stage 1).
    """

    @abc.abstractmethod
    def reduce_parts(
        self, tensors: Sequence[Any], key: str, ranks: Sequence[int], bounds: Sequence[Sequence[int]],
        before: float = 1.0, after: float = 1.0,
    ) -> list[Any]:
        """Sum tensors and scatter a part of each over `ranks`.

        Args:
            tensors: One or more tensors of one dtype, the same shapes on every rank.
            key: The collective's name.
            ranks: The participating ranks.
            bounds: For each tensor, `len(ranks) + 1` bounds within its flattened elements: `ranks[i]` gets elements
                `[bounds[i], bounds[i + 1])`. The same on every rank.
            before: Factor applied to each rank's values before the reduction; 1.0 unless `scales` contains the dtype.
            after: Factor applied to the result; 1.0 unless `scales` contains the dtype.

        Returns:
            Tensors of the same shapes. Only this rank's parts hold the sums; the other elements are undefined. The
            results may reuse the memory of `tensors`.
        """

    @abc.abstractmethod
    def gather_parts(
        self, tensors: Sequence[Any], key: str, ranks: Sequence[int], bounds: Sequence[Sequence[int]], results: int,
    ) -> list[Any]:
        """Gather tensors from the parts that the ranks have.

        Args:
            tensors: Tensors of one dtype. The first `results` are buffers: one for each tensor that this rank does not
                have entirely, with that tensor's shape; the result may reuse its memory. They are followed by this
                rank's parts, of any shape, of those tensors of which it has one.
            key: The collective's name.
            ranks: The participating ranks.
            bounds: The bounds of the tensors' parts, as for `reduce_parts`.
            results: The number of buffers in `tensors`.

        Returns:
            The complete tensors, except those that this rank already has entirely.
        """


class StartsEarly(Backend):
    """An engine that starts long reductions of a graph in an operation of their own, and then needs no thread of it.

    The backward pass can thus continue behind that operation, and communication overlaps with it.
    """

    @abc.abstractmethod
    def bucket_size(self, ranks: Sequence[int]) -> int | None:
        """Return the best size of a bucket of gradients in bytes, the same on every rank; None for the general one.

        Args:
            ranks: The participating ranks.
        """

    @abc.abstractmethod
    def start_of(self, results: Sequence[Any]) -> Any:
        """Return the operation that starts a reduction; None if no separate operation does.

        Args:
            results: What `allreduce` or `reduce_parts` has returned in the graph under construction.
        """


class CompressesBetweenHosts(Backend):
    """An engine that sends sums of float32 in 8 bits between hosts, and adds what it has rounded to the next sums."""

    @abc.abstractmethod
    def compressed_allreduce(
        self, tensors: Sequence[Any], key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> list[Any]:
        """Sum a bucket of tensors over `ranks`, exactly within a host.

        Args:
            tensors: One or more tensors of float32, with the same shapes on every rank.
            key: The collective's name, which also identifies its rounding errors.
            ranks: The participating ranks.
            before: Factor applied to each rank's values before the sum.
            after: Factor applied to the result.

        Returns:
            The sums, equal on all ranks.
        """

    @abc.abstractmethod
    def rounding_errors(self, key: str, ranks: Sequence[int], count: int) -> NDArray[Any] | None:
        """Return what this rank will add to the next sums. Called while the collective does not run.

        Args:
            key: The collective's key.
            ranks: The participating ranks.
            count: The number of elements of all its tensors.

        Returns:
            float32 of shape `[count]`; None if another rank keeps the errors of this host, or if there are none.
        """

    @abc.abstractmethod
    def set_rounding_errors(self, key: str, ranks: Sequence[int], errors: NDArray[Any]) -> bool:
        """Replace what this rank will add to the next sums. Called while the collective does not run.

        Args:
            key: The collective's key.
            ranks: The participating ranks.
            errors: float32 of shape `[count]`; of shape `[0]` to free the memory of all errors, on every rank, from any
                thread, and also while the collective runs or after its group was closed.

        Returns:
            Whether this rank keeps the errors of its host.
        """


class HostsStrategies(Backend):
    """An engine on whose cluster a strategy of `tf.distribute` can span all ranks."""

    @abc.abstractmethod
    def strategy(self, **options: Any) -> Strategy:
        """Build a `MultiWorkerMirroredStrategy` of all ranks on the running cluster.

        Args:
            **options: As for its constructor, except for `cluster_resolver`.
        """


def objection_to_xla(backend: Backend) -> str:
    """Return why XLA cannot compile a backend's collectives; "" if it can."""
    return backend.objection_to_xla if isinstance(backend, CompiledByXla) else "the engine does not support XLA"
