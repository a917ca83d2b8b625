"""Functions that XLA compiles as parts of graphs: checks of compatibility, and compilation before the first run."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import compiler_ir
from tensorflow.python.framework import kernels

# XLA compiles these operations to nothing, so an optimizer's checks would silently be lost.
_DROPPED = ("Assert", "CheckNumerics", "CheckNumericsV2")
# XLA draws other random numbers than TensorFlow; those of stateful operations differ in each process.
_RANDOM = re.compile("(Stateless)?(Random|Truncated|Parameterized|Multinomial|Shuffle).*")
_ARGUMENTS = ("Placeholder", "_Arg", "_Retval")
_NO_WORK = ("ReadVariableOp", "Identity", "Const", *_ARGUMENTS)  # they do not compute
_DEVICE, _XLA_DEVICE = "/CPU:0", "XLA_CPU_JIT"


class CompiledFunction:
    """Function of tensors without results, which XLA compiles for the CPU.

    It is traced outside of the graph under construction, so that several graphs can call it and XLA compiles it once.

    Args:
        function: Takes a tensor for each spec. It may read and assign variables.
        specs: The dtypes and shapes of the tensors; the shapes must be known.
    """

    def __init__(self, function: Callable[..., Any], specs: Sequence[Any]) -> None:
        def without_results(*tensors: Any) -> None:
            function(*tensors)

        self._specs = list(specs)
        made = tf.function(without_results, autograph=False, jit_compile=True)
        with tf.init_scope():
            self._traced = made.get_concrete_function(*self._specs)
        graph_def = self._traced.graph.as_graph_def()
        functions = graph_def.library.function
        nodes = itertools.chain(graph_def.node, *(each.node_def for each in functions))
        self._graphs = [self._traced.graph, *(self._traced.graph._functions[each.signature.name].graph
                                              for each in functions)]
        inner = {*_ARGUMENTS, *(each.signature.name for each in functions)}
        self._operations = [node.op for node in nodes if node.op not in inner]
        self._digest = _digest(graph_def)

    def __call__(self, *tensors: Any) -> None:
        """Call the function in the graph under construction."""
        self.call_with({}, *tensors)

    def call_with(self, others: Mapping[int, Any], *tensors: Any) -> None:
        """Call the function in the graph under construction with substituted variables.

        Args:
            others: Handles to use instead of captured ones, by the `id` of the captured handle.
        """
        shaped = [tensor if tf.TensorShape(tensor.shape).is_fully_defined() else tf.ensure_shape(tensor, spec.shape)
                  for tensor, spec in zip(tensors, self._specs, strict=True)]
        with tf.device(_DEVICE):
            self._traced._call_flat(shaped, [others.get(id(one), one) for one in self._traced.captured_inputs])

    @property
    def captured(self) -> list[Any]:
        """Captured tensors, including the handles of all variables that the function reads or assigns."""
        return list(self._traced.captured_inputs)

    @property
    def size(self) -> int:
        """Number of operations."""
        return len(self._operations)

    @property
    def traffic(self) -> float:
        """Bytes of the results of all operations if they are not fused; infinite if some are conditional."""
        if len(self._graphs) > 1:
            return math.inf
        total = 0
        for operation in self._traced.graph.get_operations():
            if operation.type not in _NO_WORK:
                tensors = operation.outputs or list(operation.inputs)[1:]  # assignments have no outputs
                total += max(((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors), default=0)
        return total

    def equals(self, other: CompiledFunction) -> bool:
        """Return whether another function has the same operations and captures the same variables."""
        mine, others = self._traced.captured_inputs, other._traced.captured_inputs
        return (self._digest == other._digest and len(mine) == len(others)
                and all(one is another for one, another in zip(mine, others, strict=True)))

    def objection(self) -> str:
        """Return the reason why XLA cannot compile the function with unchanged semantics; "" if it can."""
        _register_kernels()
        for operation in dict.fromkeys(self._operations):
            if not _has_kernel(operation):
                return f"XLA does not have the operation {operation}"
            if operation in _DROPPED or _RANDOM.fullmatch(operation):
                return f"the operation {operation} does something else in XLA"
        for operation in itertools.chain.from_iterable(graph.get_operations() for graph in self._graphs):
            for tensor in operation.outputs:
                if tensor.dtype not in (tf.resource, tf.variant) and not tensor.shape.is_fully_defined():
                    return f"the operation {operation.type} has a result whose shape is not known before it runs"
        return ""

    def memory_to_compile(self) -> int:
        """Return the number of bytes that `compile` needs temporarily."""
        return sum(int(one.shape.num_elements() * tf.as_dtype(one.dtype).size)
                   for one in [*self._specs, *self._traced.variables])

    def compile(self) -> None:
        """Compile the function now by running it on zeros and on temporary variables.

        XLA caches the result by the function's name and shapes for all graphs that call the function.

        Raises:
            tf.errors.OpError: XLA cannot compile the function.
        """
        with tf.init_scope(), tf.device(_DEVICE):
            replaced = {id(one.handle): tf.Variable(tf.zeros(one.shape, one.dtype), trainable=False)
                        for one in self._traced.variables}
            captured = [replaced[id(one)].handle if id(one) in replaced else one
                        for one in self._traced.captured_inputs]

            def run(*tensors: Any) -> None:
                self._traced._call_flat(list(tensors), captured)

            zeros = [tf.zeros(spec.shape, spec.dtype) for spec in self._specs]
            try:
                tf.function(run, autograph=False).get_concrete_function(*self._specs)(*zeros)
            finally:
                for one in replaced.values():  # otherwise allocated until garbage collection
                    tf.raw_ops.AssignVariableOp(resource=one.handle, value=tf.zeros([0], one.dtype))

    def try_to_compile(self) -> None:
        """Verify that XLA can convert the function, without the memory that `compile` needs; discard the result.

        Raises:
            tf.errors.OpError: XLA cannot compile the function.
        """
        with tf.init_scope():
            compiler_ir.from_concrete_function(self._traced)(stage="hlo_serialized", platform_name="CPU")


def _digest(graph_def: Any) -> bytes:
    """Return a digest of a graph that is the same for each trace.

    Names of inner functions are replaced by numbers, and names of custom gradients are removed.
    """
    functions = {each.signature.name: each for each in graph_def.library.function}
    numbers: dict[str, str] = {}

    def rename(nodes: Sequence[Any]) -> None:
        for node in nodes:
            node.attr.pop("_gradient_op_type", None)
            for _, attribute in sorted(node.attr.items()):  # a map of arbitrary order
                for reference in (attribute.func, *attribute.list.func):
                    called = functions.get(reference.name)
                    if called is None:
                        continue
                    is_new = reference.name not in numbers
                    reference.name = numbers.setdefault(reference.name, f"function {len(numbers)}")
                    if is_new:
                        rename(called.node_def)

    rename(graph_def.node)
    for name, each in functions.items():
        each.signature.name = numbers.get(name, "")
    parts = sorted(each.SerializeToString(deterministic=True) for each in graph_def.library.function)
    graph_def.ClearField("library")
    return hashlib.sha256(b"".join([graph_def.SerializeToString(deterministic=True), *parts])).digest()


@functools.cache
def _register_kernels() -> None:
    """Have TensorFlow register XLA's kernels, as it does when it first compiles a function."""
    with tf.init_scope(), tf.device(_DEVICE):
        tf.function(lambda: tf.zeros([]), autograph=False, jit_compile=True)()


@functools.cache
def _has_kernel(operation: str) -> bool:
    found = kernels.get_registered_kernels_for_op(operation).kernel
    return any(kernel.device_type == _XLA_DEVICE for kernel in found)
