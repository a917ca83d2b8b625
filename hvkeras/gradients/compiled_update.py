"""The update of an optimizer, compiled by XLA within the training step.

On a CPU, an optimizer of Keras is a chain of small operations, each of which walks through all weights. XLA fuses them
into one pass, with the same results but for the last bits. Whether an update is compiled depends only on what is equal
on all ranks, and it is a part of the plan of the gradients, so that ranks that differ in it get an error
(docs/decisions/compiled-update.md). `UpdateCompiler` decides it, asked by `choose_update` of each step.
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
from hvkeras.gradients.options import Options, ReductionOptions
from hvkeras.gradients.plain_update import DenseUpdate, PlainUpdate
from hvkeras.host.console import prints_at, say
from hvkeras.host.machine import available_memory
from hvkeras.job.session import current_session

Specs = Mapping[int, Any]  # the `tf.TensorSpec` of each dense gradient, by its index
UpdateOfOne = Callable[..., None]  # takes a gradient and its `variable`

# What "auto" compiles, as measured (docs/decisions/compiled-update.md): updates whose operations would move this many
# bytes if they ran one by one, in all and for each gradient. SGD goes through the weights 2 times, Adam 12 times.
LEAST_TRAFFIC, LEAST_TRAFFIC_EACH = 32 * 1024**2, 512 * 1024
LEAST_BYTES = 1024**2  # of dense gradients; for fewer, no optimizer is looked at
SLOW = 2.0  # seconds of compiling after which a line says so
MEMORY_SHARE = 0.25  # maximum share of the memory that is available_memory, for compiling before the first step
DTYPES = (tf.float32, tf.float64)


@dataclass(frozen=True)
class CompiledPart:
    """A function, and its calls in a step.

    Attributes:
        function: The function.
        calls: For each call the indices of the gradients that it takes, and the handles of the variables that it is
            for, by the ids of those that the function was traced with.
        is_of_one: Whether each call updates one variable, and decays it.
    """

    function: CompiledFunction
    calls: Sequence[tuple[Sequence[int], Mapping[int, Any]]]
    is_of_one: bool = False

    @property
    def size(self) -> int:
        """The number of operations that its calls replace."""
        return self.function.size * len(self.calls)

    @property
    def traffic(self) -> float:
        """The bytes that these operations would write."""
        return self.function.traffic * len(self.calls)


@dataclass(frozen=True)
class CompiledUpdate:
    """Calls the compiled functions, and Keras for what they do not do.

    Attributes:
        plain: Keras's own update.
        pieces: The functions.
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
        """Applies reduced gradients."""
        plain, is_of_one = self.plain, self.pieces[0].is_of_one
        if is_of_one or not self.is_built:
            keys = [compat.variable_key(plain.variables[index]) for index in self.dense]
            in_parts = replace(plain, dense=DenseUpdate(keys, self._update, is_of_one))
            with in_parts.applying(reduced):
                plain.finish(list(reduced))
        else:
            with plain.applying(reduced):
                self._update(*(reduced[index] for index in self.dense))
        # As the optimizers do themselves.
        return None if plain.options.family == compat.KERAS else plain.outer.iterations

    def _update(self, *tensors: Any) -> None:
        by_index = dict(zip(self.dense, tensors, strict=True))
        for piece in self.pieces:
            for indices, handles in piece.calls:
                piece.function.call_with(handles, *(by_index[index] for index in indices))


class UpdateCompiler:
    """Decides whether an optimizer's update is compiled, and compiles it; it knows what it has compiled.

    Args:
        wanted: The user's `compile_update`: "auto", True or False.
    """

    def __init__(self, wanted: bool | str) -> None:
        self._wanted = wanted
        self._functions: list[CompiledFunction] = []
        self._settled: dict[Hashable, str] = {}  # by gradients: why it is not compiled, as found out by tracing it
        self._said: set[str] = set()

    @graphs.without_autograph
    def compiled(self, plain: PlainUpdate, gradients: Sequence[Any]) -> CompiledUpdate | None:
        """Compiles the update for the step under construction, if it should be compiled.

        Args:
            plain: Keras's own update.
            gradients: This rank's gradients, not reduced yet.

        Returns:
            The compiled update; None if it is not compiled.
        """
        options, variables = plain.options, plain.variables
        wanted = current_session().settings.compile_update if self._wanted == "auto" else self._wanted
        if reason := _objection_to_context(wanted, options):
            self._say_plain(options, reason, "DEBUG")
            return None
        specs = _specs_of_results(options.exchange, gradients, variables)
        dense = {index: spec for index, spec in enumerate(specs)
                 if isinstance(spec, tf.TensorSpec) and not compat.is_overwritten(variables[index])}
        is_built = len(dense) == sum(spec is not None for spec in specs)
        known = tuple(dense.items())  # not more: a rank that joins the job later must decide alike
        update_dense = None if is_built else _update_of_dense(plain)
        if reason := (_objection_to_gradients(wanted, dense, [compat.as_tf_variable(one) for one in variables])
                      or ("" if is_built or update_dense else _SPARSE) or self._settled.get(known, "")):
            self._say_plain(options, reason, "WARNING" if wanted is True else "DEBUG")
            return None
        compat.build_optimizer(plain.outer, variables)

        def update(*tensors: Any) -> None:
            by_index = dict(zip(dense, tensors, strict=True))
            with compat.summed(plain.optimizer, plain):
                if update_dense is None:
                    plain.finish([by_index.get(index) for index in range(len(specs))])
                else:
                    update_dense([(tensor, compat.as_tf_variable(variables[index])) for index,
                                  tensor in by_index.items()])

        of_one = _update_of_one(plain)

        def trace() -> list[CompiledPart]:
            kinds = None if of_one is None else _by_kind(of_one, plain.optimizer, dense, variables)
            return kinds or [CompiledPart(CompiledFunction(update, list(dense.values())), [(list(dense), {})])]

        pieces, reason, level = self._compiled(options, trace, len(dense), wanted)
        if not pieces:
            self._settled[known] = reason
            self._say_plain(options, reason, level)
            return None
        self._say(options, "DEBUG", f"the update of {options.exchange.name} is compiled: {len(dense)} gradients,"
                  f" {_size(pieces):,} operations{'' if is_built else '; that of sparse gradients is not'}")
        return CompiledUpdate(plain, pieces, list(dense), is_built)

    def _compiled(self, options: Options, trace: Callable[[], list[CompiledPart]], gradients: int,
                  wanted: bool | str) -> tuple[list[CompiledPart], str, str]:
        """Returns the compiled pieces; or none, why there are none, and the level at which that is said."""
        try:
            pieces = trace()
        except Exception as error:  # noqa: BLE001 - a user's optimizer may raise anything, then in the plain update, too
            return [], _first_line(error), "WARNING"
        traffic = sum(piece.traffic for piece in pieces)
        if wanted == "auto" and traffic < max(LEAST_TRAFFIC, LEAST_TRAFFIC_EACH * gradients):
            return [], f"its operations move only {traffic / 1024**2:.3g} MiB for {gradients} gradients", "DEBUG"
        if failure := self._compile(options, pieces):
            return [], failure, "WARNING"
        known = [next(one for one in self._functions if one.equals(piece.function)) for piece in pieces]
        return [replace(piece, function=function) for piece, function in zip(pieces, known, strict=True)], "", ""

    def _compile(self, options: Options, pieces: Sequence[CompiledPart]) -> str:
        """Compiles the functions of an update that are not compiled already; returns why that failed, or ""."""
        functions = [piece.function for piece in pieces
                     if not any(one.equals(piece.function) for one in self._functions)]
        if not functions:
            return ""
        if objection := next(filter(None, (one.objection() for one in functions)), ""):
            return objection
        failures: list[str] = []

        def compile_all() -> None:
            try:
                for function in functions:
                    (function.compile if _has_memory_for(function) else function.try_to_compile)()
            except Exception as error:  # noqa: BLE001 - whatever XLA raises, the plain update works
                failures.append(_first_line(error))

        # This thread traces a function, and must not create variables in the meantime.
        thread, began = threading.Thread(target=compile_all, name="hvkeras-compile", daemon=True), time.monotonic()
        thread.start()
        thread.join(SLOW)
        if thread.is_alive():
            self._say(options, "WARNING", f"XLA compiles the update of {options.exchange.name}"
                      f" ({_size(pieces):,} operations) before the first step"
                      " (HVKERAS_COMPILE_UPDATE=off prevents that)")
            thread.join()
        recorder.recording().record_compilation(time.monotonic() - began)
        if not failures:
            self._functions += functions
        return "".join(failures)

    def _say_plain(self, options: Options, reason: str, level: str) -> None:
        self._say(options, level, f"the update of {options.exchange.name} is not compiled: {reason}")

    def _say(self, options: Options, level: str, text: str) -> None:
        """Prints a line once, on the first of the ranks that share the optimizer."""
        session = current_session()
        if text not in self._said and prints_at(session.settings, level):
            self._said.add(text)
            if session.topology.rank == options.exchange.process_set.members()[0]:
                say(text)


_SPARSE = ("it has gradients that are sparse, or new values of variables, and only optimizers of Keras 3 itself can be"
           " updated in two parts")


def _objection_to_context(wanted: bool | str, options: Options) -> str:
    """Returns why nothing is compiled here, or ""."""
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
    """Returns why these gradients are not applied by a compiled update, or ""."""
    size = 0
    for index, spec in dense.items():
        variable = variables[index]
        dtypes = {spec.dtype, tf.as_dtype(variable.dtype)}
        if not dtypes <= set(DTYPES):
            return f"a gradient or its variable is of {', '.join(sorted(one.name for one in dtypes))}"
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
    """Whether the ranks of this host can all compile a function before it runs."""
    room = available_memory()
    return room is None or function.memory_to_compile() * current_session().topology.local_size <= MEMORY_SHARE * room


def _size(pieces: Sequence[CompiledPart]) -> int:
    return sum(piece.size for piece in pieces)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _specs_of_results(exchange: ReductionOptions, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns what the reduced gradients will be: a `tf.TensorSpec`, a `tf.IndexedSlicesSpec` or None for each."""
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
    """Returns Keras's own function that updates variables from pairs of dense gradients and variables.

    None if it cannot be called for a part of the variables: a user's optimizer may count on being called for all of
    them, in their order.
    """
    optimizer, options = plain.optimizer, plain.options
    step = getattr(options.plain, "_distributed_tf_update_step", None)
    contains_others = options.scales_loss or hasattr(optimizer, "_inner_optimizers")
    if options.family != compat.KERAS or step is None or contains_others or not compat.is_of_keras(options.plain):
        return None
    return lambda pairs: step(optimizer, tf.distribute.get_strategy(), pairs, optimizer.learning_rate)


def _update_of_one(plain: PlainUpdate) -> UpdateOfOne | None:
    """Returns Keras's own function that updates one variable, by its dense gradient.

    None if the update of all variables is more than that of each.
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
    """Traces the update of one variable of each kind; variables of one shape and dtype are one kind.

    There are fewer functions to compile than variables, and a variable is updated as soon as its own gradient is
    reduced, while that is still in the processor's cache and others are on their way.

    Args:
        update: Updates one variable.
        optimizer: The optimizer, built.
        specs: The gradients.
        variables: The variables, by the same indices.

    Returns:
        A piece for each kind; None if variables have to do with each other.

    Raises:
        Exception: Whatever the optimizer raises.
    """
    groups = {index: compat.with_slots(optimizer, variables[index]) for index in specs}
    owners = {id(one.handle): index for index, group in groups.items() for one in group if one is not None}
    kinds: dict[Any, list[int]] = {}
    for index, spec in specs.items():
        shapes = tuple(None if one is None else (one.dtype, tuple(one.shape)) for one in groups[index])
        kinds.setdefault((spec, shapes, compat.is_decayed(optimizer, variables[index])), []).append(index)
    pieces = []
    for (spec, *_), indices in kinds.items():
        first = indices[0]
        function = CompiledFunction(functools.partial(update, variable=groups[first][0]), [spec])
        if any(owners.get(id(one), first) != first for one in function.captured):
            return None
        pieces.append(CompiledPart(function, [([index], _instead(groups[first], groups[index])) for index in indices],
                            is_of_one=True))
    return pieces


def _instead(first: Sequence[Any], own: Sequence[Any]) -> dict[int, Any]:
    """Returns the handles of a variable and its slots, by the ids of those of the first variable of its kind."""
    return {id(old.handle): new.handle for old, new in zip(first, own, strict=True) if old is not None}
