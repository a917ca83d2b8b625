"""Building blocks of collectives: the reduction constants, participating ranks, plans, and scaling."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.backends import ONE_PROCESS, backend_class, importable_backends
from hvkeras.backends.capabilities import objection_to_xla
from hvkeras.backends.interface import Backend, Reduction
from hvkeras.collectives.compression import Compression
from hvkeras.compat import graphs
from hvkeras.compat.tensorflow_errors import ArgumentError
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.horovod import as_horovod
from hvkeras.job.plans import Plan
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import current_session

Average: int = 0
Sum: int = 1
Adasum: int = 2
Min: int = 3
Max: int = 4
Product: int = 5

NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
REDUCTIONS = {Average: Reduction.SUM, Sum: Reduction.SUM, Min: Reduction.MIN, Max: Reduction.MAX,
              Product: Reduction.PRODUCT}
_HALF_DTYPES = ("float16", "bfloat16")
_NOOP_ENGINE = backend_class(ONE_PROCESS)()


def require_kernels(backend: Backend) -> None:
    """Raise UnsupportedError if a backend has no collectives for the graph under construction."""
    if backend.objection_to_sessions and not tf.executing_eagerly() and not graphs.from_function_graphs():
        others = [name for name, other in importable_backends().items()
                  if name != ONE_PROCESS and not other.objection_to_sessions]
        raise UnsupportedError(explain(f"The backend {backend.name!r} has no collectives for sessions of TensorFlow 1:"
                                       f" {backend.objection_to_sessions}", f"HVKERAS_BACKEND={' or '.join(others)}"))
    objection = objection_to_xla(backend) if graphs.compiled_by_xla() else ""
    if objection:
        raise UnsupportedError(explain(f"Collectives of the backend {backend.name!r} cannot be compiled by XLA:"
                                       f" {objection}",
                                       "pass jit_compile=False to compile() or tf.function()", jit_compile=True))


def operation_of(op: Any) -> int:
    """Validate and return a reduction constant.

    Raises:
        UsageError: `op` is not a reduction constant.
    """
    if isinstance(op, bool) or op not in range(len(NAMES)):
        raise UsageError(explain("op must be one of hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product",
                                 op=op))
    return int(op)


def members(process_set: ProcessSet, operation: str) -> tuple[int, ...]:
    """Return the global ranks of a process set that contains this rank, in ascending order.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: `process_set` is not a process set, or is not registered.
        ArgumentError: This rank is not in `process_set`.
    """
    topology = current_session().topology
    if not isinstance(process_set, ProcessSet):
        raise UsageError(explain("process_set must be a ProcessSet", process_set=process_set))
    ranks = process_set.members()
    if topology.rank not in ranks:
        raise ArgumentError(explain(f"Only members of a process set can participate in its {operation}",
                                    "check process_set.included() before the call", rank=topology.rank,
                                    process_set=process_set))
    return ranks


def reducing_engine(ranks: Sequence[int]) -> Backend:
    """Return the engine that reduces over `ranks`; for a single rank, a no-op engine."""
    return current_session().backend if len(ranks) > 1 else _NOOP_ENGINE


def gradient_divisor(ranks: Sequence[int]) -> int:
    """Return the divisor for gradients of allgather and broadcast, which is also the factor for those of reducescatter.

    It is 1 if gradients are those of the sum of all ranks' losses. Horovod 0.28 averages the gradients of allgather
    and broadcast over the ranks, and multiplies the gradient of reducescatter by the number of ranks.
    """
    convention = current_session().settings.gradients
    as_in_horovod = as_horovod.is_installed() if convention == "auto" else convention == "horovod"
    return len(ranks) if as_in_horovod else 1


def require_root(root_rank: int, ranks: Sequence[int]) -> None:
    """Raise ArgumentError unless the root is one of the ranks."""
    if root_rank not in ranks:
        raise ArgumentError(explain("root_rank must be a global rank that participates", root_rank=root_rank,
                                    ranks=list(ranks)))


def plan_of(
    operation: str, tensors: Sequence[Any], ranks: Sequence[int], name: str | None, label: str,
    names: Sequence[str] | None = None, how: str = "", hint: str = "", is_of_model: bool = False,
) -> Plan:
    """Return the plan of a collective. Equal collectives in a graph are numbered, as they may run concurrently."""
    first = Plan.of(operation, tensors, ranks, label, names, f"{name or ''}#0", how, hint, is_of_model)
    return number_in_graph(first, name)


def number_in_graph(plan: Plan, name: str | None) -> Plan:
    """Number a plan to distinguish it from equal plans in the graph under construction."""
    number = graphs.count_in_graph(plan.key)
    return plan if number == 0 else dataclasses.replace(plan, identity=f"{name or ''}#{number}")


@dataclass(frozen=True)
class Sent:
    """Tensor prepared for sending.

    Attributes:
        factors: The factors that the engine applies before and after the reduction; None if the engine does not scale.
        given: The half-precision dtype of the result, if float32 is sent instead.
    """

    tensor: Any
    restore: Any
    factors: tuple[float, float] | None
    given: Any = None

    @property
    def spec(self) -> Any:
        """Shape and dtype on which the ranks must agree."""
        return tf.TensorSpec(self.tensor.shape, self.given or self.tensor.dtype)


@dataclass(frozen=True)
class Scaling:
    """Processing of a tensor before and after the reduction.

    Attributes:
        op: One of the reduction constants.
        compression: The compressor of the tensors that are sent.
        prescale: Factor applied to each rank's values before the reduction.
        postscale: Factor applied to the result.
    """

    op: int
    compression: Any = Compression.none
    prescale: float = 1.0
    postscale: float = 1.0

    def sent(self, tensor: Any, size: int, engine: Backend | None = None) -> Sent:
        """Prepare a tensor for sending among `size` ranks; `engine`, if given, scales the dtypes in its `scales`."""
        is_builtin = self.compression in (Compression.none, Compression.fp16, Compression.bf16, Compression.int8)
        given = None
        if engine is not None and is_builtin and self._needs_float32(tensor.dtype, engine):
            given, tensor, compression = tensor.dtype, tf.cast(tensor, tf.float32), Compression.none
        else:
            compression = self.compression
        if engine is not None and is_builtin and tensor.dtype.name in engine.scales:
            compressed, restore = compression.compress(tensor)
            after = self.postscale / size if self.op == Average else self.postscale
            return Sent(compressed, restore, (self.prescale, after), given)
        compressed, restore = compression.compress(scale(tensor, self.prescale))
        return Sent(compressed, restore, None, given)

    def _needs_float32(self, dtype: Any, engine: Backend) -> bool:
        """Return whether intermediate results in a half-precision dtype may overflow, or be rounded at each rank."""
        exact = self.op in (Min, Max) and self.prescale == self.postscale == 1.0
        return dtype.name in _HALF_DTYPES and dtype.name not in engine.rounds_once and not exact

    def received(self, tensor: Any, sent: Sent, size: int) -> Any:
        """Compute the result from the received tensor."""
        if sent.given is None:
            tensor = self.compression.decompress(tensor, sent.restore)
        if sent.factors is None:
            if self.op == Average:
                tensor = tf.truncatediv(tensor, size) if tensor.dtype.is_integer else scale(tensor, 1.0 / size)
            tensor = scale(tensor, self.postscale)
        return tensor if sent.given is None else tf.cast(tensor, sent.given)

    @property
    def text(self) -> str:
        """Description for the plan, on which the ranks must agree."""
        name = NAMES[self.op].lower() + (", int8 between hosts" if self.compression is Compression.int8 else "")
        if self.prescale == self.postscale == 1.0:
            return name
        return f"{name} scaled by {self.prescale:g} before and {self.postscale:g} after"


def of_tensors(value: Any) -> Any:
    """Convert a value, or the parts of `tf.IndexedSlices`, to tensors; None stays None."""
    if isinstance(value, tf.IndexedSlices):
        shape = None if value.dense_shape is None else tf.convert_to_tensor(value.dense_shape)
        return tf.IndexedSlices(tf.convert_to_tensor(value.values), tf.convert_to_tensor(value.indices), shape)
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)


def scale(tensor: Any, factor: float) -> Any:
    """Multiply a tensor by a number; integers are scaled in float64 and truncated."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_integer:
        return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
    return tensor * tf.constant(factor, tensor.dtype)  # tf.cast would round to float32 first


def shaped(tensor: Any, like: Any) -> Any:
    """Set the static shape of a symbolic result to that of `like`."""
    if not tf.executing_eagerly():
        tensor.set_shape(like.shape)
    return tensor


def on_device(device: str) -> Any:
    """Return a context manager that places operations on a device; with "", TensorFlow chooses the device."""
    return tf.device(device) if device else contextlib.nullcontext()
