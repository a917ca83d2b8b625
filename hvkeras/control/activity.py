"""This rank's activity (its phase, step and callback), and whether it makes progress.

A callback before all others updates the state in `fit`, `evaluate` and `predict` (`hvkeras.training.fit_hooks`), at a
cost of less than a microsecond per step. Everything else, such as the running callback, is looked up on request. Keras
fetches a step's batch inside its compiled function, which counts the batches that have arrived. While the calls
outnumber the batches, the running call waits for its input.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from hvkeras.host.forks import detach_in_children

TRAIN, TEST, PREDICT = "train", "test", "predict"
_TRACING = "func_graph_from_py_func"  # TensorFlow's function in whose frame tracing happens
_FETCHING = os.path.join("data", "ops", "iterator_ops.py")  # TensorFlow's file in which eager code waits for a batch


@dataclass(frozen=True)
class Doing:
    """The activity of a rank.

    Attributes:
        phase: `train`, `validation`, `evaluation`, `prediction`, `callback`, `input` or `outside`.
        text: A description of the phase, with step and epoch.
        may_end: True if the job may end when the rank makes no further progress.
        within: True inside a Keras loop.
        lacks_batch: True if it waits for data, or may do so.
    """

    phase: str
    text: str
    may_end: bool
    within: bool = True
    lacks_batch: bool = False


class Loop:
    """A running `fit`, `evaluate` or `predict`.

    Args:
        kind: `TRAIN`, `TEST` or `PREDICT`.
        outer: The loop in which it was called, or None.
        code: The code of the function that makes the call.
    """

    def __init__(self, kind: str, model: Any, outer: Loop | None, code: CodeType) -> None:
        self.kind, self.outer, self.code = kind, outer, code
        self.model = weakref.ref(model)
        self.thread = threading.get_ident()
        self.epoch: int | None = None
        self.step: int | None = None
        self.ends_epoch = False  # the callbacks at the end of an epoch run
        self.stepping = False  # a step has begun, and the steps have not ended since
        self.calls = 0  # calls of that function since the last reset
        self.first = True  # no call has completed yet
        self.batches = batches()

    def reset_counts(self) -> None:
        """Reset the counts of calls and batches together, after calls that may have found no batch."""
        self.calls, self.batches = 0, batches()


class _Process:
    """State of this process."""

    loop: Loop | None = None
    moves = 0
    fetched = 0  # number of batches in eager mode
    graph_counter: Any = None  # the variable that counts batches in graphs


_counted: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose functions count their batches


@contextlib.contextmanager
def running(kind: str, model: Any) -> Iterator[None]:
    """Context manager around a running `fit`, `evaluate` or `predict`.

    Args:
        kind: `TRAIN`, `TEST` or `PREDICT`.
    """
    outer = _Process.loop
    _Process.loop = Loop(kind, model, outer, sys._getframe(2).f_code)  # the frame of the `with` statement
    _Process.moves += 1
    try:
        yield
    finally:
        _Process.loop = outer
        _Process.moves += 1
        if outer is not None:
            outer.reset_counts()


def begin_steps() -> None:
    """Record that the callbacks at the beginning of a loop run."""
    if _Process.loop is not None:
        _Process.loop.reset_counts()
        _Process.moves += 1


def begin_epoch(epoch: int) -> None:
    """Record that the callbacks at the beginning of an epoch run."""
    loop = _Process.loop
    if loop is not None:
        loop.epoch, loop.step, loop.stepping, loop.ends_epoch = epoch, None, False, False
        loop.reset_counts()
        _Process.moves += 1


def begin_step(step: int) -> None:
    """Record that the callbacks at the beginning of a step run, and then the step."""
    loop = _Process.loop
    if loop is not None:
        if loop.step is not None:
            loop.first = False
        loop.step, loop.stepping = step, True
        loop.calls += 1
        _Process.moves += 1


def end_steps() -> None:
    """Record that the loop has left its steps, for now."""
    loop = _Process.loop
    if loop is not None:
        loop.ends_epoch = loop.stepping = False
        _Process.moves += 1


def end_epoch() -> None:
    """Record that the callbacks at the end of an epoch run."""
    loop = _Process.loop
    if loop is not None:
        loop.ends_epoch, loop.stepping, loop.first = True, False, False
        _Process.moves += 1


def ends_epoch() -> bool:
    """Return whether the callbacks at the end of an epoch run now."""
    return _Process.loop is not None and _Process.loop.ends_epoch


def counting(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a step function so that it counts its batch as soon as the batch arrives.

    Args:
        model: The model to which the function belongs.
        step: The step function. It takes a batch, and is called in graphs and eagerly.
    """
    _counted.add(model)

    def counted(batch: Any) -> Any:
        _count(batch)
        return step(batch)

    return counted


def _count(batch: Any) -> None:
    import tensorflow as tf

    from hvkeras.compat import graphs  # noqa: PLC0415 - imports TensorFlow

    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        return  # each replica would count the batch
    if tf.executing_eagerly():
        _Process.fetched += 1
        return
    if _Process.graph_counter is None:
        _Process.graph_counter = graphs.persistent_variable(0, tf.int64, "hvkeras_batches")
    tensors = [tensor for tensor in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(tensor)]
    with tf.control_dependencies(tensors):
        _Process.graph_counter.assign_add(1)


def batches() -> int:
    """Return the number of batches that have reached Keras's functions in this process."""
    return _Process.fetched + (0 if _Process.graph_counter is None else int(_Process.graph_counter.numpy()))


def moves() -> int:
    """Return a counter that grows whenever Keras's loops make progress; it does not include batches."""
    return _Process.moves


def thread() -> int:
    """Return the thread to observe: that of the running `fit`, else the main thread."""
    loop = _Process.loop
    return loop.thread if loop is not None else threading.main_thread().ident or 0


def instructions() -> tuple[tuple[int, int], ...]:
    """Return the current instruction of each frame of the thread; unchanged while the innermost call lasts."""
    return tuple((id(frame.f_code), frame.f_lasti) for frame in frames_of(thread()))


def doing(steps: str = "") -> Doing:
    """Return the current activity of this rank.

    Args:
        steps: A description of what a custom training loop has done so far.
    """
    loop, frames = _Process.loop, frames_of(thread())
    tracing = any(frame.f_code.co_name == _TRACING for frame in frames)
    fetching = any(frame.f_code.co_filename.endswith(_FETCHING) for frame in frames)
    if loop is None:
        phase, where = ("input", "input, outside of fit") if fetching else ("outside", "outside of fit")
        return Doing(phase, where + steps, False, False, fetching)
    where = _step(loop)
    callback = _callback(frames, loop)
    if callback:
        return Doing("callback", f"callback {callback}, {where}", not tracing)
    if tracing:
        return Doing(_phase(loop), f"{where}, being traced", False)
    waits = fetching or (loop.stepping and _waits_for_batch(loop))
    if waits:
        return Doing("input", f"input, the batch of {where}", True, lacks_batch=True)
    where += ", or its input" if waits is None else ""
    # The first call may compile, however long that takes; with XLA, any other call may as well.
    compiles = loop.first or bool(getattr(loop.model(), "jit_compile", False))
    may_end = loop.step is not None and not (loop.stepping and compiles)
    return Doing(_phase(loop), where, may_end, lacks_batch=waits is None)


class _CollectorDisabled:
    """Context manager that disables Python's garbage collector while stacks are read, which creates objects.

    Finalizers let other threads run, so that the stack changes (a crash), or `sys._current_frames`, which holds the
    interpreter's lock of threads, deadlocks: https://github.com/python/cpython/issues/106883.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._was_on = False
        detach_in_children(self)

    def in_child(self) -> None:
        """Restore the collector, if another thread had disabled it at the moment of the fork."""
        if self._lock.locked() and self._was_on:
            gc.enable()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *failure: object) -> None:
        if self._was_on:
            gc.enable()
        self._lock.release()


_collector_disabled = _CollectorDisabled()


def frames_of(ident: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first."""
    # All of this runs in C, so that no other thread runs in between. If the thread continued meanwhile, the stack would
    # be corrupt; Python 3.11 even returned objects that are not frames as `f_back`.
    innermost = map(operator.itemgetter(ident), itertools.starmap(sys._current_frames, [()]))
    found: collections.deque[Any] = collections.deque()
    # AttributeError: None after the last frame; KeyError: the thread has ended
    with _collector_disabled, contextlib.suppress(AttributeError, KeyError):
        found.extend(itertools.accumulate(itertools.chain(innermost, itertools.repeat("f_back")), getattr))
    return [frame for frame in found if isinstance(frame, FrameType)]


def all_threads() -> list[int]:
    """Return the identifiers of all threads that run Python."""
    with _collector_disabled:
        return list(sys._current_frames())


def _waits_for_batch(loop: Loop) -> bool | None:
    """Return whether the running call still lacks its batch; None if uncounted, or if a call runs several steps."""
    from hvkeras import compat  # noqa: PLC0415 - imports TensorFlow

    model = loop.model()
    if model is None or model not in _counted or compat.steps_per_execution(model) > 1:
        return None
    return batches() - loop.batches < loop.calls


def _phase(loop: Loop) -> str:
    if loop.kind == TEST:
        return "evaluation" if _enclosing_fit(loop) is None else "validation"
    return "train" if loop.kind == TRAIN else "prediction"


def _enclosing_fit(loop: Loop) -> Loop | None:
    outer = loop.outer
    return outer if outer is not None and outer.kind == TRAIN and outer.model() is loop.model() else None


def _step(loop: Loop) -> str:
    """Format a step, counting from one as Keras's progress bar does."""
    fit = loop if loop.kind == TRAIN else _enclosing_fit(loop)
    epoch = "" if fit is None or fit.epoch is None else f" of epoch {fit.epoch + 1}"
    phase = _phase(loop)
    if loop.step is None:
        return f"{phase}, before the first step{epoch}"
    return f"{phase} step {loop.step + 1}{epoch}"


def _callback(frames: list[FrameType], loop: Loop) -> str:
    """Return the callback that runs in a loop, such as `Checkpoint.on_epoch_end`; "" if none does.

    If the callback cannot be identified, return the name of the hook alone.
    """
    found = ""
    for frame in itertools.takewhile(lambda frame: frame.f_code is not loop.code, frames):
        code = frame.f_code
        if code.co_name.startswith("on_") and code.co_varnames:
            owner = type(frame.f_locals.get(code.co_varnames[0]))
            if any(base.__name__ == "CallbackList" for base in owner.__mro__):
                return found or code.co_name
            if hasattr(owner, "set_model"):
                found = found or f"{owner.__name__}.{code.co_name}"
    return ""
