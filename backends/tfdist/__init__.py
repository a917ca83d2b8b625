"""TensorFlow's collectives: a ring over gRPC on CPUs, NCCL on GPUs. Requires only TensorFlow."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvkeras.backends.capabilities import HostsStrategies
from hvkeras.backends.interface import Availability, Reduction, Start, Tensor
from hvkeras.backends.tfdist.cluster import Cluster
from hvkeras.errors import INSTALL_TENSORFLOW, UnsupportedError, explain

if TYPE_CHECKING:
    from hvkeras.compat.graphs import OrderHandles
    from hvkeras.control.launch_environments import Launch

_MERGE = {Reduction.SUM: "Add", Reduction.MIN: "Min", Reduction.MAX: "Max", Reduction.PRODUCT: "Mul"}

# The number of parts of a tensor that circulate concurrently. With two processes on one machine, 25 MiB take half as
# long as with TensorFlow's default, 64 MiB take two fifths, and smaller tensors take the same time.
_RINGS = 4
# The message of all errors of aborted collectives; their status code is that of the cause.
_ABORTED = "Collective ops is aborted"

# The dtypes that the kernels support; other dtypes are sent as a wider type.
_MOVABLE = ("float16", "float32", "float64", "int32", "int64")
_REDUCIBLE = {"ring": (*_MOVABLE, "bfloat16"), "nccl": ("float16", "float32", "float64", "int64")}
_MARKS = 61  # the number of marks that distinguish collectives over NCCL; sums of marks fit into all dtypes
_EXACT = 2048  # the largest number up to which float16 represents all integers
_WIDER = {"bool": "int32", "uint8": "int32", "int8": "int32", "uint16": "int32", "int16": "int32", "int32": "int64",
          "uint32": "int64", "bfloat16": "float32"}


class TfdistBackend(HostsStrategies):
    """Engine with the collective ops of `tf.distribute`, usable in any `tf.function` without a strategy scope.

    Each collective is identified by a group key (a hash of the ranks) and an instance key (a hash of the caller's key
    and the run-time size, because TensorFlow caches the shape of each instance). Both keys depend only on what is
    communicated and never on counters, so a single rank may retrace a function.
    """

    name = "tfdist"
    outlives_errors_in_graphs = False  # TensorFlow aborts all collectives of the process
    objection_to_sessions = "TensorFlow's collectives belong to the cluster of eager mode"

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    @classmethod
    def availability(cls) -> Availability:
        found = importlib.util.find_spec("tensorflow") is not None
        return Availability(found, "TensorFlow is installed" if found else
                            f"TensorFlow is not installed: {INSTALL_TENSORFLOW}")

    @classmethod
    def objection(cls, launch: Launch, several_hosts: bool) -> str:
        return ""

    @classmethod
    def preference(cls, launch: Launch, has_gpu: bool) -> int:
        return 10

    @classmethod
    def built_with(cls) -> frozenset[str]:
        return frozenset()  # on GPUs, TensorFlow includes NCCL

    def start(self, start: Start) -> int:
        if self._cluster is None:
            self._cluster = Cluster(start)
        return self._cluster.reopen(start)

    def stop(self) -> None:
        """Leave the cluster running: TensorFlow cannot shut it down, and a later `start()` reuses it."""

    def abort(self, reason: str) -> None:
        if self._cluster is not None:
            self._cluster.abort(reason)

    def is_peer_failure(self, error: BaseException) -> bool:
        import tensorflow as tf

        return isinstance(error, tf.errors.OpError) and (
            _ABORTED in str(error) or isinstance(error, tf.errors.UnavailableError))

    def strategy(self, **options: Any) -> Any:
        assert self._cluster is not None
        return self._cluster.strategy(**options)

    @property
    def engine(self) -> str:
        return self._cluster.description if self._cluster is not None else "TensorFlow collectives"

    @property
    def transport(self) -> str:
        return "NCCL" if self._cluster is not None and self._cluster.hint == "nccl" else "gRPC"

    def add_process_set(self, ranks: Sequence[int]) -> None:
        """Do nothing: TensorFlow creates a group of ranks with its first collective."""

    def remove_process_set(self, ranks: Sequence[int]) -> None:
        """Do nothing."""

    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        import tensorflow as tf

        dtype = tensors[0].dtype.name
        shapes = [tf.shape(tensor) for tensor in tensors]
        sizes = [tf.size(tensor) for tensor in tensors]
        mark, reduced_mark = self._marks(key, len(ranks), dtype, reduction)
        # One spare element if all tensors may be empty, because TensorFlow's kernels do not support empty tensors.
        spare = 0 if any(tensor.shape.num_elements() for tensor in tensors) and self._hint == "ring" else 1
        flat = [*(tf.reshape(tensor, [-1]) for tensor in tensors), tf.cast(tf.fill([spare], mark), dtype)]
        bucket = tf.concat(flat[: len(tensors) + spare], 0) if len(tensors) + spare > 1 else flat[0]
        wide = self._widen(bucket, _REDUCIBLE[self._hint], dtype)
        reduced = self._placed(lambda: tf.raw_ops.CollectiveReduceV2(
            input=wide, group_size=len(ranks), group_key=_number("group", *ranks), instance_key=_instance(key, wide),
            ordering_token=self._token(key), merge_op=_MERGE[reduction], final_op="Id",
            communication_hint=self._hint, max_subdivs_per_device=_RINGS))
        if self._hint == "nccl":
            _require_order(reduced[-1:], reduced_mark)
        reduced = tf.cast(reduced, tensors[0].dtype)
        parts = tf.split(reduced, [*sizes, *[1] * spare]) if len(tensors) + spare > 1 else [reduced]
        results = [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=False)]
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return results

    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        import tensorflow as tf

        # First exchange how many rows each rank sends (and TensorFlow's order of the ranks), then the padded rows.
        mark, _ = self._marks(key, len(ranks))
        mine = tf.stack([tf.constant(self._rank, tf.int32), tf.shape(tensor)[0], mark])[None]
        table = self._gather_equal(mine, f"{key} rows", len(ranks), ranks)
        if self._hint == "nccl":
            _require_order(table[:, 2], mark)
        order = tf.argsort(table[:, 0])
        most = tf.reduce_max(table[:, 1])
        wide = self._widen(tensor, _MOVABLE, tensor.dtype.name)
        row = tf.reshape(wide, [tf.shape(wide)[0], tf.reduce_prod(tf.shape(wide)[1:])])
        # One spare column, so that the tensor is never empty.
        padded = tf.pad(row, [[0, tf.maximum(most, 1) - tf.shape(row)[0]], [0, 1]])
        gathered = self._gather_equal(padded, f"{key} data", len(ranks), ranks)
        blocks = tf.reshape(gathered, [len(ranks), tf.maximum(most, 1), tf.shape(padded)[1]])
        parts = [blocks[order[index], : table[order[index], 1], :-1] for index in range(len(ranks))]
        rows = tf.concat(parts, 0)
        shape = tf.concat([[tf.shape(rows)[0]], tf.shape(tensor)[1:]], 0)
        result: Tensor = tf.cast(tf.reshape(rows, shape), tensor.dtype)
        result.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        return result

    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        import tensorflow as tf

        if self._hint == "nccl":
            return self._broadcast_bits(tensor, root_rank, key, ranks)
        wide = self._widen(tensor, (*_MOVABLE, "bool"), tensor.dtype.name)
        flat = tf.concat([tf.reshape(wide, [-1]), tf.zeros([1], wide.dtype)], 0)
        common = {"group_size": len(ranks), "group_key": _number("group", *ranks),
                  "instance_key": _instance(f"{key} from {root_rank}", flat),
                  "communication_hint": self._hint}
        if self._rank == root_rank:
            sent = self._placed(lambda: tf.raw_ops.CollectiveBcastSendV2(input=flat, **common))
        else:
            sent = self._placed(
                lambda: tf.raw_ops.CollectiveBcastRecvV2(shape=tf.shape(flat), T=flat.dtype, **common))
        result: Tensor = tf.cast(tf.reshape(sent[:-1], tf.shape(tensor)), tensor.dtype)
        result.set_shape(tensor.shape)
        return result

    def _broadcast_bits(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        """Broadcast as a sum of the root's bits, as int64, and zeros.

        TensorFlow 2.21's broadcast over NCCL receives into memory that kernels may still use. And functions run it in
        any order, but NCCL requires the same order on all ranks.
        """
        import tensorflow as tf

        wide = self._widen(tensor, (*_MOVABLE, *_WIDER), tensor.dtype.name)
        wide = tf.cast(wide, tf.uint8) if wide.dtype == tf.bool else wide
        each = tf.int64.size // wide.dtype.size
        spare = tf.zeros([-tf.size(wide) % each], wide.dtype)
        bits = tf.bitcast(tf.reshape(tf.concat([tf.reshape(wide, [-1]), spare], 0), [-1, each] if each > 1 else [-1]),
                          tf.int64)
        mine = bits if self._rank == root_rank else tf.zeros_like(bits)
        summed = self.allreduce([mine], f"{key} from {root_rank}", Reduction.SUM, ranks)[0]
        sent = tf.reshape(tf.bitcast(summed, wide.dtype), [-1])[: tf.size(wide)]
        result: Tensor = tf.cast(tf.reshape(sent, tf.shape(tensor)), tensor.dtype)
        result.set_shape(tensor.shape)
        return result

    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        import tensorflow as tf

        # First exchange how many rows each rank sends to each rank (and TensorFlow's order of the ranks), then the
        # rows, padded to the largest of these counts.
        size, mine = len(ranks), list(ranks).index(self._rank)
        mark, _ = self._marks(key, size)
        sent_row = tf.concat([tf.constant([self._rank, mark], tf.int64), splits], 0)[None]
        table = self._gather_equal(sent_row, f"{key} splits", size, ranks)
        if self._hint == "nccl":
            _require_order(table[:, 1], mark)
        order = tf.argsort(table[:, 0])  # maps indices in `ranks` to indices in TensorFlow's order
        rows = tf.gather(table[:, 2:], order)
        counts = tf.cast(rows, tf.int32)
        most = tf.maximum(tf.reduce_max(counts), 1)
        wide = self._widen(tensor, _MOVABLE, tensor.dtype.name)
        row = tf.reshape(wide, [tf.shape(wide)[0], tf.reduce_prod(tf.shape(wide)[1:])])
        # One spare column, so that the tensor is never empty.
        blocks = tf.stack([tf.pad(block, [[0, most - tf.shape(block)[0]], [0, 1]])
                           for block in tf.split(row, tf.ensure_shape(splits, [size]))])
        if self._hint == "nccl":
            # TensorFlow 2.21's all-to-all over NCCL uses only the devices of its own process as the group: every rank
            # would receive its own blocks.
            everything = self._gather_equal(blocks, f"{key} data", size, ranks)
            received = tf.reshape(everything, tf.concat([[size], tf.shape(blocks)], 0))[:, mine]
        else:
            received = self._placed(lambda: tf.raw_ops.CollectiveAllToAllV2(
                input=tf.gather(blocks, tf.argsort(order)), group_size=size, group_key=_number("group", *ranks),
                instance_key=_instance(f"{key} data", blocks), ordering_token=self._token(key),
                communication_hint=self._hint))
        flat = tf.concat([received[order[index], : counts[index, mine], :-1] for index in range(size)], 0)
        result = tf.cast(tf.reshape(flat, tf.concat([[tf.shape(flat)[0]], tf.shape(tensor)[1:]], 0)), tensor.dtype)
        result.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        return result, rows[:, mine]

    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        """Return this rank's rows of an allreduce, because TensorFlow's reduce-scatter has no CPU kernel."""
        import tensorflow as tf

        reduced = self.allreduce([tensor], key, Reduction.SUM, ranks)[0]
        size, mine = len(ranks), list(ranks).index(self._rank)
        each, more = tf.shape(reduced)[0] // size, tf.shape(reduced)[0] % size
        start = mine * each + tf.minimum(mine, more)
        return reduced[start : start + each + tf.cast(mine < more, tf.int32)]

    @property
    def _rank(self) -> int:
        assert self._cluster is not None
        return self._cluster.rank

    @property
    def _hint(self) -> str:
        assert self._cluster is not None
        return self._cluster.hint

    def _placed(self, collective: Callable[[], Tensor]) -> Tensor:
        """Create a collective on this rank's device for collectives, wherever its tensors are.

        TensorFlow ties a group of ranks to one device of each rank: using the same ranks with another device fails the
        group permanently. And one rank's tensor may be on the host when another's is on a GPU.
        """
        import tensorflow as tf

        def create() -> Tensor:
            assert self._cluster is not None
            with tf.device(self._cluster.device):
                return collective()

        return _outside_loops(create)

    def _gather_equal(self, tensor: Tensor, key: str, count: int, ranks: Sequence[int]) -> Tensor:
        import tensorflow as tf

        return self._placed(lambda: tf.raw_ops.CollectiveGatherV2(
            input=tensor, group_size=count, group_key=_number("group", *ranks), instance_key=_instance(key, tensor),
            ordering_token=self._token(key), communication_hint=self._hint))

    def _marks(self, key: str, size: int, dtype: str = "int64", reduction: Reduction = Reduction.SUM
               ) -> tuple[int, int]:
        """Return a mark of a collective to send over NCCL, and the result of its reduction over `size` ranks.

        NCCL matches collectives by their order only. The marks detect ranks that run different collectives.
        """
        if self._hint == "ring":
            return 0, 0  # TensorFlow matches collectives by their keys
        count = 2 if reduction is Reduction.PRODUCT else _EXACT // size if dtype == "float16" else _MARKS
        mark = _number("mark", key) % max(1, min(count, _MARKS))
        return mark, mark * size if reduction is Reduction.SUM else mark

    @functools.cached_property
    def _order(self) -> OrderHandles:
        from hvkeras.compat.graphs import OrderHandles  # noqa: PLC0415 - imports TensorFlow

        return OrderHandles()

    def _token(self, key: str) -> list[Any]:
        """Return the ordering resource of a key in the graph under construction.

        TensorFlow runs the stateful ops of a function one after another unless they use different resources. With one
        resource per key, buckets overlap, and ranks may add named collectives to their graphs in any order. Over NCCL,
        there is no resource, because NCCL requires the same order on all ranks.
        """
        import tensorflow as tf

        if tf.executing_eagerly() or self._hint != "ring":
            return []
        return [self._order.of(key)]

    def _widen(self, tensor: Tensor, supported: Sequence[str], dtype: str) -> Tensor:
        import tensorflow as tf

        wide = dtype
        while wide not in supported:
            if wide not in _WIDER:
                raise UnsupportedError(explain(
                    f"{self.name} supports the dtypes " + ", ".join(sorted({*_MOVABLE, *_WIDER})),
                    "cast the tensor, or use the horovod backend", dtype=dtype))
            wide = _WIDER[wide]
        result: Tensor = tf.cast(tensor, wide)
        return result


def _require_order(marks: Tensor, mark: int) -> None:
    """Fail a collective that NCCL has matched with different collectives of other ranks.

    Args:
        mark: Their expected value.

    Raises:
        MismatchError: A mark differs, in eager mode; a graph raises `tf.errors.InvalidArgumentError` when it runs.
    """
    import tensorflow as tf

    from hvkeras.compat.tensorflow_errors import MismatchError  # noqa: PLC0415 - imports TensorFlow

    text = explain("Over NCCL, all ranks must run their collectives in the same order, but NCCL has matched different"
                   " collectives", "call named collectives in the same order and from one thread on all ranks, or use"
                   " the backend native")
    matched = tf.reduce_all(tf.equal(marks, tf.cast(mark, marks.dtype)))
    if tf.executing_eagerly():
        if not matched:
            raise MismatchError(text)
        return
    check = tf.raw_ops.Assert(condition=matched, data=[text])
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(check)  # otherwise the next collective would wait for it


def _outside_loops(collective: Callable[[], Tensor]) -> Tensor:
    """Create a collective, wrapped in a function if the graph under construction is inside a loop.

    TensorFlow includes the loop and the iteration in the identity of a collective, so a collective inside a loop would
    not match one that is outside a loop or in a different iteration. A function that is not inlined starts with a new
    identity.

    Collectives outside loops are not wrapped: TensorFlow runs function calls one after another, so ranks could not add
    named collectives to their graphs in any order. As a consequence, a user's function that is traced outside a loop
    and called inside one matches only the same use on other ranks, not a joined rank.
    """
    import tensorflow as tf

    from hvkeras.compat import graphs  # noqa: PLC0415 - imports TensorFlow

    if not graphs.in_loop():
        return collective()
    result: Tensor = tf.function(collective, autograph=False, experimental_attributes={"_noinline": True})()
    return result


def _number(*parts: object) -> int:
    """Hash the parts to a non-negative int32, as TensorFlow requires for keys."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def _instance(key: str, tensor: Any) -> Any:
    """Return the instance key of a collective: a hash of its name and of the tensor's size.

    It is the same in eager mode, in a graph with a static size, and in a graph whose sizes are known only at run time.
    """
    import tensorflow as tf

    number, size = _number("instance", key), tensor.shape.num_elements()
    if size is not None:
        return number ^ _spread(size)
    return tf.bitwise.bitwise_xor(tf.constant(number, tf.int32), tf.cast(_spread(tf.size(tensor, tf.int64)), tf.int32))


def _spread(size: Any) -> Any:
    """Apply Knuth's multiplicative hash to a size (int or int64 tensor). Intermediate values fit into 63 bits."""
    return size % 2147483647 * 2654435761 % 2147483647
