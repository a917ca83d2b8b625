"""Operations of the native engine in XLA-compiled functions, as custom calls of the library's host functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvkeras.backends.interface import Tensor
from hvkeras.errors import UnsupportedError, explain


class CompiledOperations:
    """Substitute for the library's TensorFlow operations, with the same interface, while XLA graphs are constructed.

    XLA preserves only the order of data dependencies, and a call blocks until all ranks have arrived. Each call
    therefore depends on the previous one, through a variable that TensorFlow carries into and out of conditionals,
    loops and nested functions. The calls of a running function execute one at a time, in trace order, so ranks that
    trace the same function always wait in the same call.

    Args:
        index_in: Maps the number of a group of ranks to this rank's index in the group, and the group's size.
    """

    def __init__(self, index_in: Callable[[int], tuple[int, int]]) -> None:
        import tensorflow as tf

        from hvkeras.compat.graphs import persistent_variable  # noqa: PLC0415 - imports TensorFlow

        self._index_in = index_in
        self._order = persistent_variable(0, tf.int32, "hvkeras_compiled_order")

    def enter(self, key: str) -> None:
        """Count at run time that this rank enters a plan of collectives."""
        self._call("enter", [], [], {"key": key})

    def hvkeras_allreduce(self, inputs: Sequence[Tensor], reduction: int, before: Any, after: Any,
                          compression: int = 0, **identity: Any) -> list[Tensor]:
        """Reduce tensors of one dtype in a single call."""
        shapes = [_static_shape(tensor, "reduces") for tensor in inputs]
        return self._call(
            "allreduce", inputs, [(inputs[0].dtype, shape) for shape in shapes], identity,
            details=";".join(map(str, shapes)), type=inputs[0].dtype.as_datatype_enum, reduction=reduction,
            before=before, after=after, compression=compression, counts=_joined(map(_count, shapes)))

    def hvkeras_broadcast(self, input: Tensor, root: int, **identity: Any) -> Tensor:  # noqa: A002 - the operation's
        """Broadcast the root's tensor to all ranks."""
        shape = _static_shape(input, "sends")
        return self._call("broadcast", [input], [(input.dtype, shape)], identity, details=shape, root=root,
                          bytes=_count(shape) * input.dtype.size)[0]

    def hvkeras_allgather(self, input: Tensor, **identity: Any) -> Tensor:  # noqa: A002 - the operation's
        """Concatenate tensors that have the same number of rows on each rank."""
        rows, *row = _static_shape(input, "gathers", "for sparse gradients pass sparse_as_dense=True; else ")
        _, size = self._index_in(identity["group"])
        return self._call("allgather", [input], [(input.dtype, [rows * size, *row])], identity, details=_details(row),
                          rows=rows, row_bytes=_count(row) * input.dtype.size)[0]

    def hvkeras_alltoall(
        self, input: Tensor, splits: Tensor, **identity: Any,  # noqa: A002 - the operation's
    ) -> tuple[Tensor, Tensor]:
        """Send the same number of rows to each rank."""
        import tensorflow as tf

        rows, *row = _static_shape(input, "sends")
        _, size = self._index_in(identity["group"])
        if rows % size:
            raise UnsupportedError(explain("A function that XLA compiles must send the same number of rows to each"
                                           " rank", "pass jit_compile=False to compile() or tf.function()", rows=rows,
                                           ranks=size))
        received = self._call(
            "alltoall", [input, splits], [(input.dtype, [rows, *row])], identity, details=_details(row),
            rows=rows // size, ranks=size, row_bytes=_count(row) * input.dtype.size)[0]
        return received, tf.fill([size], tf.constant(rows // size, tf.int64))

    def hvkeras_reducescatter(
        self, input: Tensor, reduction: int, before: Any, after: Any, **identity: Any,  # noqa: A002 - the operation's
    ) -> Tensor:
        """Reduce a tensor and return this rank's rows; if they are uneven, the first ranks get one more."""
        rows, *row = _static_shape(input, "reduces")
        mine, size = self._index_in(identity["group"])
        starts = [index * (rows // size) + min(index, rows % size) for index in range(size + 1)]
        return self._call(
            "reducescatter", [input], [(input.dtype, [starts[mine + 1] - starts[mine], *row])], identity,
            details=[rows, *row], type=input.dtype.as_datatype_enum, reduction=reduction, before=before, after=after,
            starts=_joined(start * _count(row) for start in starts))[0]

    def hvkeras_reduce_parts(self, inputs: Sequence[Tensor], bounds: str, reduction: int, before: Any, after: Any,
                             **identity: Any) -> list[Tensor]:
        """Reduce tensors; only this rank's part of each result is defined."""
        shapes = [_static_shape(tensor, "reduces") for tensor in inputs]
        _, size = self._index_in(identity["group"])
        return self._call(
            "reduce_parts", inputs, [(inputs[0].dtype, shape) for shape in shapes], identity,
            details=";".join(map(str, shapes)), type=inputs[0].dtype.as_datatype_enum, reduction=reduction,
            before=before, after=after, ranks=size, bounds=bounds)

    def hvkeras_gather_parts(self, inputs: Sequence[Tensor], bounds: str, R: int,  # noqa: N803 - the operation's
                             **identity: Any) -> list[Tensor]:
        """Gather tensors from the ranks' parts; the first `R` inputs have the shapes of the results."""
        mine, size = self._index_in(identity["group"])
        numbers = [int(number) for number in bounds.split()]
        bounds_of_each = [numbers[start : start + size + 1] for start in range(0, len(numbers), size + 1)]
        buffers, are_results = iter(inputs[:R]), []
        shapes: list[tuple[Any, list[int]]] = []
        for tensor_bounds in bounds_of_each:
            is_result = tensor_bounds[mine + 1] - tensor_bounds[mine] != tensor_bounds[-1]  # not all this rank's
            are_results.append(is_result)
            shape = _static_shape(next(buffers), "gathers") if is_result else [tensor_bounds[-1]]
            shapes.append((inputs[0].dtype, shape))
        gathered = self._call("gather_parts", inputs[R:], shapes, identity, details=bounds, ranks=size, rank=mine,
                              bounds=bounds, element=inputs[0].dtype.size)
        return [tensor for tensor, is_result in zip(gathered, are_results, strict=True) if is_result]

    def _call(self, function: str, operands: Sequence[Tensor], results: Sequence[tuple[Any, list[int]]],
              identity: Mapping[str, Any], **description: Any) -> list[Tensor]:
        """Add a call to the graph, ordered after all previous calls; see `Description` in tensorflow/xla.cc."""
        import tensorflow as tf
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops

        dtypes, shapes = [dtype for dtype, _ in results], [shape for _, shape in results]
        lines = {**identity, **description, "results": len(results) + 1}
        outputs: list[Tensor]
        *outputs, turn = gen_xla_ops.xla_custom_call_v2(
            operands=[*operands, self._order.read_value()], call_target_name=f"hvkeras_{function}",
            backend_config="".join(f"{name} {value}\n" for name, value in lines.items()), has_side_effect=True,
            result_dtypes=[*dtypes, tf.int32], result_shapes=[*shapes, []])
        self._order.assign(turn, read_value=False)
        return outputs


def _static_shape(tensor: Tensor, does: str, hint: str = "") -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise UnsupportedError(explain(f"A function that XLA compiles {does} only tensors with static shapes",
                                       f"{hint}give the function's arguments static shapes, or pass jit_compile=False",
                                       shape=str(tensor.shape)))
    shape: list[int] = tensor.shape.as_list()
    return shape


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _joined(numbers: Any) -> str:
    return " ".join(map(str, numbers))


def _details(row: Sequence[int]) -> str:
    """Format the dimensions that must match across ranks if row counts may differ, like tensorflow/ops.cc."""
    return f"[{', '.join(['?', *map(str, row)])}]"
