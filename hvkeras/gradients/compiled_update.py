"""Optimizer updates that XLA compiles within the training step.

On a CPU, an optimizer of Keras is a chain of small operations, and each of them reads and writes all weights. XLA fuses
them into one pass; results differ only in the last bits. The decision to compile depends only on values that are equal
on all ranks, and it is a part of the plan of the gradients, so a mismatch between ranks raises an error
(docs/decisions/compiled-update.md). `UpdateCompiler` makes it, called by `choose_update` in each step.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.compat.compiling import CompiledFunction
from hvkeras.diagnostics import recorder
from hvkeras.errors import summary
from hvkeras.gradients.options import Options, ReductionOptions
from hvkeras.gradients.plain_update import DenseUpdate, PlainUpdate
from hvkeras.host.console import prints_at, say
from hvkeras.host.machine import available_memory
from hvkeras.job.session import current_session

Specs = Mapping[int, Any]  # the `tf.TensorSpec` of each dense gradient, by its index
UpdateOfOne = Callable[..., None]  # takes a gradient and its `variable`

# Thresholds of "auto", from measurements (docs/decisions/compiled-update.md): bytes that the operations of an update
# would write if they ran one by one, in total and per gradient. SGD passes over the weights 2 times, Adam 12 times.
LEAST_TRAFFIC, LEAST_TRAFFIC_EACH = 32 * 1024**2, 512 * 1024
LEAST_BYTES = 1024**2  # of dense gradients; below this, updates are not even traced
SLOW = 2.0  # seconds of compilation after which a line is printed
MEMORY_SHARE = 0.25  # maximum share of the available memory for compiling before the first step
DTYPES = (tf.float32, tf.float64)


@dataclass(frozen=True)
class CompiledPart:
    """A compiled function, and its calls in a step.

    Attributes:
        calls: For each call, the indices of its gradients, and a map from the ids of the variable handles with which
            the function was traced to the handles of this call.
        is_of_one: Whether each call updates one variable, including weight decay.
    """

    function: CompiledFunction
    calls: Sequence[tuple[Sequence[int], Mapping[int, Any]]]
    is_of_one: bool = False

    @property
    def size(self) -> int:
        """Number of operations that the calls replace."""
        return self.function.size * len(self.calls)

    @property
    def traffic(self) -> float:
        """Bytes that these operations would write."""
        return self.function.traffic * len(self.calls)


@dataclass(frozen=True)
class CompiledUpdate:
    """Update that calls compiled functions, and Keras for the rest.

    Attributes:
        plain: Keras's own update.
        dense: The indices of the gradients that they apply.
        is_built: Whether these are all gradients.
    """

    plain: PlainUpdate
    pieces: Sequence[CompiledPart]
    dense: Sequence[int]
    is_built: bool
    text: str = "compiled update"
    shares: None = None

    @graphs.without_autograph
    def apply(self, reduced: Sequence[Any]) -> Any:
        """Apply reduced gradients."""
        plain, is_of_one = self.plain, self.pieces[0].is_of_one
        if is_of_one or not self.is_built:
            keys = [compat.variable_key(plain.variables[index]) for index in self.dense]
            in_parts = replace(plain, dense=DenseUpdate(keys, self._update, is_of_one))
            with in_parts.applying(reduced):
                plain.finish(list(reduced))
        else:
            with plain.applying(reduced):
                self._update(*(reduced[index] for index in self.dense))
        # The return values of the optimizers.
        return None if plain.options.family == compat.KERAS else plain.outer.iterations

    def _update(self, *tensors: Any) -> None:
        by_index = dict(zip(self.dense, tensors, strict=True))
        for piece in self.pieces:
            for indices, handles in piece.calls:
                piece.function.call_with(handles, *(by_index[index] for index in indices))


class UpdateCompiler:
    """Compiler of an optimizer's update, which decides whether to compile, and caches compiled functions.

    Args:
        wanted: The user's `compile_update`: "auto", True or False.
    """

    def __init__(self, wanted: bool | str) -> None:
        self._wanted = wanted
        self._functions: list[CompiledFunction] = []
        self._rejected: dict[Hashable, str] = {}  # by the specs of the gradients: reasons that tracing has found
        self._logged: set[str] = set()

    @graphs.without_autograph
    def compiled(self, plain: PlainUpdate, gradients: Sequence[Any]) -> CompiledUpdate | None:
        """Compile the update of the step under construction, if the user requests it, or if "auto" expects a speedup.

        Args:
            plain: Keras's own update.
            gradients: This rank's gradients, not reduced yet.

        Returns:
            The compiled update; None if it is not compiled.
        """
        options, variables = plain.options, plain.variables
        wanted = current_session().settings.compile_update if self._wanted == "auto" else self._wanted
        if reason := _objection_to_context(wanted, options):
            self._log_reason(options, reason, "DEBUG")
            return None
        specs = _specs_of_results(options.exchange, gradients, variables)
        dense = {index: spec for index, spec in enumerate(specs)
                 if isinstance(spec, tf.TensorSpec) and not compat.is_overwritten(variables[index])}
        is_built = len(dense) == sum(spec is not None for spec in specs)
        key = tuple(dense.items())  # nothing else: a rank that joins the job later must decide equally
        update_dense = None if is_built else _update_of_dense(plain)
        if reason := (_objection_to_gradients(wanted, dense, [compat.as_tf_variable(each) for each in variables])
                      or ("" if is_built or update_dense else _SPARSE) or self._rejected.get(key, "")):
            self._log_reason(options, reason, "WARNING" if wanted is True else "DEBUG")
            return None
        compat.build_optimizer(plain.outer, variables)

        def update(*tensors: Any) -> None:
            by_index = dict(zip(dense, tensors, strict=True))
            with compat.summed(plain.optimizer, plain):
                if update_dense is None:
                    plain.finish([by_index.get(index) for index in range(len(specs))])
                else:
                    update_dense([(tensor, compat.as_tf_variable(variables[index]))
                                  for index, tensor in by_index.items()])

        of_one = _update_of_one(plain)

        def trace() -> list[CompiledPart]:
            kinds = None if of_one is None else _by_kind(of_one, plain.optimizer, dense, variables)
            return kinds or [CompiledPart(CompiledFunction(update, list(dense.values())), [(list(dense), {})])]

        pieces, reason, level = self._compiled(options, trace, len(dense), wanted)
        if not pieces:
            self._rejected[key] = reason
            self._log_reason(options, reason, level)
            return None
        self._log(options, "DEBUG", f"the update of {options.exchange.name} is compiled: {len(dense)} gradients,"
                  f" {_size(pieces):,} operations{'' if is_built else '; that of sparse gradients is not'}")
        return CompiledUpdate(plain, pieces, list(dense), is_built)

    def _compiled(self, options: Options, trace: Callable[[], list[CompiledPart]], gradients: int,
                  wanted: bool | str) -> tuple[list[CompiledPart], str, str]:
        """Return the compiled functions; or none, the reason, and the level at which to log it."""
        try:
            pieces = trace()
        except Exception as error:  # noqa: BLE001 - from a user's optimizer, whose plain update then raises it again
            return [], summary(error), "WARNING"
        traffic = sum(piece.traffic for piece in pieces)
        if wanted == "auto" and traffic < max(LEAST_TRAFFIC, LEAST_TRAFFIC_EACH * gradients):
            return [], f"its operations move only {traffic / 1024**2:.3g} MiB for {gradients} gradients", "DEBUG"
        if failure := self._compile(options, pieces):
            return [], failure, "WARNING"
        cached = [next(each for each in self._functions if each.equals(piece.function)) for piece in pieces]
        return [replace(piece, function=function) for piece, function in zip(pieces, cached, strict=True)], "", ""

    def _compile(self, options: Options, pieces: Sequence[CompiledPart]) -> str:
        """Compile the functions of an update that are not cached; return why that failed, or ""."""
        functions = [piece.function for piece in pieces
                     if not any(cached.equals(piece.function) for cached in self._functions)]
        if not functions:
            return ""
        if objection := next(filter(None, (function.objection() for function in functions)), ""):
            return objection
        failures: list[str] = []

        def compile_all() -> None:
            try:
                for function in functions:
                    (function.compile if _has_memory_for(function) else function.try_to_compile)()
            except Exception as error:  # noqa: BLE001 - whatever XLA raises, the plain update works
                failures.append(summary(error))

        # In another thread: this one is tracing a function, in which compiling must not create variables.
        thread, began = threading.Thread(target=compile_all, name="hvkeras-compile", daemon=True), time.monotonic()
        thread.start()
        thread.join(SLOW)
        if thread.is_alive():
            self._log(options, "WARNING", f"XLA compiles the update of {options.exchange.name}"
                      f" ({_size(pieces):,} operations) before the first step"
                      " (HVKERAS_COMPILE_UPDATE=off prevents that)")
            thread.join()
        recorder.recording().record_compilation(time.monotonic() - began)
        if not failures:
            self._functions += functions
        return "".join(failures)

    def _log_reason(self, options: Options, reason: str, level: str) -> None:
        self._log(options, level, f"the update of {options.exchange.name} is not compiled: {reason}")

    def _log(self, options: Options, level: str, text: str) -> None:
        """Print a line once, on the first rank of the optimizer's process set."""
        session = current_session()
        if text not in self._logged and prints_at(session.settings, level):
            self._logged.add(text)
            if session.topology.rank == options.exchange.process_set.members()[0]:
                say(text)


_SPARSE = ("it has gradients that are sparse, or new values of variables, and only optimizers of Keras 3 itself can be"
           " updated in two parts")


def _objection_to_context(wanted: bool | str, options: Options) -> str:
    """Return why updates are not compiled in this context, or ""."""
    if wanted is False:
        return "compile_update is off"
    if tf.executing_eagerly() or not graphs.from_function_graphs():
        return "the step is not a function"
    if graphs.compiled_by_xla():
        return "XLA compiles the whole step"
    if graphs.under_tape():
        return "a gradient tape records it"
    if tf.distribute.has_strategy():
        return "a tf.distribute strategy is in effect"
    if options.family == compat.TF_KERAS_LEGACY:
        return "legacy optimizers use kernels that TensorFlow has fused already"
    return ""


def _objection_to_gradients(wanted: bool | str, dense: Specs, variables: Sequence[Any]) -> str:
    """Return why an update with these gradients is not compiled, or ""."""
    size = 0
    for index, spec in dense.items():
        variable = variables[index]
        dtypes = {spec.dtype, tf.as_dtype(variable.dtype)}
        if not dtypes <= set(DTYPES):
            return f"a gradient or its variable is of {', '.join(sorted(dtype.name for dtype in dtypes))}"
        if isinstance(variable, tf.distribute.DistributedValues) or not variable.device.endswith("CPU:0"):
            return f"a variable is on {variable.device or 'an unknown device'}"
        if not spec.shape.is_fully_defined():
            return "the shape of a gradient is not known"
        size += spec.shape.num_elements() * spec.dtype.size
    if not size:
        return "it has no dense gradients"
    if wanted == "auto" and size < LEAST_BYTES:
        return f"its dense gradients have only {size:,} bytes"
    return ""


def _has_memory_for(function: CompiledFunction) -> bool:
    # All ranks of this host compile at the same time.
    free = available_memory()
    return free is None or function.memory_to_compile() * current_session().topology.local_size <= MEMORY_SHARE * free


def _size(pieces: Sequence[CompiledPart]) -> int:
    return sum(piece.size for piece in pieces)


def _specs_of_results(exchange: ReductionOptions, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the spec of each reduced gradient: a `tf.TensorSpec`, a `tf.IndexedSlicesSpec` or None."""
    process_set = exchange.process_set
    becomes_dense = exchange.sparse_as_dense and len(process_set.members()) > 1 and process_set.included()

    def spec(gradient: Any, variable: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices) and not becomes_dense:
            return tf.IndexedSlicesSpec(gradient.shape, gradient.dtype)
        given = tf.TensorShape(getattr(gradient, "shape", None))
        shape = given.merge_with(variable.shape) if given.is_compatible_with(variable.shape) else None
        return tf.TensorSpec(shape, getattr(gradient, "dtype", variable.dtype))

    return [spec(*pair) for pair in zip(gradients, variables, strict=True)]


def _update_of_dense(plain: PlainUpdate) -> Callable[[list[Any]], Any] | None:
    """Return Keras's function that updates variables from pairs of dense gradients and variables.

    None if it cannot be called for some of the variables: a user's optimizer may rely on being called for all of them,
    in order.
    """
    optimizer, options = plain.optimizer, plain.options
    step = getattr(options.plain, "_distributed_tf_update_step", None)
    contains_others = options.scales_loss or hasattr(optimizer, "_inner_optimizers")
    if options.family != compat.KERAS or step is None or contains_others or not compat.is_of_keras(options.plain):
        return None
    return lambda pairs: step(optimizer, tf.distribute.get_strategy(), pairs, optimizer.learning_rate)


def _update_of_one(plain: PlainUpdate) -> UpdateOfOne | None:
    """Return a function that updates one variable with its dense gradient, including weight decay.

    None if the update of all variables is not equivalent to separate updates of each.
    """
    update, decay = _update_of_dense(plain), getattr(plain.options.plain, "_apply_weight_decay", None)
    if update is None or decay is None or not compat.updates_one_by_one(plain.optimizer, plain.options.plain,
                                                                         plain.is_clipped):
        return None

    def update_of_one(gradient: Any, variable: Any) -> None:
        decay(plain.optimizer, [variable])
        update([(gradient, variable)])

    return update_of_one


def _by_kind(update: UpdateOfOne, optimizer: Any, specs: Specs, variables: Sequence[Any]) -> list[CompiledPart] | None:
    """Trace the update of one variable of each kind; variables of the same shape and dtype are one kind.

    There are fewer functions to compile than variables. And each variable is updated as soon as its gradient is
    reduced, while the gradient is still in the CPU cache and other gradients are in flight.

    Args:
        update: Updates one variable.
        specs: The specs of the gradients, by index.

    Returns:
        A part for each kind; None if the update of a variable uses slots of another variable.

    Raises:
        Exception: Any error of the optimizer.
    """
    groups = {index: compat.with_slots(optimizer, variables[index]) for index in specs}
    owners = {id(slot.handle): index for index, group in groups.items() for slot in group if slot is not None}
    kinds: dict[Any, list[int]] = {}
    for index, spec in specs.items():
        shapes = tuple(None if slot is None else (slot.dtype, tuple(slot.shape)) for slot in groups[index])
        kinds.setdefault((spec, shapes, compat.is_decayed(optimizer, variables[index])), []).append(index)
    pieces = []
    for (spec, *_), indices in kinds.items():
        first = indices[0]
        function = CompiledFunction(functools.partial(update, variable=groups[first][0]), [spec])
        if any(owners.get(id(handle), first) != first for handle in function.captured):
            return None
        calls = [([index], _handles(groups[first], groups[index])) for index in indices]
        pieces.append(CompiledPart(function, calls, is_of_one=True))
    return pieces


def _handles(traced: Sequence[Any], own: Sequence[Any]) -> dict[int, Any]:
    """Return the handles of a variable and its slots, by the ids of the handles in the traced function."""
    return {id(old.handle): new.handle for old, new in zip(traced, own, strict=True) if old is not None}
