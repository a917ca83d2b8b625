"""Example of an hvkeras backend: ranks send their tensors to each other with mpi4py and reduce them with NumPy."""

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

Compute = Callable[[list[Arrays]], Arrays]  # from the arrays of all ranks to the results


class Mpi4pyBackend(Backend):
    """Backend whose collectives all gather the arrays of the ranks (`exchange.Exchange`), then compute locally."""

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
        return None  # never chosen automatically: this is an example

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
        # A duplicate of MPI_COMM_WORLD; raises if the ranks do not arrive before the timeout.
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

        # RuntimeError in eager mode; inside a graph, TensorFlow converts it to UnknownError.
        return self._exchange is not None and self._exchange.is_aborted and isinstance(
            error, (RuntimeError, tf.errors.UnknownError))

    def add_process_set(self, ranks: Sequence[int]) -> None:
        """Do nothing: each collective is passed its ranks."""

    def remove_process_set(self, ranks: Sequence[int]) -> None:
        """Do nothing."""

    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        def compute(gathered: list[Arrays]) -> Arrays:
            results = [np.array(array) for array in gathered[0]]
            for arrays in gathered[1:]:
                for result, array in zip(results, arrays, strict=True):
                    _COMBINE[reduction](result, array, out=result)
            return results

        results = self._collective(key, ranks, tensors, compute)
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return results

    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        result = self._collective(key, ranks, [tensor],
                                  lambda gathered: [np.concatenate([arrays[0] for arrays in gathered])])[0]
        return _set_shape_except_rows(result, tensor)

    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        root = list(ranks).index(root_rank)
        result = self._collective(key, ranks, [tensor], lambda gathered: gathered[root])[0]
        result.set_shape(tensor.shape)
        return result

    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = list(ranks).index(self._rank)

        def compute(gathered: list[Arrays]) -> Arrays:
            parts = [np.split(rows, np.cumsum(counts)[:-1])[index] for rows, counts in gathered]
            return [np.concatenate(parts), np.array([len(part) for part in parts])]

        received, counts = self._collective(key, ranks, [tensor, splits], compute)
        counts.set_shape([len(ranks)])
        return _set_shape_except_rows(received, tensor), counts

    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        index = list(ranks).index(self._rank)
        scattered = self._collective(key, ranks, [tensor], lambda gathered: [np.array_split(
            np.sum([arrays[0] for arrays in gathered], axis=0, dtype=gathered[0][0].dtype), len(ranks))[index]])[0]
        return _set_shape_except_rows(scattered, tensor)

    def _collective(self, key: str, ranks: Sequence[int], tensors: Sequence[Tensor], compute: Compute) -> list[Tensor]:
        """Run a collective now (eager mode), or add it to the graph that is being traced.

        `compute` must return as many arrays as there are `tensors`, of the same dtypes.
        """
        import tensorflow as tf

        for tensor in tensors:
            if tensor.dtype.name not in _NUMBERS:
                raise UnsupportedError(explain(f"the backend mpi4py supports {', '.join(_NUMBERS)}",
                                               "cast the tensor first", dtype=tensor.dtype.name))
        if tf.executing_eagerly():
            arrays = self._run_eagerly(key, ranks, [tensor.numpy() for tensor in tensors], compute)
            return [tf.constant(array, tensor.dtype) for array, tensor in zip(arrays, tensors, strict=True)]
        return self._add_to_graph(key, ranks, tensors, compute)

    def _run_eagerly(self, key: str, ranks: Sequence[int], arrays: Arrays, compute: Compute) -> Arrays:
        assert self._exchange is not None
        finished = threading.Event()
        outcome: list[tuple[list[Arrays], str]] = []

        def done(gathered: list[Arrays], failure: str) -> None:
            outcome.append((gathered, failure))
            finished.set()

        self._exchange.submit(key, ranks, arrays, done)
        finished.wait()  # abort() also calls `done`
        gathered, failure = outcome[0]
        if failure:
            raise RuntimeError(failure)
        return compute(gathered)

    def _add_to_graph(
        self, key: str, ranks: Sequence[int], tensors: Sequence[Tensor], compute: Compute
    ) -> list[Tensor]:
        """Add a collective that does not block a TensorFlow thread while it waits for other ranks.

        It consists of two operations and a queue. The first submits the arrays and returns; the second dequeues the
        results, which TensorFlow awaits without occupying a thread.
        """
        import tensorflow as tf

        dtypes = [tensor.dtype for tensor in tensors]
        with tf.init_scope():  # outside of the traced function, which captures the queue
            results = tf.queue.FIFOQueue(1024, [tf.string, *dtypes])
        lock, latest = threading.Lock(), 0  # the number of the latest run

        def submit(*arrays: Any) -> None:
            nonlocal latest
            # An earlier run may have failed elsewhere, before it dequeued its results: this run must not get them.
            with lock:
                latest += 1
                run = latest
                for _ in range(int(results.size())):
                    results.dequeue()

            def done(gathered: list[Arrays], failure: str) -> None:
                computed = arrays
                try:
                    computed = computed if failure else tuple(compute(gathered))
                except Exception as error:  # noqa: BLE001 - raised by the second operation, not in this thread
                    failure = f"{type(error).__name__}: {error}"
                with lock, tf.device("CPU:0"):
                    if run == latest:
                        results.enqueue([failure, *(tf.constant(array, dtype) for array, dtype
                                                    in zip(computed, dtypes, strict=True))])

            assert self._exchange is not None
            self._exchange.submit(key, ranks, [np.array(array) for array in arrays], done)

        def raise_or_return(failure: bytes, *arrays: Any) -> Any:
            if failure:
                raise RuntimeError(failure.decode())
            return arrays

        with tf.device("CPU:0"):
            submitted = tf.numpy_function(submit, list(tensors), [])
            with tf.control_dependencies([submitted]):
                failure_and_results = results.dequeue()
            # Not stateful: TensorFlow runs stateful functions one after the other. The next collective's `submit`
            # would then wait for the results of this one.
            return list(tf.numpy_function(raise_or_return, failure_and_results, dtypes, stateful=False))


def _set_shape_except_rows(result: Tensor, tensor: Tensor) -> Tensor:
    import tensorflow as tf

    result.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
    return result
