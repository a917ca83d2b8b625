"""Adapters between patched functions and the behaviour of their group, used by the rows of `hvkeras.compat.patches`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hvkeras.compat.optimizers import reduces_elsewhere
from hvkeras.compat.strategies import summed

# Takes the original attribute (None where a row adds it), the group's behaviour and the attribute's name; returns the
# replacement.
Make = Callable[[Any, Any, str], Any]


def calls(adapted: Callable[..., Any], name: str = "") -> Make:
    """Return a factory of replacements that call an adapter.

    Args:
        adapted: The adapter: takes a function of the behaviour, the original and the arguments.
        name: The name of the behaviour's function; "" if the behaviour itself is the function.
    """

    def make(original: Any, behaviour: Any, _: str) -> Any:
        function = getattr(behaviour, name) if name else behaviour

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return adapted(function, original, *args, **kwargs)

        return patched

    return make


def around(name: str) -> Make:
    """Return a factory of replacements that call a behaviour's function with the original and the arguments."""
    return lambda original, behaviour, _: _calling(original, getattr(behaviour, name))


def repaired(function: Callable[..., Any]) -> Make:
    """Return a factory of replacements that call a function with the original and the arguments."""
    return lambda original, *_: _calling(original, function)


def _calling(original: Any, function: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return patched


def given(_: Any, behaviour: Any, __: str) -> Any:
    """Return the behaviour as the replacement."""
    return behaviour


def implemented(_: Any, behaviour: Any, name: str) -> Any:
    """Return the behaviour's function of the attribute's name as the replacement."""
    return getattr(behaviour, name)


def never(_: Any, __: Any, ___: str) -> Any:
    """Return a property that is False whatever is assigned to it."""
    return property(lambda _: False, lambda _, __: None)


def global_state(original: Any, behaviour: Any, _: str) -> Any:
    """Return Keras's global state as its module for distributions sees it: the behaviour gets each distribution."""

    def set_global_attribute(name: str, value: Any) -> None:
        behaviour.set_distribution(value)
        original.set_global_attribute(name, value)

    return SimpleNamespace(get_global_attribute=original.get_global_attribute,
                           set_global_attribute=set_global_attribute)


def always(value: Any) -> Make:
    """Return a factory that replaces any attribute by a value."""
    return lambda *_: value


def data(seen_as: type) -> Make:
    """Return a factory of replacements that pass data to the behaviour once Keras has prepared them.

    Args:
        seen_as: The class that wraps the prepared data: `KerasData` or `TfKerasData`.
    """

    def ready(data: Any, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        data(seen_as(self))

    return calls(ready, "data")


def stop_training(_: Any, behaviour: Any, name: str) -> Any:
    """Return the property `stop_training`.

    TensorFlow skips assignments that do not change an attribute's value, so models may lack the attribute.
    """

    def read(model: Any) -> bool:
        agreed: bool = behaviour.stop_training(model, bool(model.__dict__.get(name, False)))
        return agreed

    def write(model: Any, value: bool) -> None:
        model.__dict__[name] = value

    return property(read, write)


def stepped(step: Any, original: Any, self: Any, function: Any) -> Any:
    """Return the step function of one batch."""
    return step(self, original(self, function))


def reduced(combine: Any, original: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    """Reduce a loss, and combine it with those of other ranks."""
    loss = original(values, *args, **kwargs)
    if values.shape.rank == 0:
        return loss
    reduction = kwargs.get("reduction", args[-1] if args else "sum_over_batch_size")
    weights = kwargs.get("sample_weight", args[0] if len(args) > 1 else None)
    return combine(loss, "none" if reduction is None else str(reduction), weights, values)


_MEANS = ("auto", "mean", "sum_over_batch_size")


def masked(weigh: Any, original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    """Apply a mask to the weights of a loss in Keras 3."""
    weights = original(sample_weight, mask, dtype, reduction)
    return weights if mask is None or reduction not in _MEANS else weigh(weights, mask)


def masked_by_tf_keras(weigh: Any, original: Any, losses: Any, sw: Any, mask: Any, reduction: Any) -> Any:
    """Apply a mask to the weights of a loss in tf_keras."""
    weights = original(losses, sw, mask, reduction)
    return weights if mask is None or reduction not in _MEANS else weigh(weights, mask)


def moments_of_operation(moments: Any, original: Any, x: Any, axes: Any, keepdims: bool) -> Any:
    """Compute the moments of `keras.ops.moments`."""
    return moments(lambda: original(x, axes, keepdims), x, axes, keepdims, None)


def moments_of_layer(behaviour: Any, original: Any, self: Any, inputs: Any, mask: Any = None) -> Any:
    """Compute the moments of a layer of Keras 3."""

    def own() -> Any:
        return original(self, inputs, mask)

    if not behaviour.synchronizes(self):
        return own()
    return behaviour.moments(own, inputs, self._reduction_axes, False, mask)


def moments_of_tf_keras(behaviour: Any, original: Any, self: Any, inputs: Any, reduction_axes: Any, keep_dims: bool,
                        mask: Any = None) -> Any:
    """Compute the moments of a layer of tf_keras."""

    def own() -> Any:
        return original(self, inputs, reduction_axes, keep_dims, mask=mask)

    if not behaviour.synchronizes(self):
        return own()
    return behaviour.moments(own, inputs, reduction_axes, keep_dims, mask)


def with_flag(original: Callable[..., Any], self: Any) -> Any:
    """Return the configuration of tf_keras's BatchNormalization including `synchronized`."""
    config = original(self)
    is_plain = type(self).__name__ == "BatchNormalization" and type(self).__module__.startswith("tf_keras.")
    return {**config, "synchronized": True} if is_plain and self.synchronized else config


def scaled_step(around: Any, original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Run a step of Keras 3's `LossScaleOptimizer`."""
    variables = self._trainable_variables if trainable_variables is None else trainable_variables
    return around(lambda reduced, over=trainable_variables: original(self, reduced, over), self, grads, variables)


def scaled_step_of_tf_keras(around: Any, original: Any, self: Any, grads_and_vars: Any, *args: Any,
                            **kwargs: Any) -> Any:
    """Run a step of a `LossScaleOptimizer` of tf_keras."""
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    if reduces_elsewhere(kwargs):
        return original(self, pairs, *args, **kwargs)

    def finish(reduced: Any, over: Any = variables) -> Any:
        return original(self, list(zip(reduced, over, strict=True)), *args, **kwargs)

    return around(finish, self, [gradient for gradient, _ in pairs], variables)


def unreduced(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute scaled gradients without reducing them in the inner optimizer."""
    with summed(self.inner_optimizer):
        return original(self, *args, **kwargs)


def xla(refuses: Callable[[], bool], original: Any, self: Any) -> Any:
    """Resolve `jit_compile="auto"`."""
    resolved = original(self)
    return False if resolved and refuses() else resolved


def timed(on_call: Any, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Create the train function, wrapped in a `TimedFunction`."""
    made = original(self, *args, **kwargs)
    if self.train_function is not None and not isinstance(self.train_function, TimedFunction):
        self.train_function = TimedFunction(self.train_function, on_call)
    return made if made is None else self.train_function  # tf_keras uses the return value


class TimedFunction:
    """Train function that reports the time of each call; other attributes are those of the wrapped function.

    Args:
        on_call: Takes the begin and end of a call in seconds since the epoch, and its return value.
    """

    def __init__(self, function: Any, on_call: Callable[[float, float, Any], None]) -> None:
        self._function, self._on_call = function, on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        began = time.time()
        logs = self._function(*args, **kwargs)
        self._on_call(began, time.time(), logs)
        return logs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_function", "_on_call"):  # not set yet in a copy
            raise AttributeError(name)
        return getattr(self._function, name)


def shuffled(decide: Any, original: Any, self: Any, x: Any, *args: Any, shuffle: bool = False, **kwargs: Any) -> Any:
    """Initialize a data adapter with the `shuffle` that the behaviour decides."""
    return original(self, x, *args, shuffle=decide(x, shuffle), **kwargs)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""
