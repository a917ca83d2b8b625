"""Access to TensorFlow's graphs and strategies beyond their public API."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.data.util import structure
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util, control_flow_util_v2
from tensorflow.python.util import tf_stack

Function = TypeVar("Function", bound=Callable[..., Any])


def without_autograph(function: Function) -> Function:
    """Exclude a function of hvkeras, and everything that it calls, from conversion by AutoGraph.

    The function must not have control flow that depends on tensors. Conversion would add seconds to the first step.
    """
    return cast(Function, tf.autograph.experimental.do_not_convert(function))


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Python function that AutoGraph converts when it is called."""
    enabled = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
    return cast(Callable[..., Any], autograph.convert(recursive=True, user_requested=True,
                                                      conversion_ctx=enabled)(function))


def unconverted() -> Any:
    """Return a context in which TensorFlow does not convert functions."""
    return ag_ctx.ControlStatusCtx(status=ag_ctx.Status.DISABLED)


def traced(wrapper: Any) -> Callable[..., Any]:
    """Return a Python function for a stage of `tf.data`, which calls what another stage has traced.

    Args:
        wrapper: The other stage's `StructuredFunctionWrapper`.
    """
    def call(*element: Any) -> Any:
        given = element if type(wrapper._input_structure) is tuple else element[0]
        results = wrapper.function(*structure.to_tensor_list(wrapper._input_structure, given))
        return structure.from_compatible_tensor_list(wrapper.output_structure, list(results))

    return without_autograph(call)


def operations_of(wrapper: Any) -> list[list[Any]]:
    """Return the `NodeDef`s of a function of `tf.data`, and those of each function that it calls.

    Args:
        wrapper: The function's `StructuredFunctionWrapper`.
    """
    definition = wrapper.function.graph.as_graph_def()
    return [list(definition.node), *(list(function.node_def) for function in definition.library.function)]


def compiled_by_xla() -> bool:
    """Return whether XLA will compile the graph under construction."""
    return not tf.executing_eagerly() and bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


@contextlib.contextmanager
def outside_of_xla() -> Iterator[None]:
    """Enter a scope whose functions are not compiled, even while one that XLA compiles is being called eagerly."""
    graph = ops.get_default_graph()
    before = graph._get_control_flow_context()
    graph._set_control_flow_context(None)
    try:
        yield
    finally:
        graph._set_control_flow_context(before)


def from_function_graphs() -> bool:
    """Return whether the graph under construction belongs to a `tf.function` instead of a TensorFlow 1 session."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def eagerly() -> Any:
    """Return a context in which this thread executes eagerly, even after `tf.compat.v1.disable_eager_execution`."""
    return eager_context.eager_mode()


def persistent_variable(value: Any, dtype: Any, name: str, shape: Any = None) -> Any:
    """Create a CPU variable outside of all graphs, even while a graph is under construction.

    A `tf.function` must not create variables when it is retraced, even inside `tf.init_scope`. This restriction is per
    thread, so another thread creates the variable.
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
    """Return a `tf.custom_gradient` that does not leak its graph.

    TensorFlow permanently registers the gradient of each call in a graph under a unique name, which keeps the graph
    alive. Here the graph's operation holds the gradient instead.

    Args:
        function: Returns results and a gradient function, as for `tf.custom_gradient`.
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
    """Dummy resources by key: within a function, TensorFlow runs all operations on the same resource in order.

    Resources are kept alive only by the functions that capture them.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def of(self, key: str) -> Any:
        """Return the handle of a key's resource, for the function under construction to capture.

        Args:
            key: Identifies the operations to keep in order.
        """
        handle = self._handles.get(key)
        if handle is None:
            handle = persistent_variable(0, tf.int32, "hvkeras_order").handle
            self._handles[key] = handle
        return handle


class FunctionCounter:
    """Counter that functions increment at run time, and that detects when the last of these functions was deleted.

    Functions capture an alias of the variable's handle, which nothing else keeps alive.
    """

    def __init__(self) -> None:
        self._variable = persistent_variable(0, tf.int64, "hvkeras_entries")
        self._alias: Callable[[], Any] = lambda: None

    def count_one(self) -> Any:
        """Add an operation that increments the counter to the function under construction, and return it."""
        alias = self._alias()
        if alias is None:
            with tf.init_scope(), tf.device("/CPU:0"):
                alias = tf.identity(self._variable.handle)
            self._alias = weakref.ref(alias)
        return tf.raw_ops.AssignAddVariableOp(resource=alias, value=tf.constant(1, tf.int64))

    @property
    def is_captured(self) -> bool:
        """True if any function that increments the counter still exists."""
        return self._alias() is not None

    def read(self) -> int:
        """Return the value."""
        return int(self._variable.numpy())


def now() -> Any:
    """Return the time in seconds since the epoch, once all its control dependencies have run.

    TensorFlow orders all operations of a function that read the time, together with collectives. This operation is
    excluded from that order.
    """
    with tf.device("CPU:0"):
        time = tf.timestamp()
    if not tf.executing_eagerly():
        run_independently(time.op)
    return time


def first_of(tensors: Iterable[Any]) -> list[Any]:
    """Return a list of the one tensor that the graph under construction computes first; empty if there is none.

    TensorFlow numbers operations in the order of their creation, which follows the backward pass.
    """
    if tf.executing_eagerly():
        return []
    graph = ops.get_default_graph()
    here = [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor) and tensor.graph is graph]
    return [min(here, key=lambda tensor: tensor.op._id)] if here else []


def source_of(tensor: Any) -> Any:
    """Return the symbolic tensor that others are only another name of, as those of a custom gradient are."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def marked_identity(tensors: Sequence[Any], mark: str, number: int) -> list[Any]:
    """Return tensors of the graph under construction through an operation with a mark.

    Args:
        mark: Name of an attribute, which begins with an underscore.
        number: Its value.
    """
    results = tf.raw_ops.IdentityN(input=list(tensors))
    results[0].op._set_attr(mark, attr_value_pb2.AttrValue(i=number))
    return list(results)


def handle_for(dataset: Any) -> Any:
    """Return a handle for an iterator over a dataset, which is not initialized."""
    return tf.raw_ops.AnonymousIteratorV3(output_types=structure.get_flat_tensor_types(dataset.element_spec),
                                          output_shapes=structure.get_flat_tensor_shapes(dataset.element_spec))


def handle_of_iterator(iterator: Any) -> Any:
    """Return the handle by which functions refer to an iterator of `tf.data`."""
    return iterator._iterator_resource


# oneDNN merges these with the BiasAddGrad of the same input, without regard to control dependencies.
_MERGED_WITH_BIAS = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")


def run_in_stages(starts: Sequence[Any]) -> None:
    """Keep the graph under construction from computing ahead of operations that start something in the background.

    TensorFlow runs operations that are ready in any order. A thread that has computed what the next gradient needs goes
    on with that, and may leave everything else for the end: other gradients, and the operations that start to reduce
    them. After this function, what the first of the operations does not need runs after it, and so on.

    Args:
        starts: The operations, in any order.
    """
    if len(starts) < 2:
        return
    depth: dict[Any, int] = {}  # length of the longest path to an operation
    for operation in ops.get_default_graph().get_operations():  # in the order of their creation
        depth[operation] = 1 + max((depth.get(one, 0) for one in _before(operation)), default=0)
    seen: set[Any] = set()
    previous: list[Any] = []
    for start in sorted(starts, key=lambda operation: depth[operation]):
        stage: set[Any] = set()
        pending = [start]
        while pending:
            operation = pending.pop()
            if operation in seen:
                continue
            seen.add(operation)
            stage.add(operation)
            pending.extend(_before(operation))
            if operation.type == "BiasAddGrad":
                pending.extend(one for one in operation.inputs[0].consumers() if one.type in _MERGED_WITH_BIAS)
        for operation in stage if previous else ():
            if operation.inputs and stage.isdisjoint(_before(operation)):
                operation._add_control_inputs(previous)
        previous = [start]


def _before(operation: Any) -> list[Any]:
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def run_independently(operation: Any) -> None:
    """Exclude an operation from the order in which a function runs operations with side effects.

    Args:
        operation: A symbolic operation; None is ignored (in eager mode, operations without results return it).
    """
    manager = getattr(ops.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None and operation is not None:
        manager.run_independently(operation)


def under_tape() -> bool:
    """Return whether a gradient tape is recording in this thread."""
    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def is_part_of_gradient(function: Any) -> bool:
    """Return whether TensorFlow has made a function for a gradient, which an eager tape computes by a second one."""
    return bool(tf.compat.as_str(function.name).startswith(("__forward_", "__backward_")))


def captures_of(function: Any) -> int:
    """Return how many of the last arguments of a function of TensorFlow are captured by it."""
    return len(function.function_type.captures or {})


def compiles(function: Any) -> bool:
    """Return whether XLA compiles a function of TensorFlow."""
    return bool(function.cached_definition.attr["_XlaMustCompile"].b)


def called_by(function: Any) -> Callable[..., Any]:
    """Return what runs a concrete function on flat tensors: a function of these."""
    atomic = function._inference_function
    return lambda call, tensors: call(atomic, *tensors, *function.captured_inputs)


def function_graph() -> Any:
    """Return the function under construction that encloses all branches and loop bodies; None in eager mode."""
    if tf.executing_eagerly():
        return None
    graph = ops.get_default_graph()
    while isinstance(graph, _CONTROL_FLOW_GRAPHS):
        graph = graph.outer_graph
    return graph


def in_loop() -> bool:
    """Return whether the graph under construction is a loop body, or a function called in one."""
    graph = None if tf.executing_eagerly() else ops.get_default_graph()
    while graph is not None and not isinstance(graph, control_flow_util_v2.WhileBodyFuncGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def traced_stack() -> list[tuple[str, int, str]] | None:
    """Return this thread's stack while a graph is under construction, innermost frame first: file, line, function.

    Lines refer to the user's source even if AutoGraph has converted it. Returns None in eager mode, where Python's
    frames suffice.
    """
    if tf.executing_eagerly():
        return None
    return [(frame.filename, frame.lineno, frame.name) for frame in reversed(tf_stack.extract_stack())]


_counts: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()  # by function


def count_in_graph(content: str) -> int:
    """Return the number of earlier calls with `content` in the function under construction; 0 in eager mode.

    Branches and bodies of conditions and loops count towards the enclosing function.
    """
    graph = function_graph()
    if graph is None:
        return 0
    counts = _counts.setdefault(graph, {})
    counts[content] = counts.get(content, -1) + 1
    return counts[content]


_CONTROL_FLOW_GRAPHS = (
    control_flow_util_v2.CondBranchFuncGraph,
    control_flow_util_v2.WhileCondFuncGraph,
    control_flow_util_v2.WhileBodyFuncGraph,
)


def reducing_strategy(model: Any = None) -> Any:
    """Return the user's `tf.distribute` strategy if it reduces gradients itself, else None.

    Args:
        model: If given, the strategy under which it was created takes precedence over the current one.
    """
    own = getattr(model, "distribute_strategy", None)
    strategy = tf.distribute.get_strategy() if own is None else own
    return strategy if strategy.num_replicas_in_sync > 1 or spans_workers(strategy) else None


def spans_workers(strategy: Any) -> bool:
    """Return whether a strategy reduces over several processes; False for None."""
    return strategy is not None and bool(strategy.extended._in_multi_worker_mode())
