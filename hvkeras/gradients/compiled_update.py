"""The update of an optimizer, compiled by XLA within the training step.

On a CPU, an optimizer of Keras is a chain of small operations, each of which walks through all weights. XLA fuses them
into one pass, with the same results but for the last bits. Whether an update is compiled depends only on what is equal
on all ranks, and it is a part of the plan of the gradients, so that ranks that differ in it get an error
(docs/decisions/compiled-update.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.compat.compiling import CompiledFunction
from hvkeras.gradients.update_pieces import Piece, Specs, by_kind, whole
from hvkeras.host.console import prints_at, say
from hvkeras.host.memory import available
from hvkeras.job.state import current_job
from hvkeras.profiling import recorder

if TYPE_CHECKING:
    from hvkeras.gradients.distributed import Distributed

Apply = Callable[[list[Any]], Any]

# What "auto" compiles, as measured (docs/decisions/compiled-update.md): updates whose operations would move this many
# bytes if they ran one by one, in all and for each gradient. SGD goes through the weights 2 times, Adam 12 times.
LEAST_TRAFFIC, LEAST_TRAFFIC_EACH = 32 * 1024**2, 512 * 1024
LEAST_BYTES = 1024**2  # of dense gradients; for fewer, no optimizer is looked at
SLOW = 2.0  # seconds of compiling after which a line says so
MEMORY_SHARE = 0.25  # maximum share of the memory that is available, for compiling before the first step
DTYPES = (tf.float32, tf.float64)
DENSE = "_hvkeras_dense"  # the attribute of an optimizer that holds a `DenseUpdate` while it applies gradients


@dataclass(frozen=True)
class DenseUpdate:
    """What is done instead of Keras's loop over the variables that have dense gradients.

    Attributes:
        keys: The keys of these variables.
        update: Takes their gradients.
        decays: Whether it decays the variables as well.
    """

    keys: Sequence[Any]
    update: Callable[..., None]
    decays: bool


class CompiledUpdate:
    """Decides whether an optimizer's update is compiled, and compiles it.

    Args:
        wanted: The user's `compile_update`: "auto", True or False.
    """

    def __init__(self, wanted: bool | str) -> None:
        self._wanted = wanted
        self._functions: list[CompiledFunction] = []
        self._settled: dict[Hashable, str] = {}  # by gradients: why it is not compiled, as found out by tracing it
        self._told: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledUpdate:
        """A copied optimizer has variables of its own."""
        return CompiledUpdate(self._wanted)

    def __reduce__(self) -> Any:
        return CompiledUpdate, (self._wanted,)

    @graphs.unconverted
    def prepare(self, part: Distributed, optimizer: Any, apply: Apply, gradients: Sequence[Any],
                variables: Sequence[Any]) -> Apply | None:
        """Compiles the update for the step under construction, if it should be compiled.

        Args:
            part: The distributed optimizer.
            optimizer: The outermost optimizer: that one, or the `LossScaleOptimizer` around it.
            apply: Applies reduced gradients.
            gradients: This rank's gradients.
            variables: Their variables.

        Returns:
            What to call instead of `apply`; None if the update is not compiled.
        """
        wanted = current_job().settings.compile_update if self._wanted == "auto" else self._wanted
        if reason := _objection_to_place(wanted, part):
            self._plain(part, reason, "DEBUG")
            return None
        specs = part._hvkeras_exchange.specs_of_results(gradients, variables)
        dense = {place: spec for place, spec in enumerate(specs)
                 if isinstance(spec, tf.TensorSpec) and not compat.is_overwritten(variables[place])}
        is_whole = len(dense) == sum(spec is not None for spec in specs)
        known = tuple(dense.items())  # not more: a rank that joins the job later must decide alike
        update_dense = None if is_whole else part._hvkeras_dense_update()
        if reason := (_objection_to_gradients(wanted, dense, [compat.native(one) for one in variables])
                      or ("" if is_whole or update_dense else _SPARSE) or self._settled.get(known, "")):
            self._plain(part, reason, "WARNING" if wanted is True else "DEBUG")
            return None
        compat.build_optimizer(optimizer, variables)

        def update(*tensors: Any) -> None:
            by_place = dict(zip(dense, tensors, strict=True))
            with compat.summed(part):
                if update_dense is None:
                    apply([by_place.get(place) for place in range(len(specs))])
                else:
                    update_dense([(tensor, compat.native(variables[place])) for place, tensor in by_place.items()])

        of_one = part._hvkeras_update_of_one()

        def trace() -> list[Piece]:
            kinds = None if of_one is None else by_kind(of_one, part, dense, variables)
            return kinds or whole(update, dense)

        pieces, reason, level = self._compiled(part, trace, len(dense), wanted)
        if not pieces:
            self._settled[known] = reason
            self._plain(part, reason, level)
            return None
        self._tell(part, "DEBUG", f"the update of {_name(part)} is compiled: {len(dense)} gradients,"
                   f" {_size(pieces):,} operations{'' if is_whole else '; that of sparse gradients is not'}")
        return graphs.unconverted(_applying(part, apply, pieces, dense, variables, is_whole))

    def _compiled(self, part: Distributed, trace: Callable[[], list[Piece]], gradients: int,
                  wanted: bool | str) -> tuple[list[Piece], str, str]:
        """Returns the compiled pieces; or none, why there are none, and the level at which that is said."""
        try:
            pieces = trace()
        except Exception as error:  # noqa: BLE001 - a user's optimizer may raise anything, then in the plain update, too
            return [], _first_line(error), "WARNING"
        traffic = sum(piece.traffic for piece in pieces)
        if wanted == "auto" and traffic < max(LEAST_TRAFFIC, LEAST_TRAFFIC_EACH * gradients):
            return [], f"its operations move only {traffic / 1024**2:.3g} MiB for {gradients} gradients", "DEBUG"
        if failure := self._compile(part, pieces):
            return [], failure, "WARNING"
        known = [next(one for one in self._functions if one.equals(piece.function)) for piece in pieces]
        return [replace(piece, function=function) for piece, function in zip(pieces, known, strict=True)], "", ""

    def _compile(self, part: Distributed, pieces: Sequence[Piece]) -> str:
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
            self._tell(part, "WARNING", f"XLA compiles the update of {_name(part)} ({_size(pieces):,} operations)"
                       " before the first step (HVKERAS_COMPILE_UPDATE=off prevents that)")
            thread.join()
        recorder.recording().note_compilation(time.monotonic() - began)
        if not failures:
            self._functions += functions
        return "".join(failures)

    def _plain(self, part: Distributed, reason: str, level: str) -> None:
        self._tell(part, level, f"the update of {_name(part)} is not compiled: {reason}")

    def _tell(self, part: Distributed, level: str, text: str) -> None:
        """Prints a line once, on the first of the ranks that share the optimizer."""
        job = current_job()
        if text not in self._told and prints_at(job.settings, level):
            self._told.add(text)
            if job.topology.rank == part._hvkeras_exchange.process_set.members()[0]:
                say(text)


def _applying(part: Distributed, apply: Apply, pieces: Sequence[Piece], dense: Specs, variables: Sequence[Any],
              is_whole: bool) -> Apply:
    """Returns what to call instead of `apply`: it calls the compiled functions, and Keras for what they do not do."""
    of_one = pieces[0].is_of_one

    def update(*tensors: Any) -> None:
        by_place = dict(zip(dense, tensors, strict=True))
        for piece in pieces:
            for places, handles in piece.calls:
                piece.function.call_with(handles, *(by_place[place] for place in places))

    if is_whole and not of_one:
        return lambda reduced: update(*(reduced[place] for place in dense))
    instead = DenseUpdate([compat.variable_key(variables[place]) for place in dense], update, of_one)

    def apply_in_parts(reduced: list[Any]) -> Any:
        with compat.attribute(part, DENSE, instead):
            return apply(reduced)

    return apply_in_parts


_SPARSE = ("it has gradients that are sparse, or new values of variables, and only optimizers of Keras 3 itself can be"
           " updated in two parts")


def _objection_to_place(wanted: bool | str, part: Distributed) -> str:
    """Returns why nothing is compiled here, or ""."""
    if wanted is False:
        return "compile_update is off"
    if tf.executing_eagerly() or not graphs.of_functions():
        return "the step is not a function"
    if graphs.compiled_by_xla():
        return "XLA compiles the whole step"
    if graphs.under_tape():
        return "a gradient tape records it"
    if tf.distribute.has_strategy():
        return "a tf.distribute strategy is in effect"
    if compat.family_of(part) == compat.TF_KERAS_LEGACY:
        return "legacy optimizers use kernels that TensorFlow has fused already"
    return ""


def _objection_to_gradients(wanted: bool | str, dense: Specs, variables: Sequence[Any]) -> str:
    """Returns why these gradients are not applied by a compiled update, or ""."""
    size = 0
    for place, spec in dense.items():
        variable = variables[place]
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
    room = available()
    return room is None or function.memory_to_compile() * current_job().topology.local_size <= MEMORY_SHARE * room


def _size(pieces: Sequence[Piece]) -> int:
    return sum(piece.size for piece in pieces)


def _name(part: Distributed) -> str:
    return part._hvkeras_exchange.name


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
