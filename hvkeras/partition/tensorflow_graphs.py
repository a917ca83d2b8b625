"""What the partitioner needs of TensorFlow's graphs and that TensorFlow's public interface does not give."""

from __future__ import annotations

import contextlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import func_graph, function_def_to_graph
from tensorflow.python.ops import handle_data_util

FuncGraph = func_graph.FuncGraph
# Folders of installed packages, of Python's own, and of this one, wherever it is.
_PACKAGES = (*set(sysconfig.get_paths().values()), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def function_named(graph: Any, name: str) -> Any:
    """Return the graph of a function that operations of a graph call.

    Args:
        graph: The graph.
        name: Name of the function.
    """
    found = _found(graph, name)
    if found is None:
        raise KeyError(f"The graph must know the function. Received: graph={graph.name}, function={name}")
    return found


def _found(graph: Any, name: str) -> Any:
    owner = graph
    while owner is not None:
        found = owner._get_function(name)
        if found is not None:
            if not hasattr(found, "graph"):  # made by `Defun`, as those of `tf.nn.ctc_loss`
                with owner.as_default():
                    found.graph = function_def_to_graph.function_def_to_graph(found.definition)
            return found.graph
        owner = getattr(owner, "outer_graph", None)
    return None


def called(graph: Any, operation: Any) -> Any:
    """Return the graph of the function that an operation calls; None if it is no call, or of what XLA must compile."""
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return _found(graph, operation.type)  # a call of what `Defun` made has its name as type
    return None if is_compiled(operation) else function_named(graph, operation.node_def.attr["f"].func.name)


def is_compiled(operation: Any) -> bool:
    """Return whether an operation calls a function that XLA must compile."""
    return bool(operation.node_def.attr["_XlaMustCompile"].b)


def attributes(operation: Any) -> dict[str, Any]:
    """Return the attributes of an operation, as protocol buffers, without those that TensorFlow adds for itself."""
    return {name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")}


def copied(operation: Any, inputs: Sequence[tf.Tensor], replaced: dict[str, Any] | None = None) -> Any:
    """Return a copy of an operation in the current graph.

    Args:
        operation: The operation.
        inputs: Its inputs in the current graph.
        replaced: Attributes that differ.
    """
    graph = tf.compat.v1.get_default_graph()
    made = graph._create_op_internal(
        operation.type, list(inputs), [output.dtype for output in operation.outputs], name=operation.name,
        attrs={**attributes(operation), **(replaced or {})}, op_def=operation.op_def)
    if operation.device:
        made._set_device(operation.device)
    if operation.type != "Const":  # which cannot fail
        locate(made, operation)
    for output, original in zip(made.outputs, operation.outputs, strict=True):
        if output.dtype == tf.resource:  # TensorFlow derives the shape of a list's elements, here of a rank's parts
            copy_handle(original, output)
    return made


def called_again(operation: Any, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the results of the function that an operation calls, called in the current graph.

    Args:
        operation: The operation, which calls a function that XLA must compile.
        inputs: Its inputs in the current graph.
    """
    graph, name = tf.compat.v1.get_default_graph(), operation.node_def.attr["f"].func.name
    owner = operation.graph
    while graph._get_function(name) is None:
        if (found := owner._get_function(name)) is not None:
            graph._add_function_recursive(found)
        owner = owner.outer_graph
    return list(copied(operation, inputs, {"_XlaMustCompile": operation.node_def.attr["_XlaMustCompile"]}).outputs)


def reads_batches(graph: Any) -> bool:
    """Return whether a function reads batches itself, or calls a function that does."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op.startswith("IteratorGetNext") or node.op == "OptionalGetValue" for node in nodes)


def locate(made: Any, original: Any) -> None:
    """Let errors of an operation show the user's lines that made another one."""
    stack = original.traceback
    if stack is not None:
        pywrap_tf_session.TF_SetOpStackTrace(made._c_op, stack.get_user_frames()[:])


def user_line(operation: Any) -> str:
    """Return the line that made an operation, such as "train.py:12 in loss"; empty if it is not known.

    It is the innermost one outside of installed packages, or else the innermost one outside of TensorFlow.
    """
    stack = getattr(operation, "traceback", None)
    frames = [] if stack is None else list(stack.get_user_frames())
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGES)] or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""


def copy_handle(original: tf.Tensor, copy: tf.Tensor) -> None:
    """Let the copy of a resource or a variant know the variable, or the elements of the list, that it stands for."""
    data = _handle_data(original)
    if data is not None:
        handle_data_util.set_handle_data(copy, data)


def handle(tensor: tf.Tensor) -> tuple[tf.DType, tf.TensorShape] | None:
    """Return type and shape of the variable, or of the elements of the list, that a tensor stands for, if known."""
    data = _handle_data(tensor)
    if data is None or not data.shape_and_type:
        return None
    known = data.shape_and_type[0]
    return tf.dtypes.as_dtype(known.dtype), tf.TensorShape(known.shape)


def _handle_data(tensor: tf.Tensor) -> Any:
    if tensor.dtype not in (tf.resource, tf.variant):
        return None
    data = getattr(tensor, "_handle_data", None)
    if data is None and tf.is_symbolic_tensor(tensor):
        data = handle_data_util.get_resource_handle_data(tensor)
    return data if data is not None and data.is_set else None


def stacked(tensors: tf.Tensor, element_shape: tf.Tensor, element_type: tf.DType) -> tf.Tensor:
    """Return the elements of a list behind one another."""
    return tf.raw_ops.TensorListStack(input_handle=tensors, element_shape=element_shape, element_dtype=element_type,
                                      num_elements=-1)


def list_of(tensor: tf.Tensor) -> tf.Tensor:
    """Return the list whose elements lie behind one another in a tensor."""
    return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=tf.constant(-1))


def constant(operation: Any) -> np.ndarray:
    """Return the value of a `Const` operation."""
    return np.asarray(tf.make_ndarray(operation.get_attr("value")))


@contextlib.contextmanager
def building(name: str) -> Iterator[Any]:
    """Create operations in a new graph of a function; yield it."""
    graph = FuncGraph(name)
    with graph.as_default():
        yield graph
