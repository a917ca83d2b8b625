"""Functions that TensorFlow is told to run, beside what simulated ranks make of each when it is first called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import atomic_function

from hvkeras.partition import programs, tensorflow_graphs
from hvkeras.partition.analysis import Plan
from hvkeras.partition.collectives import Simulated
from hvkeras.partition.partitioning import Partitioned
from hvkeras.partition.rules import RULES

SIZE = 2
TOLERANCE = 2e-3  # of functions in which no type has fewer digits than float32
HANDLES = (tf.resource, tf.variant)

_plain_call = atomic_function.AtomicFunction.call_flat


class Comparisons:
    """Compares what functions return with what ranks make of them; the caller is given what TensorFlow computes.

    Args:
        note: Is told what became of each function, and its plan if it has rows and could be partitioned.
    """

    def __init__(self, note: Callable[[str, Plan | None], None]) -> None:
        self._note = note
        self._names: set[bytes] = set()
        self._is_busy = False

    def start(self) -> None:
        """Compare each function from now on, the first time that it is called."""
        atomic_function.AtomicFunction.call_flat = lambda function, *given: self._call(function, given)

    def _call(self, function: Any, given: Sequence[Any]) -> Any:
        if self._is_busy or not tf.executing_eagerly() or function.name in self._names:
            return _plain_call(function, *given)
        self._names.add(function.name)
        self._is_busy = True
        try:
            return self._compared(Called(function, given))
        finally:
            self._is_busy = False

    def _compared(self, called: Called) -> Any:
        sources = called.sources()
        refusal = called.copy() if sources or called.batches else "has no rows"
        if refusal:
            self._note(refusal, None)
            return called.results()
        results = called.results()
        plan = None
        try:
            partitioned = Partitioned(called.graph, sources, RULES)
            plan = partitioned.plan
            called.check(results, called.of_ranks(partitioned))
            self._note("compared", plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test goes on with TensorFlow's results
            self._note(f"{called.name}: {type(error).__name__}: {error}", plan)
        return results


class Called:
    """A function with what it is given.

    Args:
        function: The function.
        given: What it is given, with what it has captured.
    """

    def __init__(self, function: Any, given: Sequence[Any]) -> None:
        self.graph, self.name = function.graph, function.name.decode()
        self._function, self._given = function, list(given)
        self._of_ranks = [[tensor] * SIZE for tensor in given]
        self._own = len(given) - len(function.function_type.captures)
        self._program = programs.read(self.graph)
        self._variables: dict[int, tuple[int, list[tf.Variable]]] = {}  # of each handle: its place, and copies
        self.batches = [node for node in self._program.nodes if node.type.startswith("IteratorGetNext")]
        self._iterators: list[Any] = []

    def sources(self) -> dict[str, list[int]]:
        """Return the inputs that have rows: as many as the first one; none if it takes batches from an iterator."""
        dense = [
            place
            for place, (tensor, placeholder) in enumerate(zip(self._given, self.graph.inputs, strict=True))
            if place < self._own and tensor.dtype not in HANDLES and tensor.shape.rank and placeholder.shape.rank
        ]
        rows = [(self._given[place].shape[0], self.graph.inputs[place].shape[0]) for place in dense]
        alike = [place for place, number in zip(dense, rows, strict=True) if number == rows[0]]
        return {"rows": alike} if alike and rows[0][0] and not self.batches else {}

    def copy(self) -> str:
        """Give each rank variables of its own, and the same batch; return why this is not possible, if it is not."""
        iterators = [node.inputs[0] for node in self.batches]
        if len(iterators) > 1 or not set(iterators) <= set(self._program.inputs):
            return "takes several batches"
        for node in self.batches:
            self._copy_batch(self._program.inputs.index(node.inputs[0]), node.operation)
        for place, placeholder in enumerate(self.graph.inputs):
            known = tensorflow_graphs.handle(placeholder) if placeholder.dtype == tf.resource else None
            if known is not None:
                self._copy_variable(place, *known)
        return ""

    def _copy_batch(self, place: int, operation: Any) -> None:
        types, shapes = operation.get_attr("output_types"), operation.get_attr("output_shapes")
        batch = tf.raw_ops.IteratorGetNext(iterator=self._given[place], output_types=types, output_shapes=shapes)
        batches = tf.data.Dataset.from_tensors(tuple(batch)).repeat(SIZE)
        self._iterators = [iter(batches), iter(batches)]
        self._given[place], of_ranks = (iterator._iterator_resource for iterator in self._iterators)
        self._of_ranks[place] = [of_ranks] * SIZE

    def _copy_variable(self, place: int, dtype: tf.DType, shape: tf.TensorShape) -> None:
        handle = self._given[place]
        if id(handle) not in self._variables:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            copies = [tf.Variable(value, trainable=False, shape=shape) for _ in range(SIZE)]
            self._variables[id(handle)] = place, copies
        self._of_ranks[place] = [copy.handle for copy in self._variables[id(handle)][1]]

    def results(self) -> Any:
        """Return what TensorFlow computes."""
        return _plain_call(self._function, *self._given)

    def of_ranks(self, partitioned: Partitioned) -> list[list[tf.Tensor]]:
        """Return what the ranks compute."""

        def create(*tensors: tf.Tensor) -> list[list[tf.Tensor]]:
            lanes = [list(tensors[first : first + SIZE]) for first in range(0, len(tensors), SIZE)]
            for placeholder, lane in zip(self.graph.inputs, lanes, strict=True):
                for tensor in lane:
                    tensorflow_graphs.copy_handle(placeholder, tensor)
            return partitioned.create(lanes, range(SIZE), SIZE, Simulated())

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.graph.inputs for _ in range(SIZE)]
        created = tf.function(create, autograph=False).get_concrete_function(*specs)
        return created(*(tensor for lane in self._of_ranks for tensor in lane))

    def check(self, results: Any, of_ranks: Sequence[Sequence[tf.Tensor]]) -> None:
        """Compare the results and the variables of all ranks with TensorFlow's."""
        types = {tensor.dtype for node in self._program.nodes for tensor in node.operation.outputs}
        digits = [float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps) for dtype in types if dtype.is_floating]
        tolerance = max([TOLERANCE, *(4 * last for last in digits)])
        flat = results if isinstance(results, list | tuple) else [results]
        for wanted, lanes in zip(flat if self.graph.outputs else [], of_ranks, strict=True):
            for lane in lanes:
                _compare(lane, wanted, tolerance)
        for place, copies in self._variables.values():
            wanted = tf.raw_ops.ReadVariableOp(resource=self._given[place], dtype=copies[0].dtype)
            for copy in copies:
                _compare(copy.value(), wanted, tolerance)


def _compare(tensor: tf.Tensor, wanted: tf.Tensor, tolerance: float) -> None:
    if wanted.dtype in HANDLES:
        return
    if wanted.dtype.is_floating:
        tensor, wanted = tf.cast(tensor, tf.float64), tf.cast(wanted, tf.float64)
    array, right = np.asarray(tensor), np.asarray(wanted)
    assert array.shape == right.shape
    if right.dtype.kind in "fc":
        np.testing.assert_allclose(array, right, tolerance, tolerance / 10)
    else:
        np.testing.assert_array_equal(array, right)
