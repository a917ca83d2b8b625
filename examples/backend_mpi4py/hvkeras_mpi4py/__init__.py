"""A backend of hvkeras on mpi4py: every rank sends its tensors to all others, which compute the result with NumPy."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvkeras.backends.interface import Availability, Backend, Reduction, Start, Tensor
from hvkeras.errors import UnsupportedError, explain
from hvkeras.host.mpi import mpi_world
from hvkeras_mpi4py.exchange import Arrays, Exchange

if TYPE_CHECKING:
    from hvkeras.control.launch_environments import Launch

_COMBINE = {Reduction.SUM: np.add, Reduction.PRODUCT: np.multiply, Reduction.MIN: np.minimum,
            Reduction.MAX: np.maximum}
_NUMBERS = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
            "uint64", "bool")

Compute = Callable[[list[Arrays]], Arrays]  # the results, from the arrays of each rank


class Mpi4pyBackend(Backend):
    """All collectives by one exchange of arrays (`exchange.Exchange`), each with its own computation on the result."""

    name = "mpi4py"

    def __init__(self) -> None:
        self._exchange: Exchange | None = None
        self._rank = 0

    @classmethod
    def availability(cls) -> Availability:
        if importlib.util.find_spec("mpi4py") is None:
            return Availability(False, "mpi4py is not installed: pip install 'hvkeras[mpi]'")
        return Availability(True, "mpi4py is installed")

    @classmethod
    def objection(cls, launch: Launch, several_hosts: bool) -> str:
        return "" if launch.mpi else f"mpirun must start the ranks, not {launch.launcher}; use native or tfdist"

    @classmethod
    def preference(cls, launch: Launch, has_gpu: bool) -> int | None:
        return None  # it is an example: only for those who ask for it

    @classmethod
    def built_with(cls) -> frozenset[str]:
        return frozenset({"MPI"})

    @property
    def engine(self) -> str:
        return "mpi4py"

    @property
    def transport(self) -> str:
        return "MPI"

    def start(self, start: Start) -> int:
        # A clone of the world, within a deadline.
        communicator = mpi_world(start.launch.launcher, start.launch.size, start.settings.start_timeout)
        self._exchange, self._rank = Exchange(communicator), communicator.Get_rank()
        return int(communicator.Get_size())

    def stop(self) -> None:
        if self._exchange is not None:
            self._exchange.stop()

    def abort(self, reason: str) -> None:
        if self._exchange is not None:
            self._exchange.abort(f"the mpi4py engine was stopped: {reason}")

    def is_peer_failure(self, error: BaseException) -> bool:
        import tensorflow as tf

        # The engine's own errors: as they are in eager mode, and as TensorFlow hands them on from a graph.
        return self._exchange is not None and self._exchange.is_aborted and isinstance(
            error, (RuntimeError, tf.errors.UnknownError))

    def add_process_set(self, ranks: Sequence[int]) -> None:
        """Does nothing: messages go to the ranks that each collective names."""

    def remove_process_set(self, ranks: Sequence[int]) -> None:
        """Does nothing."""

    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        def compute(everyone: list[Arrays]) -> Arrays:
            results = [np.array(array) for array in everyone[0]]
            for others in everyone[1:]:
                for result, array in zip(results, others, strict=True):
                    _COMBINE[reduction](result, array, out=result)
            return results

        results = self._collective(key, ranks, tensors, compute)
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return results

    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        gathered = self._collective(key, ranks, [tensor],
                                    lambda everyone: [np.concatenate([arrays[0] for arrays in everyone])])[0]
        return _with_rows(gathered, tensor)

    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        place = list(ranks).index(root_rank)
        sent = self._collective(key, ranks, [tensor], lambda everyone: everyone[place])[0]
        sent.set_shape(tensor.shape)
        return sent

    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        mine = list(ranks).index(self._rank)

        def compute(everyone: list[Arrays]) -> Arrays:
            parts = [np.split(rows, np.cumsum(counts)[:-1])[mine] for rows, counts in everyone]
            return [np.concatenate(parts), np.array([len(part) for part in parts])]

        received, counts = self._collective(key, ranks, [tensor, splits], compute)
        counts.set_shape([len(ranks)])
        return _with_rows(received, tensor), counts

    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        mine = list(ranks).index(self._rank)
        scattered = self._collective(key, ranks, [tensor], lambda everyone: [np.array_split(
            np.sum([arrays[0] for arrays in everyone], axis=0, dtype=everyone[0][0].dtype), len(ranks))[mine]])[0]
        return _with_rows(scattered, tensor)

    def _collective(self, key: str, ranks: Sequence[int], tensors: Sequence[Tensor], compute: Compute) -> list[Tensor]:
        """Runs a collective: eagerly, or whenever the graph under construction runs.

        Args:
            key: The collective's key.
            ranks: The ranks that take part.
            tensors: What this rank sends.
            compute: Makes the results of what all ranks have sent; as many as `tensors`, of the same dtypes.
        """
        import tensorflow as tf

        for tensor in tensors:
            if tensor.dtype.name not in _NUMBERS:
                raise UnsupportedError(explain(f"mpi4py moves numbers of {', '.join(_NUMBERS)}",
                                               "cast the tensor first", dtype=tensor.dtype.name))
        if tf.executing_eagerly():
            arrays = self._wait(key, ranks, [tensor.numpy() for tensor in tensors], compute)
            return [tf.constant(array, tensor.dtype) for array, tensor in zip(arrays, tensors, strict=True)]
        return self._in_graph(key, ranks, tensors, compute)

    def _wait(self, key: str, ranks: Sequence[int], arrays: Arrays, compute: Compute) -> Arrays:
        """An eager collective may block its thread."""
        assert self._exchange is not None
        arrived = threading.Event()
        found: list[tuple[list[Arrays], str]] = []

        def done(everyone: list[Arrays], failure: str) -> None:
            found.append((everyone, failure))
            arrived.set()

        self._exchange.ask(key, ranks, arrays, done)
        arrived.wait()  # abort() ends it
        everyone, failure = found[0]
        if failure:
            raise RuntimeError(failure)
        return compute(everyone)

    def _in_graph(self, key: str, ranks: Sequence[int], tensors: Sequence[Tensor], compute: Compute) -> list[Tensor]:
        """A graph's collective must not block a thread of TensorFlow's while it waits for others.

        Two operations with a queue between them: the first one hands the arrays to the exchange and returns, the second
        one takes the results from the queue, for which TensorFlow waits without a thread.
        """
        import tensorflow as tf

        dtypes = [tensor.dtype for tensor in tensors]
        with tf.init_scope():  # the queue outlives the function; a graph keeps what it captures
            results = tf.queue.FIFOQueue(1024, [tf.string, *dtypes])

        def begin(*arrays: Any) -> None:
            def done(everyone: list[Arrays], failure: str) -> None:
                computed = arrays
                try:
                    computed = computed if failure else tuple(compute(everyone))
                except Exception as error:  # noqa: BLE001 - it belongs to the rank that waits, not to this thread
                    failure = f"{type(error).__name__}: {error}"
                with tf.device("CPU:0"):
                    results.enqueue([failure, *(tf.constant(array, dtype) for array, dtype
                                                in zip(computed, dtypes, strict=True))])

            assert self._exchange is not None
            self._exchange.ask(key, ranks, [np.array(array) for array in arrays], done)

        def unless_failed(failure: bytes, *arrays: Any) -> Any:
            if failure:
                raise RuntimeError(failure.decode())
            return arrays

        with tf.device("CPU:0"):
            begun = tf.numpy_function(begin, list(tensors), [])
            with tf.control_dependencies([begun]):
                failure_and_results = results.dequeue()
            # Not stateful: TensorFlow runs stateful functions one after the other, and would not call `begin` of the
            # next collective before this one has its results.
            return list(tf.numpy_function(unless_failed, failure_and_results, dtypes, stateful=False))


def _with_rows(result: Tensor, tensor: Tensor) -> Tensor:
    """Sets what is known of a result's shape: all dimensions but the first."""
    import tensorflow as tf

    result.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
    return result
