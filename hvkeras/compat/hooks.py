"""Hooks into Keras and TensorFlow, each installed once, and subclasses that Keras treats like their base class."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function, polymorphic_function, tracing_compilation

from hvkeras.compat.families import KERAS, loaded_families
from hvkeras.compat.models import is_synchronized
from hvkeras.compat.optimizers import reduces_elsewhere
from hvkeras.compat.summing import summed


def subclass_like(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    """Returns a subclass of `mixin` and `base` that is saved under the name of `base`; one for equal attributes."""
    key = (base, mixin, *sorted(attributes.items(), key=itemgetter(0)))
    try:
        found = _made.get(key)
    except TypeError:  # of what a user passed, such as a compressor, not all can be hashed
        return _made_subclass(base, mixin, attributes)
    return found or _made.setdefault(key, _made_subclass(base, mixin, attributes))


# Objects that are alike have one class, as a saved optimizer and the loaded one in a plain Keras. Keras keeps what it
# knows the names of, so that these tables would grow, too.
_made: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def _made_subclass(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    exported = {name: base.__dict__[name] for name in ("_keras_api_names", "_keras_api_names_v1")
                if name in base.__dict__}  # tf_keras looks up its public names here
    made: type = type(base)(base.__name__, (mixin, base), {**namespace, **exported, **attributes})
    for module, tables in _NAMES_BY_CLASS:
        if module in sys.modules:
            for table in tables:
                names = getattr(sys.modules[module], table, {})
                if base in names:
                    names[made] = names[base]
    return made


# Tables in which Keras looks up the public name of a class that it saves. Without entries for subclasses, the file
# would refer to Keras's private modules, which move between versions.
_NAMES_BY_CLASS = (
    ("keras.src.api_export", ("REGISTERED_OBJS_TO_NAMES",)),
    ("keras.src.saving.object_registration", ("GLOBAL_CUSTOM_NAMES",)),
    ("tf_keras.src.saving.object_registration", ("_GLOBAL_CUSTOM_NAMES",)),
)


def adopt_class(instance: Any, cls: type) -> None:
    """Turns an existing object into an instance of a subclass, bypassing the `__setattr__` of optimizers."""
    object.__setattr__(instance, "__class__", cls)


def hook(cls: Any, method: str, replacement: Callable[..., Any]) -> bool:
    """Replaces a method with `replacement(original, self, *args, **kwargs)`, once for each such function.

    Args:
        cls: The class, whose subclasses inherit the hook unless they override the method; or a module.
        method: The method's name.
        replacement: The function to run instead; it may call `original(self, ...)`.

    Returns:
        Whether the class has that method.
    """
    original = getattr(cls, method, None)
    if original is None:
        return False
    function = getattr(replacement, "func", replacement)  # unwraps a functools.partial
    name = f"{function.__module__}.{function.__qualname__}"
    before: frozenset[str] = getattr(original, "_hvkeras_hook", frozenset())
    if name not in before:

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, self, *args, **kwargs)

        hooked._hvkeras_hook = before | {name}  # type: ignore[attr-defined]
        _hooked.append((cls, method, cls.__dict__.get(method)))
        setattr(cls, method, hooked)
    return True


# Class, method name, and the class's own former attribute (None if it was inherited); the latest hook is last.
_hooked: list[tuple[Any, str, Any]] = []


def unhook_all() -> None:
    """Restores the original methods of all hooked classes."""
    while _hooked:
        cls, method, own = _hooked.pop()
        if own is None:
            delattr(cls, method)  # it was inherited
        else:
            setattr(cls, method, own)


def hook_loss_scale(family: str, around: Callable[..., Any]) -> None:
    """Runs `around(original, optimizer, gradients, variables)` before the finite check of `LossScaleOptimizer`.

    Args:
        family: The family whose `LossScaleOptimizer` is hooked.
        around: Takes a function that finishes the step with the gradients passed to it (and their variables, if those
            are others), the `LossScaleOptimizer`, the gradients and their variables.
    """
    if family == KERAS:
        import keras

        hook(keras.optimizers.LossScaleOptimizer, "apply", functools.partial(_keras_step, around))
        return
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    for cls in (loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3):
        hook(cls, "apply_gradients", functools.partial(_tf_keras_step, around))


def hook_scaled_gradients() -> None:
    """Makes tf_keras's `LossScaleOptimizer`s get unreduced gradients of their inner optimizer: they are scaled."""
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    def compute(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        with summed(self.inner_optimizer):
            return original(self, *args, **kwargs)

    hook(loss_scale_optimizer.LossScaleOptimizer, "_compute_gradients", compute)
    hook(loss_scale_optimizer.LossScaleOptimizerV3, "compute_gradients", compute)


def _keras_step(around: Callable[..., Any], original: Callable[..., Any], self: Any, grads: Any,
                trainable_variables: Any = None) -> Any:
    variables = self._trainable_variables if trainable_variables is None else trainable_variables
    return around(lambda reduced, over=trainable_variables: original(self, reduced, over), self, grads, variables)


def _tf_keras_step(around: Callable[..., Any], original: Callable[..., Any], self: Any, grads_and_vars: Any,
                   *args: Any, **kwargs: Any) -> Any:
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    if reduces_elsewhere(kwargs):
        return original(self, pairs, *args, **kwargs)
    def finish(reduced: Any, over: Any = variables) -> Any:
        return original(self, list(zip(reduced, over, strict=True)), *args, **kwargs)

    return around(finish, self, [gradient for gradient, _ in pairs], variables)


def hook_jit_compile(refuse: Callable[[], bool]) -> None:
    """Makes Keras 3 resolve `jit_compile="auto"` to False while `refuse()` returns True."""
    import keras

    def resolve(original: Callable[..., Any], self: Any) -> Any:
        resolved = original(self)
        return False if resolved and refuse() else resolved

    hook(keras.Model, "_resolve_auto_jit_compile", resolve)


def hook_moments(family: str, around: Callable[..., Any]) -> None:
    """Makes Keras compute the moments of a batch by `around` where they are to be those of all replicas.

    Args:
        family: The family whose `BatchNormalization` is hooked; in Keras 3, `keras.ops.moments` is as well.
        around: Takes a function that computes mean and variance as Keras does, the inputs, the axes to reduce over,
            whether the results keep these axes, and the mask or None; returns mean and variance.
    """
    if family == KERAS:
        import keras
        from keras.src.backend.tensorflow import nn

        def of_operation(original: Callable[..., Any], x: Any, axes: Any, keepdims: bool) -> Any:
            return around(lambda: original(x, axes, keepdims), x, axes, keepdims, None)

        def of_keras(original: Callable[..., Any], self: Any, inputs: Any, mask: Any = None) -> Any:
            def own() -> Any:
                return original(self, inputs, mask)

            return around(own, inputs, self._reduction_axes, False, mask) if is_synchronized(self) else own()

        hook(nn, "_compute_moments_sync", of_operation)
        hook(keras.layers.BatchNormalization, "_moments", of_keras)
        return
    from tf_keras.src.layers.normalization.batch_normalization import BatchNormalization, BatchNormalizationBase

    def with_flag(original: Callable[..., Any], self: Any) -> Any:
        config = original(self)
        return {**config, "synchronized": True} if type(self) is BatchNormalization and self.synchronized else config

    def of_tf_keras(original: Callable[..., Any], self: Any, inputs: Any, reduction_axes: Any, keep_dims: bool,
                    mask: Any = None) -> Any:
        def own() -> Any:
            return original(self, inputs, reduction_axes, keep_dims, mask=mask)

        return around(own, inputs, reduction_axes, keep_dims, mask) if is_synchronized(self) else own()

    hook(BatchNormalization, "get_config", with_flag)  # which tf_keras leaves out of files
    hook(BatchNormalizationBase, "_moments", of_tf_keras)


def hook_traces(anew: bool) -> None:
    """Makes TensorFlow trace functions again once the ranks have changed, as traces contain ranks and sizes.

    That takes place when they are called next. Concrete functions, which have one trace, call their successors.

    Args:
        anew: Whether the ranks have changed, so that what was traced until now is traced again.
    """
    if anew:
        _Traces.present = weakref.WeakSet()
    hook(tracing_compilation, "_maybe_define_function", _traced)
    hook(polymorphic_function.Function, "get_concrete_function", _renewable)


class _Traces:
    """The graphs that were traced since the ranks have changed; None if they never have."""

    present: weakref.WeakSet[Any] | None = None

    @classmethod
    def outdates(cls, function: Any) -> bool:
        return cls.present is not None and function.graph not in cls.present


def _traced(original: Callable[..., Any], args: Any, kwargs: Any, options: Any) -> Any:
    cache = options.function_cache
    if cache is not None and any(map(_Traces.outdates, cache.values())):
        cache.clear()
    made = original(args, kwargs, options)
    if _Traces.present is not None:
        _Traces.present.add(made.graph)
    return made


class _Renewable(concrete_function.ConcreteFunction):  # type: ignore[misc]  # TensorFlow ships no types
    """A concrete function that knows how it was asked for."""

    _hvkeras_ask: Callable[[], Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hvkeras_ask()(*args, **kwargs) if _Traces.outdates(self) else super().__call__(*args, **kwargs)


def _renewable(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    made = original(self, *args, **kwargs)
    if not isinstance(made, _Renewable):
        args, kwargs = tf.nest.map_structure(
            lambda one: tf.TensorSpec.from_tensor(one) if isinstance(one, tf.Tensor) else one,
            (args, kwargs))
        adopt_class(made, _Renewable)
        made._hvkeras_ask = functools.partial(self.get_concrete_function, *args, **kwargs)
    return made


def hook_model_calls(around: Callable[..., Any]) -> None:
    """Wraps every call of a model in `around(original, model, *args, **kwargs)`."""
    for family in loaded_families():
        hook(sys.modules[family].Model, "__call__", around)


def hook_orbax(around: Callable[..., Any]) -> None:
    """Wraps every save of Keras 3's `OrbaxCheckpoint` in `around(original, callback, *args, **kwargs)`."""
    import keras

    if hasattr(keras.callbacks, "OrbaxCheckpoint"):
        hook(keras.callbacks.OrbaxCheckpoint, "_save_checkpoint", around)


def hook_averages_of_weights(swap: Callable[..., None], begin: Callable[..., None]) -> None:
    """Has Keras 3's `SwapEMAWeights` call `swap(original, callback)`, and `begin(original, callback)` at the end."""
    import keras

    if hasattr(keras.callbacks, "SwapEMAWeights"):
        hook(keras.callbacks.SwapEMAWeights, "_swap_variables", swap)
        hook(keras.callbacks.SwapEMAWeights, "_finalize_ema_values", begin)


def hook_train_calls(on_call: Callable[[float, float, Any], None]) -> None:
    """Calls `on_call(began, ended, logs)` after each call of a model's train function, with times since the epoch.

    `logs` is the return value of the train function: the logs of its last step, usually a mapping of tensors.
    """

    def make(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        if self.train_function is not None and not isinstance(self.train_function, _Timed):
            self.train_function = _Timed(self.train_function, on_call)
        return made if made is None else self.train_function  # tf_keras uses the return value

    for family in loaded_families():
        hook(sys.modules[family].Model, "make_train_function", make)


class _Timed:
    """A train function that reports its calls; all other attributes are those of the wrapped function."""

    def __init__(self, function: Any, on_call: Callable[[float, float, Any], None]) -> None:
        self._hvkeras_function, self._hvkeras_on_call = function, on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        logs = self._hvkeras_function(*args, **kwargs)
        self._hvkeras_on_call(began, time.time(), logs)
        return logs

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_hvkeras_")):  # not set yet in a copy, or a mark that others may set here
            raise AttributeError(name)
        return getattr(self._hvkeras_function, name)


def hook_stop_training(family: str, agreed: Callable[[Any, bool], bool]) -> None:
    """Makes `model.stop_training` return `agreed(model, own)`, where `own` is the value that this rank has set."""

    def read(model: Any) -> bool:
        return agreed(model, bool(model.__dict__.get("stop_training", False)))

    def write(model: Any, value: bool) -> None:
        model.__dict__["stop_training"] = value

    cls = sys.modules[family].Model
    if not hasattr(cls.__dict__.get("stop_training"), "_hvkeras_hook"):
        # TensorFlow skips assignments that do not change an attribute's value, so instances may lack their own.
        _hooked.append((cls, "stop_training", False))
        cls.stop_training = _HookedAttribute(read, write)


class _HookedAttribute(property):
    _hvkeras_hook = True
