"""The native engine: C++ collectives in shared memory within a host, and over UCX between hosts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hvkeras.backends import cpp_library
from hvkeras.backends.capabilities import (
    CompiledByXla,
    CompressesBetweenHosts,
    RecordsTimes,
    ReducesParts,
    SharesMemory,
    StartsEarly,
)
from hvkeras.backends.interface import Availability, Reduction, Start, Tensor
from hvkeras.backends.native.engine import Engine
from hvkeras.backends.native.groups import Groups, shared_memory_of
from hvkeras.backends.native.network import INSTALL, Network, objection_to_hosts, ucx_folder
from hvkeras.backends.native.ucx import Costs
from hvkeras.backends.native.xla import CompiledOperations
from hvkeras.errors import UnsupportedError, explain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hvkeras.compat.graphs import OrderHandles
    from hvkeras.control.launch_environments import Launch

# Reduction codes of the C++ core.
_REDUCTIONS = {Reduction.SUM: 0, Reduction.MIN: 1, Reduction.MAX: 2, Reduction.PRODUCT: 3}
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
           "uint64", "bool", "complex64", "complex128")

# Between hosts a bucket takes this long: much longer than to agree on it and to fill the pipeline of its segments.
_BUCKET_SECONDS = 8e-3
_MIN_BUCKET, _MAX_BUCKET = 512 * 1024, 16 * 1024**2


class NativeBackend(CompiledByXla, CompressesBetweenHosts, RecordsTimes, ReducesParts, SharesMemory, StartsEarly):
    """Engine whose ranks on one host reduce in shared memory, without sockets, copies into buckets or negotiation.

    Collectives are matched by key when they are ready to run: the last rank to arrive appends a collective to an order
    that all ranks follow (backends/native/core/matching.h). With several hosts, the first rank of each host exchanges
    its host's data with the others over UCX.
    """

    name = "native"
    compares_shapes = True
    outlives_errors_in_graphs = True
    starts_after_failure = True
    objection_to_sessions = ""
    scales: ClassVar[frozenset[str]] = frozenset({"float16", "bfloat16", "float32", "float64", "complex64",
                                                  "complex128"})
    rounds_once: ClassVar[frozenset[str]] = frozenset({"float16", "bfloat16"})

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._network: Network | None = None  # between hosts
        self._start: Start | None = None
        self._groups: Groups | None = None
        self._compiled: CompiledOperations | None = None

    @classmethod
    def availability(cls) -> Availability:
        if objection := cpp_library.objection():
            return Availability(False, objection)
        between = "between hosts as well" if ucx_folder() else f"within one host; between hosts: {INSTALL}"
        return Availability(True, f"its C++ library is installed, and works {between}")

    @classmethod
    def objection(cls, launch: Launch, several_hosts: bool) -> str:
        return objection_to_hosts() if several_hosts else ""

    @classmethod
    def shared_memory(cls, ranks: int, hosts: int) -> int:
        return shared_memory_of(ranks, hosts)

    @classmethod
    def preference(cls, launch: Launch, has_gpu: bool) -> int:
        return 20 if has_gpu else 0  # NCCL sends tensors from GPU to GPU, this engine through host memory

    @classmethod
    def built_with(cls) -> frozenset[str]:
        return frozenset()

    def start(self, start: Start) -> int:
        if self._engine is None or self._groups is None:
            self._engine = Engine(cpp_library.library())
            self._groups = Groups(self._engine)
        self._start = start
        self._network = None if start.topology.is_one_host else Network(start, cpp_library.library(), self._label)
        self._groups.open(range(start.topology.size), start, self._network, self._label)
        return start.topology.size

    def stop(self) -> None:
        if self._groups is not None:
            self._groups.close_all()

    def abort(self, reason: str) -> None:
        if self._engine is not None:
            self._engine.abort(f"the native engine was stopped: {reason}")

    def is_peer_failure(self, error: BaseException) -> bool:
        import tensorflow as tf

        # The exceptions that an error of the engine raises: from an operation, from XLA, from Python in a graph.
        return self._engine is not None and self._engine.peer_has_failed and isinstance(
            error, (tf.errors.AbortedError, tf.errors.InternalError, tf.errors.UnknownError))

    @property
    def engine(self) -> str:
        how = f" ({self._engine.instructions})" if self._engine is not None else ""
        between = f" and {self._network.description}" if self._network is not None else ""
        return f"shared memory{how}{between}"

    @property
    def transport(self) -> str:
        return "shared memory"

    @property
    def objection_to_xla(self) -> str:
        import tensorflow as tf

        if tf.config.get_visible_devices("GPU"):
            return "they are compiled for the CPU only, and XLA compiles for the GPU here"
        return "its library is not loaded" if self._engine is None else self._engine.objection_to_xla

    def enter(self, key: str) -> None:
        self._compiled_operations().enter(key)

    def entered(self, key: str) -> int:
        return 0 if self._engine is None else self._engine.entered(key)

    def keep_times(self, key: str, capacity: int) -> bool:
        from hvkeras.compat.graphs import compiled_by_xla  # noqa: PLC0415 - imports TensorFlow

        if self._engine is None or compiled_by_xla():
            return False
        self._engine.keep_times(key, capacity)
        return True

    def times(self, key: str, capacity: int) -> tuple[Any, int]:
        assert self._engine is not None
        return self._engine.times(key, capacity)

    def add_process_set(self, ranks: Sequence[int]) -> None:
        assert self._groups is not None
        assert self._start is not None
        self._groups.open(ranks, self._start, self._network, self._label)

    def remove_process_set(self, ranks: Sequence[int]) -> None:
        if self._groups is not None:
            self._groups.close(ranks, f"the process set of ranks {[*ranks]} was removed")

    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        return self._reduce("allreduce", tensors, key, ranks, reduction=_REDUCTIONS[reduction], before=repr(before),
                            after=repr(after))

    def compressed_allreduce(
        self, tensors: Sequence[Tensor], key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> list[Tensor]:
        return self._reduce("allreduce", tensors, key, ranks, reduction=_REDUCTIONS[Reduction.SUM], before=repr(before),
                            after=repr(after), compression=1)

    def rounding_errors(self, key: str, ranks: Sequence[int], count: int) -> NDArray[Any] | None:
        number = self._number_here(ranks)
        return None if number is None else self._loaded().read_errors(number, key, count)

    def set_rounding_errors(self, key: str, ranks: Sequence[int], errors: NDArray[Any]) -> bool:
        number = self._number_here(ranks)
        if number is None and not errors.size and self._groups is not None:  # collectives of other ranks have a record
            self._loaded().write_errors(self._groups.number(ranks), key, errors)
        return number is not None and self._loaded().write_errors(number, key, errors)

    def _number_here(self, ranks: Sequence[int]) -> int | None:
        """Return the number of a group on several hosts of which this rank leads its host; None for other groups."""
        if self._groups is None or self._start is None or self._costs(ranks) is None:
            return None
        topology = self._start.topology
        here = [rank for rank in ranks if topology.host_numbers[rank] == topology.host_numbers[topology.rank]]
        return self._groups.number(ranks) if topology.rank in here[:1] else None

    def _loaded(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        import tensorflow as tf

        gathered: Tensor = self._operations(tensor).hvkeras_allgather(input=tensor, **self._identity(key, ranks))
        gathered.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        return gathered

    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        sent: Tensor = self._operations(tensor).hvkeras_broadcast(input=tensor, root=list(ranks).index(root_rank),
                                                                  **self._identity(key, ranks))
        return sent

    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        received, rows = self._operations(tensor).hvkeras_alltoall(input=tensor, splits=splits,
                                                                   **self._identity(key, ranks))
        return received, rows

    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        part: Tensor = self._operations(tensor).hvkeras_reducescatter(
            input=tensor, reduction=_REDUCTIONS[Reduction.SUM], before=repr(before), after=repr(after),
            **self._identity(key, ranks))
        return part

    def reduce_parts(
        self, tensors: Sequence[Tensor], key: str, ranks: Sequence[int], bounds: Sequence[Sequence[int]],
        before: float = 1.0, after: float = 1.0,
    ) -> list[Tensor]:
        return self._reduce("reduce_parts", tensors, key, ranks, bounds=_joined(bounds),
                            reduction=_REDUCTIONS[Reduction.SUM], before=repr(before), after=repr(after))

    def gather_parts(
        self, tensors: Sequence[Tensor], key: str, ranks: Sequence[int], bounds: Sequence[Sequence[int]], results: int,
    ) -> list[Tensor]:
        gathered = self._operations(tensors[0]).hvkeras_gather_parts(
            inputs=list(tensors), bounds=_joined(bounds), R=results, **self._identity(key, ranks))
        return list(gathered) if results else []  # without results, TensorFlow returns the operation itself

    def bucket_size(self, ranks: Sequence[int]) -> int | None:
        costs = self._costs(ranks)
        if costs is None:
            return None
        best = _BUCKET_SECONDS / max(costs.per_byte, _BUCKET_SECONDS / _MAX_BUCKET)
        return max(1 << round(math.log2(best)), _MIN_BUCKET)  # which varies less than measurements do

    def start_of(self, results: Sequence[Tensor]) -> Any:
        from hvkeras.compat.graphs import source_of  # noqa: PLC0415 - imports TensorFlow

        operation = source_of(results[0]).op
        return operation.inputs[0].op if operation.type == "HvkerasWait" else None

    def _reduce(self, operation: str, tensors: Sequence[Tensor], key: str, ranks: Sequence[int],
                **attributes: Any) -> list[Tensor]:
        """Reduce tensors, in two operations if this takes long between hosts: one starts it, one waits for it."""
        import tensorflow as tf

        from hvkeras.compat.graphs import from_function_graphs  # noqa: PLC0415 - imports TensorFlow

        operations, identity = self._operations(tensors[0]), self._identity(key, ranks)
        if (self._costs(ranks) is None or operations is self._compiled or tf.executing_eagerly()
                or not from_function_graphs()):
            return list(getattr(operations, f"hvkeras_{operation}")(inputs=list(tensors), **attributes, **identity))
        handle, started = getattr(operations, f"hvkeras_{operation}_start")(inputs=list(tensors), **attributes,
                                                                            **identity)
        return list(operations.hvkeras_wait(handle=handle, inputs=started, **identity))

    def _costs(self, ranks: Sequence[int]) -> Costs | None:
        """Return the costs of the network between the hosts of these ranks; None if they are on one host."""
        if self._network is None or self._start is None:
            return None
        numbers = self._start.topology.host_numbers
        return self._network.costs if len({numbers[rank] for rank in ranks}) > 1 else None

    def _operations(self, tensor: Tensor) -> Any:
        from hvkeras.compat.graphs import compiled_by_xla  # noqa: PLC0415 - imports TensorFlow

        assert self._engine is not None
        if tensor.dtype.name not in _DTYPES:
            raise UnsupportedError(explain("native supports the dtypes " + ", ".join(_DTYPES), "cast the tensor first",
                                           dtype=tensor.dtype.name))
        return self._compiled_operations() if compiled_by_xla() else self._engine.operations

    def _compiled_operations(self) -> CompiledOperations:
        if self._compiled is None:
            self._compiled = CompiledOperations(self._index_in)
        return self._compiled

    def _index_in(self, group: int) -> tuple[int, int]:  # this rank's index, and the group's size
        assert self._groups is not None
        assert self._start is not None
        ranks = self._groups.ranks(group)
        return ranks.index(self._start.topology.rank), len(ranks)

    def _identity(self, key: str, ranks: Sequence[int]) -> dict[str, Any]:
        """Return the attributes that identify a collective: its key, its group and, in graphs, a resource for its key.

        TensorFlow orders operations that use the same resource. Collectives with other keys may run in any order.
        """
        import tensorflow as tf

        from hvkeras.compat.graphs import compiled_by_xla, from_function_graphs  # noqa: PLC0415 - imports TensorFlow

        assert self._groups is not None
        group = self._groups.number(ranks)
        if tf.executing_eagerly():
            return {"key": "", "group": group, "order": [], "named": [_key_tensor(key)]}
        order: list[Any] = []
        if from_function_graphs() and not compiled_by_xla():
            order = [self._order.of(key)]
        return {"key": key, "group": group, "order": order, "named": []}

    @functools.cached_property
    def _order(self) -> OrderHandles:
        from hvkeras.compat.graphs import OrderHandles  # noqa: PLC0415 - imports TensorFlow

        return OrderHandles()

    @property
    def _label(self) -> str:
        assert self._start is not None
        return f"native {self._start.session}"


def _joined(bounds: Sequence[Sequence[int]]) -> str:
    return " ".join(str(bound) for each in bounds for bound in each)


@functools.lru_cache(1024)
def _key_tensor(key: str) -> Any:
    """Return a key as a tensor: for key attributes, eager mode would cache a kernel per key, without limit."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        return tf.constant(list(key.encode()), tf.uint8)
