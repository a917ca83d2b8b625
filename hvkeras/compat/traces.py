"""Functions of TensorFlow that are retraced after a membership change of an elastic job."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function

from hvkeras.compat import patches
from hvkeras.compat.families import adopt_class


class Traces:
    """Traces of the current membership. Others contain outdated ranks and sizes, and are retraced when called.

    Outdated concrete functions, which have a single trace, call a retraced one.
    """

    def __init__(self) -> None:
        self._current: weakref.WeakSet[Any] | None = None  # None if the ranks have never changed

    def outdate(self) -> None:
        """Mark all existing traces as outdated."""
        self._current = weakref.WeakSet()

    def outdates(self, function: Any) -> bool:
        """Return whether a function was traced with another membership."""
        return self._current is not None and function.graph not in self._current

    def traced(self, original: Callable[..., Any], args: Any, kwargs: Any, options: Any) -> Any:
        """Return a function's trace, retraced if it is outdated; wraps TensorFlow's `_maybe_define_function`."""
        cache = options.function_cache
        if cache is not None and any(map(self.outdates, cache.values())):
            cache.clear()
        made = original(args, kwargs, options)
        if self._current is not None:
            self._current.add(made.graph)
        return made

    def renewable(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Create a concrete function that can be retraced; wraps `get_concrete_function`."""
        made = original(function, *args, **kwargs)
        if not isinstance(made, _Renewable):
            args, kwargs = tf.nest.map_structure(
                lambda one: tf.TensorSpec.from_tensor(one) if isinstance(one, tf.Tensor) else one, (args, kwargs))
            adopt_class(made, _Renewable)
            made.renew = functools.partial(function.get_concrete_function, *args, **kwargs)
            made.traces = self
        return made


class _Renewable(concrete_function.ConcreteFunction):  # type: ignore[misc]  # TensorFlow ships no types
    """Concrete function that can be traced again with its original arguments."""

    renew: Callable[[], Any]
    traces: Traces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.renew()(*args, **kwargs) if self.traces.outdates(self) else super().__call__(*args, **kwargs)


def renew_traces(membership_changed: bool) -> None:
    """Have TensorFlow retrace functions on their next call after a membership change.

    Args:
        membership_changed: Whether the membership has just changed, so that all existing traces are outdated.
    """
    traces: Traces = patches.behaviour_of(patches.TRACES) or Traces()
    if membership_changed:
        traces.outdate()
    patches.install(patches.TRACES, traces)
