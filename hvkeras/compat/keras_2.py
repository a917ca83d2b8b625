"""Keras 2 features on Keras 3, for unmodified scripts that use what Keras 3 has dropped.

`tf.keras.backend.set_value` also accepts variables of Keras 3, and the classes in
`tf.keras.optimizers.legacy` are those of Keras 3. Parameters that select an implementation (`fused=`,
`experimental_run_tf_function=`, `jit_compile=` of an optimizer) have no effect. With tf_keras, `tf.keras.__version__`
is added, which its `tf.keras` lacks.

Each function `of_...` returns the replacement of an attribute, given the original, `used`, and the attribute's name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.compat.optimizers import gradients_of
from hvkeras.compat.variables import as_tf_variable

_QUEUE_OPTIONS = ("workers", "use_multiprocessing", "max_queue_size")

Used = Callable[[str], None]  # called with the name of a feature, on each use


def of_variables(original: Any, used: Used, _: str) -> Any:
    """Return `variable.ref`."""

    def ref(self: Any) -> Any:
        used("variable.ref()")
        return type(as_tf_variable(self).ref())(self)

    return ref if original is None else original


def of_optimizers(original: Any, used: Used, name: str) -> Any:
    """Return an attribute of optimizers."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "lr" in kwargs:
            used("lr=")
            args, kwargs["learning_rate"] = args[1:], kwargs.pop("lr")
        if "jit_compile" in kwargs:
            used("jit_compile= of an optimizer")
            del kwargs["jit_compile"]
        original(self, *args, **kwargs)

    def rate(self: Any) -> Any:
        used("optimizer.lr")
        return self.learning_rate

    def set_rate(self: Any, value: Any) -> None:
        used("optimizer.lr")
        self.learning_rate = value

    if name == "__init__":
        return functools.wraps(original)(init)
    return property(rate, set_rate) if name == "lr" else _method_of_optimizers(used, name)


def _method_of_optimizers(used: Used, name: str) -> Any:
    def create_all_weights(self: Any, variables: Any) -> None:
        used("optimizer._create_all_weights()")
        if not self.built:
            self.build(list(variables))

    def compute_gradients(self: Any, loss: Any, var_list: Any,  # noqa: ARG001 - a method
                          tape: Any = None) -> list[tuple[Any, Any]]:
        used("optimizer.compute_gradients()")
        return gradients_of(loss, var_list, tape)

    def minimize(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        used("optimizer.minimize()")
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)  # undone by `apply_gradients`
        return self.apply_gradients(self.compute_gradients(scaled, var_list, tape=tape))

    def weights(self: Any) -> list[Any]:
        used("optimizer.weights")
        return list(self.variables)

    def get_weights(self: Any) -> list[Any]:
        return [np.asarray(variable) for variable in self.weights]

    def set_weights(self: Any, weights: Any) -> None:
        for variable, value in zip(self.weights, weights, strict=True):
            variable.assign(value)

    return {"weights": property(weights), "_create_all_weights": create_all_weights, "get_weights": get_weights,
            "compute_gradients": compute_gradients, "minimize": minimize, "set_weights": set_weights}[name]


def callable_variables(original: Any, used: Used, _: str) -> Any:
    """Return `optimizer.variables`, which is a property in Keras 3 and a method in Keras 2."""

    class Variables(list[Any]):
        """Callable list of an optimizer's variables."""

        def __call__(self) -> list[Any]:
            used("optimizer.variables()")
            return list(self)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return list, (list(self),)

    get = original.fget if isinstance(original, property) else None
    return original if get is None else property(lambda self: Variables(get(self)), doc=original.__doc__)


def of_compile(original: Any, used: Used, _: str) -> Any:
    """Return `compile`."""

    @functools.wraps(original)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "experimental_run_tf_function" in kwargs:  # selected a TensorFlow 2.0 mode that no longer exists
            used("compile(experimental_run_tf_function=...)")
            del kwargs["experimental_run_tf_function"]
        return original(self, *args, **kwargs)

    return compiled


def of_fit(original: Any, used: Used, _: str) -> Any:
    """Return `fit`, `evaluate` or `predict`."""

    @functools.wraps(original)
    def call(self: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() & set(_QUEUE_OPTIONS):
            used(f"fit({name}=...)")
            value = kwargs.pop(name)
            if hasattr(type(x), name):  # a PyDataset, which prefetches batches in threads or processes
                setattr(x, name, value)
        return original(self, x, *args, **kwargs)

    return call


def of_generators(_: Any, used: Used, name: str) -> Any:
    """Return `fit_generator`, `evaluate_generator` or `predict_generator`."""

    def fit_generator(self: Any, generator: Any, steps_per_epoch: int | None = None, epochs: int = 1,
                      verbose: Any = 1, callbacks: Any = None, validation_data: Any = None,
                      validation_steps: int | None = None, **options: Any) -> Any:
        used("fit_generator()")
        return self.fit(generator, steps_per_epoch=steps_per_epoch, epochs=epochs, verbose=verbose,
                        callbacks=callbacks, validation_data=validation_data, validation_steps=validation_steps,
                        **options)

    def evaluate_generator(self: Any, generator: Any, steps: int | None = None, callbacks: Any = None,
                           verbose: Any = 0, **options: Any) -> Any:
        used("evaluate_generator()")
        return self.evaluate(generator, steps=steps, callbacks=callbacks, verbose=verbose, **options)

    def predict_generator(self: Any, generator: Any, steps: int | None = None, callbacks: Any = None,
                          verbose: Any = 0, **options: Any) -> Any:
        used("predict_generator()")
        return self.predict(generator, steps=steps, callbacks=callbacks, verbose=verbose, **options)

    return {each.__name__: each for each in (fit_generator, evaluate_generator, predict_generator)}[name]


def of_batch_normalization(original: Any, used: Used, _: str) -> Any:
    """Return the constructor of `BatchNormalization`."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        unused = [name for name in ("fused", "virtual_batch_size", "adjustment") if name in kwargs
                  and (name == "fused" or kwargs[name] is None)]  # other values would change results
        for name in unused:
            used(f"BatchNormalization({name}=...)")
            del kwargs[name]
        original(self, *args, **kwargs)

    init.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # which Keras inspects
    return init


def of_legacy_optimizers(_: Any, used: Used, name: str) -> Any:
    """Return a class of `keras.optimizers.legacy`."""
    found: Any = getattr(importlib.import_module(f"keras.src.optimizers.{name.lower()}"), name)

    class Legacy(found):  # type: ignore[misc]  # the base class is only known at run time
        """Keras 3 optimizer under the name of a legacy optimizer of Keras 2."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            used("optimizers.legacy")
            return found(*args, **kwargs)

    Legacy.__name__ = Legacy.__qualname__ = name
    return Legacy


def of_tf_keras(original: Any, _: Used, __: str) -> Any:
    """Return `tf.keras.__version__`."""
    return getattr(sys.modules.get("tf_keras"), "__version__", None) if original is None else original


def of_backend(_: Any, used: Used, name: str) -> Any:
    """Return a function of `tf.keras.backend`."""

    def set_value(x: Any, value: Any) -> None:
        if isinstance(x.dtype, str):
            used("backend.set_value()")
        x.assign(np.asarray(value, dtype=getattr(x.dtype, "name", x.dtype)))

    def batch_set_value(tuples: Any) -> None:
        for x, value in tuples:
            set_value(x, value)

    return set_value if name == "set_value" else batch_set_value
