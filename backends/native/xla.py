"""The native engine's operations inside XLA-compiled functions, as calls of the library's host functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvkeras.backends.interface import Tensor
from hvkeras.errors import UnsupportedError, explain


class CompiledOperations:
    """Replaces the library's TensorFlow operations, with the same interface, while XLA graphs are constructed.

    XLA preserves only the order of data dependencies, and a call blocks until all ranks have arrived. Each call
    therefore takes a number from the previous call and passes one on, through a variable that TensorFlow carries into
    and out of conditionals, loops and nested functions. At any time, at most one call of a running function waits, in
    the order in which the function was traced, so ranks that trace the same function always wait in the same call.

    Args:
        index_in: Maps the number of a group of ranks to this rank's index in the group, and the group's size.
    """

    def __init__(self, index_in: Callable[[int], tuple[int, int]]) -> None:
        import tensorflow as tf

        from hvkeras.compat.graphs import persistent_variable  # noqa: PLC0415 - imports TensorFlow

        self._index_in = index_in
        self._order = persistent_variable(0, tf.int32, "hvkeras_compiled_order")

    def enter(self, key: str) -> None:
        """Counts that this rank enters a plan of collectives."""
        self._call("enter", [], [], {"key": key})

    def hvkeras_allreduce(self, inputs: Sequence[Tensor], reduction: int, before: Any, after: Any,
                          **identity: Any) -> list[Tensor]:
        """Reduces tensors of one dtype in a single call."""
        shapes = [_static_shape(tensor, "reduces") for tensor in inputs]
        return self._call(
            "allreduce", inputs, [(inputs[0].dtype, shape) for shape in shapes], identity,
            details=";".join(map(str, shapes)), type=inputs[0].dtype.as_datatype_enum, reduction=reduction,
            before=before, after=after, counts=_words(map(_count, shapes)))

    def hvkeras_broadcast(self, input: Tensor, root: int, **identity: Any) -> Tensor:  # noqa: A002 - the operation's
        """Broadcasts the root's tensor to all ranks."""
        shape = _static_shape(input, "sends")
        return self._call("broadcast", [input], [(input.dtype, shape)], identity, details=shape, root=root,
                          bytes=_count(shape) * input.dtype.size)[0]

    def hvkeras_allgather(self, input: Tensor, **identity: Any) -> Tensor:  # noqa: A002 - the operation's
        """Concatenates tensors that have the same number of rows on each rank."""
        rows, *row = _static_shape(input, "gathers", "for sparse gradients pass sparse_as_dense=True; else ")
        _, size = self._index_in(identity["group"])
        return self._call("allgather", [input], [(input.dtype, [rows * size, *row])], identity, details=_details(row),
                          rows=rows, row_bytes=_count(row) * input.dtype.size)[0]

    def hvkeras_alltoall(
        self, input: Tensor, splits: Tensor, **identity: Any,  # noqa: A002 - the operation's
    ) -> tuple[Tensor, Tensor]:
        """Sends rows to each rank, the same number from and to each."""
        import tensorflow as tf

        rows, *row = _static_shape(input, "sends")
        _, size = self._index_in(identity["group"])
        if rows % size:
            raise UnsupportedError(explain("A function that XLA compiles must send the same number of rows to each"
                                           " rank",
                                           "pass jit_compile=False to compile() or tf.function()", rows=rows,
                                           ranks=size))
        received = self._call(
            "alltoall", [input, splits], [(input.dtype, [rows, *row])], identity, details=_details(row),
            rows=rows // size, ranks=size, row_bytes=_count(row) * input.dtype.size)[0]
        return received, tf.fill([size], tf.constant(rows // size, tf.int64))

    def hvkeras_reducescatter(
        self, input: Tensor, reduction: int, before: Any, after: Any, **identity: Any,  # noqa: A002 - the operation's
    ) -> Tensor:
        """Reduces a tensor and returns this rank's rows; if uneven, the first ranks get one more row."""
        rows, *row = _static_shape(input, "reduces")
        mine, size = self._index_in(identity["group"])
        starts = [index * (rows // size) + min(index, rows % size) for index in range(size + 1)]
        return self._call(
            "reducescatter", [input], [(input.dtype, [starts[mine + 1] - starts[mine], *row])], identity,
            details=[rows, *row], type=input.dtype.as_datatype_enum, reduction=reduction, before=before, after=after,
            starts=_words(start * _count(row) for start in starts))[0]

    def hvkeras_reduce_parts(self, inputs: Sequence[Tensor], bounds: str, reduction: int, before: Any, after: Any,
                             **identity: Any) -> list[Tensor]:
        """Reduces tensors, of each of which this rank gets a part; the rest of the results is anything."""
        shapes = [_static_shape(tensor, "reduces") for tensor in inputs]
        _, size = self._index_in(identity["group"])
        return self._call(
            "reduce_parts", inputs, [(inputs[0].dtype, shape) for shape in shapes], identity,
            details=";".join(map(str, shapes)), type=inputs[0].dtype.as_datatype_enum, reduction=reduction,
            before=before, after=after, ranks=size, bounds=bounds)

    def hvkeras_gather_parts(self, inputs: Sequence[Tensor], bounds: str, R: int,  # noqa: N803 - the operation's
                             **identity: Any) -> list[Tensor]:
        """Gathers tensors from the ranks' parts; the first `R` inputs have the shapes of those that are wanted."""
        mine, size = self._index_in(identity["group"])
        numbers = [int(word) for word in bounds.split()]
        each = [numbers[start : start + size + 1] for start in range(0, len(numbers), size + 1)]
        wanted, kept = iter(inputs[:R]), []
        results: list[tuple[Any, list[int]]] = []
        for bound in each:
            is_wanted = bound[mine + 1] - bound[mine] != bound[-1]
            kept.append(is_wanted)
            shape = _static_shape(next(wanted), "gathers") if is_wanted else [bound[-1]]
            results.append((inputs[0].dtype, shape))
        made = self._call("gather_parts", inputs[R:], results, identity, details=bounds, ranks=size, rank=mine,
                          bounds=bounds, element=inputs[0].dtype.size)
        return [tensor for tensor, is_wanted in zip(made, kept, strict=True) if is_wanted]

    def _call(self, function: str, operands: Sequence[Tensor], results: Sequence[tuple[Any, list[int]]],
              identity: Mapping[str, Any], **description: Any) -> list[Tensor]:
        """Adds a call to the graph, ordered after all previous calls; see `Description` in tensorflow/xla.cc."""
        import tensorflow as tf
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops

        dtypes, shapes = [dtype for dtype, _ in results], [shape for _, shape in results]
        lines = {**identity, **description, "results": len(results) + 1}
        made: list[Tensor]
        *made, turn = gen_xla_ops.xla_custom_call_v2(
            operands=[*operands, self._order.read_value()], call_target_name=f"hvkeras_{function}",
            backend_config="".join(f"{name} {value}\n" for name, value in lines.items()), has_side_effect=True,
            result_dtypes=[*dtypes, tf.int32], result_shapes=[*shapes, []])
        self._order.assign(turn, read_value=False)
        return made


def _static_shape(tensor: Tensor, does: str, hint: str = "") -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise UnsupportedError(explain(f"A function that XLA compiles {does} tensors whose shapes are known when it is"
                                       " traced", f"{hint}give the function's arguments full shapes, or pass"
                                       " jit_compile=False", shape=str(tensor.shape)))
    shape: list[int] = tensor.shape.as_list()
    return shape


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _words(numbers: Any) -> str:
    return " ".join(map(str, numbers))


def _details(row: Sequence[int]) -> str:
    """Describes the dimensions that must match across ranks if row counts may differ, as tensorflow/ops.cc does."""
    return f"[{', '.join(['?', *map(str, row)])}]"
