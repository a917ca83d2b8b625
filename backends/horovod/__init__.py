"""Horovod's engine, with MPI, Gloo or NCCL, depending on how Horovod was built."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from hvkeras.backends.horovod import installed
from hvkeras.backends.horovod.gloo import DYNAMIC_SETS, Connections, GlooRendezvous, check_own_name, horovod_variables
from hvkeras.backends.interface import Availability, Backend, Reduction, Start, Tensor
from hvkeras.errors import UnsupportedError, explain
from hvkeras.horovod.as_horovod import horovod_itself
from hvkeras.host.forks import detach_in_children
from hvkeras.host.mpi import before_mpi_ends, mpi_world

if TYPE_CHECKING:
    from hvkeras.control.launch_environments import Launch

_REDUCIBLE = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
_MOVABLE = (*_REDUCIBLE, "uint16", "int16", "bool")
_SCATTERABLE = ("int32", "int64", "float16", "float32", "float64")
_WIDER = {"bool": "uint8", "int8": "int32", "uint8": "int32", "uint16": "int32", "int16": "int32", "uint32": "int64",
          "bfloat16": "float32"}

# Horovod, Gloo and MPI report all failures as TensorFlow's UnknownError or a RuntimeError. Only the text identifies
# the failure of another rank.
_PEER_FAILURES = ("Horovod has been shut down", "HorovodInternalError", "horovod_shutdown", "Connection closed by peer",
                  "gloo/transport", "Read timeout", "MPI_ERR", "MPI_Allreduce failed")
_MAX_FUNCTIONS = 128  # cached functions for eager collectives; each takes about 100 KB


class HorovodBackend(Backend):
    """The installed `horovod.tensorflow`, without its Keras layer, which does not work with Keras 3."""

    name = "horovod"
    outlives_errors_in_graphs = True
    starts_after_failure = True
    loses_collectives = True  # see `DYNAMIC_SETS`
    objection_to_sessions = ""
    reads_horovods_variables = True
    scales: ClassVar[frozenset[str]] = frozenset({"float32"})  # Horovod's factors have only float32 precision

    def __init__(self) -> None:
        self._horovod: Any = None
        self._ops: Any = None  # Horovod's `mpi_ops`
        self._process_sets: dict[tuple[int, ...], Any] = {}
        self._functions: dict[str, Any] = {}
        self._anchor: Any = None
        self._zero: Any = None
        self._gloo: GlooRendezvous | None = None
        self._uses_mpi = False
        self._stops_before_mpi = False  # whether it stops when the script finalizes MPI
        self._connections = Connections()
        self._variables: dict[str, str] = {}  # environment variables that Horovod reads each time it connects ranks
        self._size = 1
        detach_in_children(self)

    def in_child(self) -> None:
        """Keep a forked process from shutting down the rank's Horovod at exit: they share the connections."""
        if self._horovod is not None:
            atexit.unregister(self._horovod.shutdown)

    @classmethod
    def availability(cls) -> Availability:
        return installed.availability()

    @classmethod
    def objection(cls, launch: Launch, several_hosts: bool) -> str:
        if installed.serves_mpi(launch) or installed.has_gloo():
            return ""
        return (f"Horovod was built without Gloo, which it needs when launched by {launch.launcher}; run"
                " hvkeras build-horovod, or launch with the mpirun that it was built with")

    @classmethod
    def preference(cls, launch: Launch, has_gpu: bool) -> int:
        """Prefer Horovod on GPUs if it has NCCL, and on CPUs if horovodrun or mpirun started the job."""
        if has_gpu:
            return 0 if installed.has_nccl() else 15
        return 5 if launch.mpi or launch.rendezvous.kind == "horovod_store" else 15

    @classmethod
    def built_with(cls) -> frozenset[str]:
        if not installed.availability().ok:
            return frozenset()
        parts = {"MPI": installed.has_mpi(), "Gloo": installed.has_gloo(), "NCCL": installed.has_nccl()}
        return frozenset(name for name, present in parts.items() if present)

    def start(self, start: Start) -> int:
        uses_mpi = self._uses_mpi = installed.serves_mpi(start.launch)
        if not uses_mpi:
            check_own_name(start.topology.is_one_host)
        if uses_mpi:
            self._start_mpi(start)
        elif start.launch.rendezvous.kind != "horovod_store" or self._gloo is not None or self._horovod is not None:
            # The launcher started no store for Gloo, or an earlier session has used up its keys.
            self._gloo = GlooRendezvous(start, self._gloo)
        self._variables = dict(self._gloo.variables) if self._gloo is not None and not uses_mpi else {}
        if start.settings.run_membership and DYNAMIC_SETS not in os.environ:
            self._variables[DYNAMIC_SETS] = "0"
        with horovod_itself(), horovod_variables(self._variables):
            import horovod.tensorflow as horovod
            from horovod.tensorflow import mpi_ops

            with self._connections.opened():
                horovod.init(start.launch.rendezvous.communicator if uses_mpi else None)
        self._horovod, self._ops = horovod, mpi_ops
        self._size = int(horovod.size())
        return self._size

    def stop(self) -> None:
        self._process_sets.clear()
        self._functions.clear()
        if self._horovod is not None:
            self._horovod.shutdown()
        self._connections.forget()
        if self._gloo is not None:
            self._gloo.wait_for_others()

    def abort(self, reason: str) -> None:
        if self._horovod is not None:
            self._connections.shut_down()
            if not self._uses_mpi:
                # Horovod's thread terminates because of the errors. `stop` shuts Horovod down: a shutdown now would
                # still accept collectives of running graphs, and never complete them.
                return
            # In a thread, because Horovod's shutdown may wait for failed peers.
            threading.Thread(target=self._horovod.shutdown, name="hvkeras-horovod-abort", daemon=True).start()

    def is_peer_failure(self, error: BaseException) -> bool:
        text = f"{type(error).__name__} {error}"
        return any(sign in text for sign in _PEER_FAILURES)

    @property
    def engine(self) -> str:
        if self._horovod is None:
            return "Horovod"
        return f"Horovod {self._version()} with {self.transport}"

    @property
    def transport(self) -> str:
        if self._horovod is None:
            return "none"
        if installed.has_nccl() and self._gpus():
            return "NCCL"
        return "Gloo" if self._horovod.gloo_enabled() else "MPI"

    def add_process_set(self, ranks: Sequence[int]) -> None:
        if self._variables.get(DYNAMIC_SETS) == "0":
            raise UnsupportedError(explain(
                "Process sets in elastic jobs on horovod must be enabled, because collectives may then hang when a rank"
                " is killed, and the surviving ranks restart the script", f"set {DYNAMIC_SETS}=1, or use the backend"
                " native", ranks=list(ranks)))
        with horovod_variables(self._variables), self._connections.opened():
            self._process_sets[tuple(ranks)] = self._horovod.add_process_set(list(ranks))

    def remove_process_set(self, ranks: Sequence[int]) -> None:
        self._functions.clear()  # some contain the ID of the set
        self._horovod.remove_process_set(self._process_sets.pop(tuple(ranks)))

    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        import tensorflow as tf

        operations = {Reduction.SUM: self._ops.Sum, Reduction.MIN: self._ops.Min, Reduction.MAX: self._ops.Max,
                      Reduction.PRODUCT: self._ops.Product}
        wide = [self._widen(tensor, _REDUCIBLE) for tensor in tensors]
        common = {"op": operations[reduction], "process_set": self._process_set(ranks), "ignore_name_scope": True,
                  "prescale_factor": before, "postscale_factor": after}

        def reduce(*values: Tensor) -> list[Tensor]:
            if len(values) == 1:
                return [self._ops._allreduce(values[0], name=_legal(key), **common)]
            return list(self._ops._grouped_allreduce(list(values), name=_legal(key), **common))

        reduced = self._named(key, reduce, *wide)
        return [tf.cast(result, tensor.dtype) for result, tensor in zip(reduced, tensors, strict=True)]

    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        import tensorflow as tf

        def gather(value: Tensor) -> Tensor:
            rows: Tensor = self._ops.allgather(value, name=_legal(key), ignore_name_scope=True,
                                               process_set=self._process_set(ranks))
            return rows

        gathered = self._named(key, gather, self._widen(tensor, _MOVABLE))
        gathered.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        result: Tensor = tf.cast(gathered, tensor.dtype)
        return result

    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        import tensorflow as tf

        def send(value: Tensor) -> Tensor:
            # Horovod converts the global rank of the root to its index in the process set.
            of_root: Tensor = self._ops.broadcast(value, root_rank, name=_legal(key), ignore_name_scope=True,
                                                  process_set=self._process_set(ranks))
            return of_root

        sent = self._named(key, send, self._widen(tensor, _MOVABLE))
        result: Tensor = tf.cast(sent, tensor.dtype)
        return result

    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        import tensorflow as tf

        def exchange(value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            received: tuple[Tensor, Tensor] = self._ops.alltoall(
                value, rows, name=_legal(key), ignore_name_scope=True, process_set=self._process_set(ranks))
            return received

        received, rows = self._named(key, exchange, self._widen(tensor, _MOVABLE), tf.cast(splits, tf.int32))
        received.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        return tf.cast(received, tensor.dtype), tf.cast(rows, tf.int64)

    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        import tensorflow as tf

        def reduce(value: Tensor) -> Tensor:
            part: Tensor = self._ops._reducescatter(
                value, name=_legal(key), op=self._ops.Sum, ignore_name_scope=True,
                process_set=self._process_set(ranks), prescale_factor=before, postscale_factor=after)
            return part

        result: Tensor = tf.cast(self._named(key, reduce, self._widen(tensor, _SCATTERABLE)), tensor.dtype)
        return result

    def _named(self, key: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Run a collective in a graph, because Horovod identifies it by its node name, which all eager ops share.

        Otherwise Horovod would match eager collectives of different keys, which would then hang or mix their data.
        """
        import tensorflow as tf

        if not tf.executing_eagerly():
            return self._anchored(function(self._no_constant(tensors[0]), *tensors[1:]))  # one input is enough
        named = self._functions.pop(key, None)
        if named is None:
            # The partial avoids TensorFlow's warning about retracing, which counts functions with the same code as one.
            named = tf.function(functools.partial(function), autograph=False, reduce_retracing=True)
        self._functions[key] = named  # now the most recently used entry
        while len(self._functions) > _MAX_FUNCTIONS:
            self._functions.pop(next(iter(self._functions)), None)
        return named(*tensors)

    def _no_constant(self, tensor: Tensor) -> Tensor:
        """Prevent constant folding of a collective.

        Horovod's ops are registered without side effects, so TensorFlow would replace a collective of constants with
        its first result for all steps. Other ranks, whose tensors may not be constant, would hang in the second step.
        """
        import tensorflow as tf

        from hvkeras.compat.graphs import from_function_graphs, persistent_variable  # noqa: PLC0415 - imports TensorFlow

        if not from_function_graphs():  # a session would have to initialize a variable
            zero = tf.random.uniform([], maxval=1, dtype=tf.int32)
        else:
            if self._zero is None:
                self._zero = persistent_variable(0, tf.int32, "hvkeras_zero")
            zero = self._zero.read_value()
        # A slice that contains the entire tensor, without a copy; its start is known only at run time.
        flat = tf.slice(tf.reshape(tensor, [-1]), [zero], [-1])
        same: Tensor = tf.ensure_shape(tf.reshape(flat, tf.shape(tensor)), tensor.shape)
        return same

    def _anchored(self, results: Any) -> Any:
        """Add a side effect that depends on a collective's result: Horovod's ops are registered without side effects.

        Otherwise TensorFlow would prune a collective whose result a rank does not use, and the other ranks would hang.
        """
        import tensorflow as tf

        from hvkeras.compat.graphs import from_function_graphs, persistent_variable  # noqa: PLC0415 - imports TensorFlow

        if not from_function_graphs():  # a session runs only what is fetched
            return results
        if self._anchor is None:
            self._anchor = persistent_variable([0.0], tf.float32, "hvkeras_anchor", [None])
        first = results[0] if isinstance(results, (list, tuple)) else results
        self._anchor.assign(tf.cast(tf.reshape(first, [-1])[:1], tf.float32))
        return results

    def _process_set(self, ranks: Sequence[int]) -> Any:
        if len(ranks) == self._size:
            return self._horovod.global_process_set
        return self._process_sets[tuple(ranks)]

    def _start_mpi(self, start: Start) -> None:
        """Start MPI through mpi4py if installed; otherwise Horovod would finalize MPI at its first shutdown.

        If the script finalizes MPI, Horovod must stop before that: its thread would crash the process.
        """
        if importlib.util.find_spec("mpi4py") is None:
            return
        if start.launch.rendezvous.communicator is None:
            mpi_world(start.launch.launcher, start.launch.size, start.settings.start_timeout).Free()
        if not self._stops_before_mpi:
            self._stops_before_mpi = True
            before_mpi_ends(self.stop)

    def _widen(self, tensor: Tensor, supported: Sequence[str]) -> Tensor:
        import tensorflow as tf

        dtype = tensor.dtype.name
        if dtype in supported:
            return tensor
        if dtype not in _WIDER:
            raise UnsupportedError(explain("horovod supports the dtypes " + ", ".join([*_MOVABLE, *_WIDER]),
                                           "cast the tensor first", dtype=dtype))
        wide: Tensor = tf.cast(tensor, _WIDER[dtype])
        return wide

    def _gpus(self) -> bool:
        import tensorflow as tf

        return bool(tf.config.get_visible_devices("GPU"))

    def _version(self) -> str:
        return metadata.version("horovod")


def _legal(key: str) -> str:  # as a name of a TensorFlow operation
    return "hvkeras_" + "".join(letter if letter.isalnum() or letter in "_.-" else "_" for letter in key)
