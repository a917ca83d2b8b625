"""What is asked of TensorFlow's graphs and strategies beyond their public API."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util, control_flow_util_v2
from tensorflow.python.util import tf_stack

from hvkeras.errors import UnsupportedError, explain

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted(function: Function) -> Function:
    """Has AutoGraph leave a function of ours as it is, with all that it calls.

    It has no control flow that depends on tensors; converting it takes seconds of a user's first step.
    """
    return cast(Function, tf.autograph.experimental.do_not_convert(function))


def require_kernels(backend: Any) -> None:
    """Raises UnsupportedError when the backend has no collectives for the graph under construction."""
    if backend.objection_to_sessions and not tf.executing_eagerly() and not of_functions():
        raise UnsupportedError(explain(f"The backend {backend.name!r} has no collectives for sessions of TensorFlow 1:"
                                       f" {backend.objection_to_sessions}", "HVKERAS_BACKEND=native or horovod"))
    if compiled_by_xla() and not backend.supports_xla:
        raise UnsupportedError(explain(f"Collectives of the backend {backend.name!r} cannot be compiled by XLA:"
                                       f" {backend.objection_to_xla}",
                                       "pass jit_compile=False to compile() or tf.function()", jit_compile=True))


def compiled_by_xla() -> bool:
    """Whether the graph under construction goes to XLA."""
    return not tf.executing_eagerly() and bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def of_functions() -> bool:
    """Whether the graph under construction is run by eager code, and not by a session of TensorFlow 1."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def eagerly() -> Any:
    """A context in which this thread executes eagerly, even where `tf.compat.v1.disable_eager_execution` was called."""
    return eager_context.eager_mode()


def lasting_variable(value: Any, dtype: Any, name: str, shape: Any = None) -> Any:
    """Makes a variable on the CPU that belongs to no graph, though one may be under construction.

    A `tf.function` that is traced again may make no variables, not even by `tf.init_scope`. What forbids it belongs to
    the thread, so another thread makes it.
    """
    made: list[Any] = []

    def make() -> None:
        with eagerly(), tf.device("/CPU:0"):
            made.append(tf.Variable(value, dtype=dtype, trainable=False, name=name, shape=shape))

    maker = threading.Thread(target=make, name="hvkeras-variable")
    maker.start()
    maker.join()
    return made[0]


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.custom_gradient`, of which nothing is left when the graph is gone.

    TensorFlow registers the gradient of each call in a graph under a name of its own, and for ever; it holds the graph.
    Here the graph's operation holds it instead.

    Args:
        function: Returns results and a function of their gradients, as for `tf.custom_gradient`.
    """
    differentiable = tf.custom_gradient(function)

    @functools.wraps(function)
    def call(*tensors: Any) -> Any:
        results = differentiable(*tensors)
        if not tf.executing_eagerly():
            for result in tf.nest.flatten(results):
                _hold_gradient(result.op)
        return results

    return call


def _hold_gradient(operation: Any) -> None:
    name = operation.node_def.attr["_gradient_op_type"].s.decode()
    if name in ops.gradient_registry.list():
        operation._gradient_function = ops.gradient_registry.lookup(name)
        del ops.gradient_registry._registry[name]


class OrderHandles:
    """Resources without content, by key: TensorFlow puts into one order what touches the same resource in a function.

    Only the functions that capture one keep it.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def of(self, key: str) -> Any:
        """The handle of a key's resource, to be captured by the function under construction.

        Args:
            key: What is kept in order.
        """
        handle = self._handles.get(key)
        if handle is None:
            handle = lasting_variable(0, tf.int32, "hvkeras_order").handle
            self._handles[key] = handle
        return handle


class FunctionCounter:
    """A count that functions raise as they run, and that tells when the last of these functions is gone.

    Functions capture an alias of the variable's handle, which nobody else keeps.
    """

    def __init__(self) -> None:
        self._variable = lasting_variable(0, tf.int64, "hvkeras_entries")
        self._alias: Callable[[], Any] = lambda: None

    def count_one(self) -> Any:
        """An operation of the function under construction that adds one."""
        alias = self._alias()
        if alias is None:
            with tf.init_scope(), tf.device("/CPU:0"):
                alias = tf.identity(self._variable.handle)
            self._alias = weakref.ref(alias)
        return tf.raw_ops.AssignAddVariableOp(resource=alias, value=tf.constant(1, tf.int64))

    @property
    def is_captured(self) -> bool:
        """Whether any function is left that counts."""
        return self._alias() is not None

    def read(self) -> int:
        """The count."""
        return int(self._variable.numpy())


def now() -> Any:
    """The time in seconds since the epoch, once all is done that controls it.

    TensorFlow puts whatever asks for the time in a function into one order, and collectives with it. This has no part
    in that order.
    """
    with tf.device("CPU:0"):
        time = tf.timestamp()
    if not tf.executing_eagerly():
        run_independently(time.op)
    return time


def run_independently(operation: Any) -> None:
    """Takes an operation out of the order in which a function runs what has side effects.

    Args:
        operation: A symbolic operation; None, as of operations without results in eager mode, for nothing.
    """
    manager = getattr(ops.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None and operation is not None:
        manager.run_independently(operation)


def iterator_class() -> Any:
    """The class of what `iter(dataset)` makes, without making one: that would start TensorFlow's devices."""
    return iterator_ops.OwnedIterator


def under_tape() -> bool:
    """Whether a gradient tape is recording in this thread."""
    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def function_graph() -> Any:
    """The function under construction, which branches and bodies of conditions and loops belong to; None if eager."""
    if tf.executing_eagerly():
        return None
    graph = ops.get_default_graph()
    while isinstance(graph, _CONTROL_FLOW_GRAPHS):
        graph = graph.outer_graph
    return graph


def in_loop() -> bool:
    """Whether the graph under construction is a loop's body, or a function that is called there."""
    graph = None if tf.executing_eagerly() else ops.get_default_graph()
    while graph is not None and not isinstance(graph, control_flow_util_v2.WhileBodyFuncGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def traced_stack() -> list[tuple[str, int, str]] | None:
    """The stack of this thread while a graph is under construction, the innermost frame first: file, line, function.

    Lines are the user's where AutoGraph runs what it made of them. None in eager mode, where Python's frames say it.
    """
    if tf.executing_eagerly():
        return None
    return [(frame.filename, frame.lineno, frame.name) for frame in reversed(tf_stack.extract_stack())]


def count_in_graph(content: str) -> int:
    """How often `content` was already counted in the function under construction; 0 in eager mode.

    The branches and bodies of conditions and loops count with the function that they are in.
    """
    graph = function_graph()
    if graph is None:
        return 0
    if not hasattr(graph, "_hvkeras_counts"):
        graph._hvkeras_counts = {}
    counts: dict[str, int] = graph._hvkeras_counts
    counts[content] = counts.get(content, -1) + 1
    return counts[content]


_CONTROL_FLOW_GRAPHS = (
    control_flow_util_v2.CondBranchFuncGraph,
    control_flow_util_v2.WhileCondFuncGraph,
    control_flow_util_v2.WhileBodyFuncGraph,
)


def reducing_strategy(model: Any = None) -> Any:
    """The user's `tf.distribute` strategy if it reduces gradients itself, else None.

    Args:
        model: Where given, the strategy that it was made under counts, whatever is in force.
    """
    own = getattr(model, "distribute_strategy", None)
    strategy = tf.distribute.get_strategy() if own is None else own
    return strategy if strategy.num_replicas_in_sync > 1 or spans_workers(strategy) else None


def spans_workers(strategy: Any) -> bool:
    """Whether a strategy reduces over several processes; None does not."""
    return strategy is not None and bool(strategy.extended._in_multi_worker_mode())
