"""The native engine's operations inside functions that XLA compiles, as calls of the library's host functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvkeras.backends.interface import Tensor
from hvkeras.errors import UnsupportedError, explain


class CompiledOperations:
    """Stands where the library's TensorFlow operations do, with the same functions, while XLA's graphs are made.

    XLA keeps no order but that of data, and a call blocks until all ranks have come. So each call takes a number
    from the call before it and hands one on, through a variable: TensorFlow carries it into and out of conditions,
    loops and nested functions. At most one call of a running function waits at any time, in the order in which the
    function was traced, so ranks that trace the same function always wait in the same call.

    Args:
        place: This rank's place in a group of ranks, given by its number, and the group's size.
    """

    def __init__(self, place: Callable[[int], tuple[int, int]]) -> None:
        import tensorflow as tf

        from hvkeras.compat.graphs import lasting_variable

        self._place = place
        self._order = lasting_variable(0, tf.int32, "hvkeras_compiled_order")

    def enter(self, key: str) -> None:
        """Counts that this rank comes to a plan of collectives."""
        self._call("enter", [], [], {"key": key})

    def hvkeras_allreduce(self, inputs: Sequence[Tensor], reduction: int, before: Any, after: Any,
                          **identity: Any) -> list[Tensor]:
        """Reduces tensors of one dtype as one call."""
        shapes = [_static_shape(tensor, "reduces") for tensor in inputs]
        return self._call(
            "allreduce", inputs, [(inputs[0].dtype, shape) for shape in shapes], identity,
            details=";".join(map(str, shapes)), type=inputs[0].dtype.as_datatype_enum, reduction=reduction,
            before=before, after=after, counts=_words(map(_count, shapes)))

    def hvkeras_broadcast(self, input: Tensor, root: int, **identity: Any) -> Tensor:  # noqa: A002 - the operation's
        """Gives all ranks the tensor of one."""
        shape = _static_shape(input, "sends")
        return self._call("broadcast", [input], [(input.dtype, shape)], identity, details=shape, root=root,
                          bytes=_count(shape) * input.dtype.size)[0]

    def hvkeras_allgather(self, input: Tensor, **identity: Any) -> Tensor:  # noqa: A002 - the operation's
        """Concatenates tensors, of as many rows on each rank."""
        rows, *row = _static_shape(input, "gathers", "for sparse gradients pass sparse_as_dense=True; else ")
        _, size = self._place(identity["group"])
        return self._call("allgather", [input], [(input.dtype, [rows * size, *row])], identity, details=_details(row),
                          rows=rows, row_bytes=_count(row) * input.dtype.size)[0]

    def hvkeras_alltoall(
        self, input: Tensor, splits: Tensor, **identity: Any,  # noqa: A002 - the operation's
    ) -> tuple[Tensor, Tensor]:
        """Sends rows to each rank, as many from and to each."""
        import tensorflow as tf

        rows, *row = _static_shape(input, "sends")
        _, size = self._place(identity["group"])
        if rows % size:
            raise UnsupportedError(explain("A function that XLA compiles sends as many rows to each rank",
                                           "pass jit_compile=False to compile() or tf.function()", rows=rows,
                                           ranks=size))
        received = self._call(
            "alltoall", [input, splits], [(input.dtype, [rows, *row])], identity, details=_details(row),
            rows=rows // size, ranks=size, row_bytes=_count(row) * input.dtype.size)[0]
        return received, tf.fill([size], tf.constant(rows // size, tf.int64))

    def hvkeras_reducescatter(
        self, input: Tensor, reduction: int, before: Any, after: Any, **identity: Any,  # noqa: A002 - the operation's
    ) -> Tensor:
        """Reduces a tensor and keeps this rank's rows; the first ranks have one more if they cannot be dealt evenly."""
        rows, *row = _static_shape(input, "reduces")
        mine, size = self._place(identity["group"])
        starts = [place * (rows // size) + min(place, rows % size) for place in range(size + 1)]
        return self._call(
            "reducescatter", [input], [(input.dtype, [starts[mine + 1] - starts[mine], *row])], identity,
            details=[rows, *row], type=input.dtype.as_datatype_enum, reduction=reduction, before=before, after=after,
            starts=_words(start * _count(row) for start in starts))[0]

    def _call(self, function: str, operands: Sequence[Tensor], results: Sequence[tuple[Any, list[int]]],
              identity: Mapping[str, Any], **description: Any) -> list[Tensor]:
        """Adds a call to the graph, after all calls before it; see `Description` in tensorflow/xla.cc."""
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
    """What must be equal on all ranks of tensors with any number of rows, worded as in tensorflow/ops.cc."""
    return f"[{', '.join(['?', *map(str, row)])}]"
