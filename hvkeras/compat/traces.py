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
    """The traces of the present ranks; others are renewed when they are called, as they contain ranks and sizes.

    Concrete functions, which have one trace, call their successors.
    """

    def __init__(self) -> None:
        self._present: weakref.WeakSet[Any] | None = None  # None if the ranks have never changed

    def outdate(self) -> None:
        """Outdates what was traced until now."""
        self._present = weakref.WeakSet()

    def outdates(self, function: Any) -> bool:
        """Whether a function was traced with other ranks."""
        return self._present is not None and function.graph not in self._present

    def traced(self, original: Callable[..., Any], args: Any, kwargs: Any, options: Any) -> Any:
        """Traces a function, or takes its trace if that is of the present ranks."""
        cache = options.function_cache
        if cache is not None and any(map(self.outdates, cache.values())):
            cache.clear()
        made = original(args, kwargs, options)
        if self._present is not None:
            self._present.add(made.graph)
        return made

    def renewable(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes a concrete function that can be made again."""
        made = original(function, *args, **kwargs)
        if not isinstance(made, _Renewable):
            args, kwargs = tf.nest.map_structure(
                lambda one: tf.TensorSpec.from_tensor(one) if isinstance(one, tf.Tensor) else one, (args, kwargs))
            adopt_class(made, _Renewable)
            made.renew = functools.partial(function.get_concrete_function, *args, **kwargs)
            made.traces = self
        return made


class _Renewable(concrete_function.ConcreteFunction):  # type: ignore[misc]  # TensorFlow ships no types
    """A concrete function that knows how it was asked for."""

    renew: Callable[[], Any]
    traces: Traces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.renew()(*args, **kwargs) if self.traces.outdates(self) else super().__call__(*args, **kwargs)


def renew_traces(anew: bool) -> None:
    """Makes TensorFlow trace functions again, when they are called next, once the ranks have changed.

    Args:
        anew: Whether they have, so that what was traced until now is traced again.
    """
    traces: Traces = patches.behaviour_of(patches.TRACES) or Traces()
    if anew:
        traces.outdate()
    patches.install(patches.TRACES, traces)
