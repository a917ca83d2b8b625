"""Keras 2 features on Keras 3, for unmodified scripts that use what Keras 3 has dropped.

`FEATURES` lists them. `tf.keras.backend.set_value` Keras 3 still has, but only for variables of TensorFlow; the classes
in `tf.keras.optimizers.legacy` are those of Keras 3 here. Parameters that select an implementation (`fused=`,
`experimental_run_tf_function=`, `jit_compile=` of an optimizer) have no effect. With tf_keras, `tf.keras.__version__`
is added, which its `tf.keras` lacks.
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
from hvkeras.compat.variables import native

FEATURES = ("variable.ref()", "optimizer.variables()", "optimizer.weights", "optimizer.minimize()", "optimizer.lr",
            "lr=", "compile(experimental_run_tf_function=...)", "fit(workers=...)", "fit_generator()",
            "BatchNormalization(fused=...)", "optimizers.legacy", "backend.set_value")
_OF_QUEUES = ("workers", "use_multiprocessing", "max_queue_size")

_before: dict[tuple[Any, str], Any] = {}  # former attributes of Keras's classes and modules; None if absent


def install_hooks(module: Any, used: Callable[[], None]) -> None:
    """Adds Keras 2's features to the definitions of a Keras 3 module.

    Args:
        module: One of the modules in `MODULES`, after its import.
        used: Called whenever a script uses one of these features.
    """
    MODULES[module.__name__](module, used)


def uninstall_hooks() -> None:
    """Restores Keras 3's original attributes."""
    while _before:
        (owner, name), original = _before.popitem()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _put(owner: Any, name: str, value: Any) -> None:
    if (owner, name) not in _before:
        _before[owner, name] = vars(owner).get(name)
        setattr(owner, name, value)


def _of_variables(module: Any, used: Callable[[], None]) -> None:
    def ref(self: Any) -> Any:
        """Returns a hashable reference to a variable, for sets and dictionaries; `deref()` returns the variable."""
        used()
        return type(native(self).ref())(self)

    if not hasattr(module.Variable, "ref"):
        _put(module.Variable, "ref", ref)


def _of_optimizers(module: Any, used: Callable[[], None]) -> None:
    cls = module.BaseOptimizer
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "lr" in kwargs:
            used()
            args, kwargs["learning_rate"] = args[1:], kwargs.pop("lr")
        if "jit_compile" in kwargs:
            used()
            del kwargs["jit_compile"]
        original(self, *args, **kwargs)

    def rate(self: Any) -> Any:
        used()
        return self.learning_rate

    def set_rate(self: Any, value: Any) -> None:
        used()
        self.learning_rate = value

    _put(cls, "__init__", init)
    _put(cls, "lr", property(rate, set_rate))
    _methods_of_optimizers(cls, used)
    _callable_variables(cls, used)


def _methods_of_optimizers(cls: Any, used: Callable[[], None]) -> None:
    def create_all_weights(self: Any, variables: Any) -> None:
        used()
        if not self.built:
            self.build(list(variables))

    def compute_gradients(self: Any, loss: Any, var_list: Any,  # noqa: ARG001 - a method
                          tape: Any = None) -> list[tuple[Any, Any]]:
        """Returns pairs of a gradient and its variable."""
        used()
        return gradients_of(loss, var_list, tape)

    def minimize(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Computes gradients, and applies them."""
        used()
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)  # which `apply_gradients` undoes
        return self.apply_gradients(self.compute_gradients(scaled, var_list, tape=tape))

    def weights(self: Any) -> list[Any]:
        used()
        return list(self.variables)

    def get_weights(self: Any) -> list[Any]:
        """Returns the values of the optimizer's variables."""
        return [np.asarray(variable) for variable in self.weights]

    def set_weights(self: Any, weights: Any) -> None:
        """Assigns values to the optimizer's variables."""
        for variable, value in zip(self.weights, weights, strict=True):
            variable.assign(value)

    _put(cls, "weights", property(weights))
    _put(cls, "_create_all_weights", create_all_weights)
    for function in (compute_gradients, minimize, get_weights, set_weights):
        _put(cls, function.__name__, function)


def _of_loss_scale(module: Any, used: Callable[[], None]) -> None:
    _callable_variables(module.LossScaleOptimizer, used)


def _callable_variables(cls: Any, used: Callable[[], None]) -> None:
    class Variables(list[Any]):
        """An optimizer's variables, as a list that can also be called and then returns the variables."""

        def __call__(self) -> list[Any]:
            used()
            return list(self)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return list, (list(self),)

    original = vars(cls).get("variables")
    if isinstance(original, property) and original.fget is not None:
        get = original.fget
        _put(cls, "variables", property(lambda self: Variables(get(self)), doc=original.__doc__))


def _of_models(module: Any, used: Callable[[], None]) -> None:
    original = module.Trainer.compile

    @functools.wraps(original)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "experimental_run_tf_function" in kwargs:  # selected a TensorFlow 2.0 mode that no longer exists
            used()
            del kwargs["experimental_run_tf_function"]
        return original(self, *args, **kwargs)

    _put(module.Trainer, "compile", compiled)


def _of_fit(module: Any, used: Callable[[], None]) -> None:
    cls = module.TensorFlowTrainer

    def with_queues(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & set(_OF_QUEUES):
                used()
                value = kwargs.pop(name)
                if hasattr(type(x), name):  # a PyDataset, whose batches threads or processes load ahead
                    setattr(x, name, value)
            return original(self, x, *args, **kwargs)

        return call

    def fit_generator(self: Any, generator: Any, steps_per_epoch: int | None = None, epochs: int = 1,
                      verbose: Any = 1, callbacks: Any = None, validation_data: Any = None,
                      validation_steps: int | None = None, **options: Any) -> Any:
        """Trains on the batches of a generator, as `fit` does."""
        used()
        return self.fit(generator, steps_per_epoch=steps_per_epoch, epochs=epochs, verbose=verbose,
                        callbacks=callbacks, validation_data=validation_data, validation_steps=validation_steps,
                        **options)

    def evaluate_generator(self: Any, generator: Any, steps: int | None = None, callbacks: Any = None,
                           verbose: Any = 0, **options: Any) -> Any:
        """Evaluates on the batches of a generator, as `evaluate` does."""
        used()
        return self.evaluate(generator, steps=steps, callbacks=callbacks, verbose=verbose, **options)

    def predict_generator(self: Any, generator: Any, steps: int | None = None, callbacks: Any = None,
                          verbose: Any = 0, **options: Any) -> Any:
        """Predicts for the batches of a generator, as `predict` does."""
        used()
        return self.predict(generator, steps=steps, callbacks=callbacks, verbose=verbose, **options)

    for name in ("fit", "evaluate", "predict"):
        _put(cls, name, with_queues(vars(cls)[name]))
    for function in (fit_generator, evaluate_generator, predict_generator):
        _put(cls, function.__name__, function)


def _of_batch_normalization(module: Any, used: Callable[[], None]) -> None:
    original = module.BatchNormalization.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        unused = [name for name in ("fused", "virtual_batch_size", "adjustment") if name in kwargs
                  and (name == "fused" or kwargs[name] is None)]  # the others would change results
        for name in unused:
            used()
            del kwargs[name]
        original(self, *args, **kwargs)

    init.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # by which Keras reads arguments
    _put(module.BatchNormalization, "__init__", init)


def _of_legacy_optimizers(module: Any, used: Callable[[], None]) -> None:
    def class_of(name: str) -> Any:
        found: Any = getattr(importlib.import_module(f"keras.src.optimizers.{name.lower()}"), name)

        class Legacy(found):  # type: ignore[misc]  # the base class is only known at run time
            """A Keras 3 optimizer under the name of a legacy optimizer of Keras 2."""

            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                used()
                return found(*args, **kwargs)

        Legacy.__name__ = Legacy.__qualname__ = name
        return Legacy

    for name in ("Adagrad", "Adam", "Ftrl", "RMSprop", "SGD"):
        _put(module, name, class_of(name))


def _of_tf_keras(module: Any, used: Callable[[], None]) -> None:  # noqa: ARG001 - Keras 2 itself had this attribute
    if not hasattr(module, "__version__") and "tf_keras" in sys.modules:
        _put(module, "__version__", sys.modules["tf_keras"].__version__)


def _of_backend(module: Any, used: Callable[[], None]) -> None:
    def set_value(x: Any, value: Any) -> None:
        """Assigns a value to a variable."""
        if isinstance(x.dtype, str):
            used()
        x.assign(np.asarray(value, dtype=getattr(x.dtype, "name", x.dtype)))

    def batch_set_value(tuples: Any) -> None:
        """Assigns values to variables."""
        for x, value in tuples:
            set_value(x, value)

    _put(module, "set_value", set_value)
    _put(module, "batch_set_value", batch_set_value)


# The modules whose definitions are extended, and the functions that extend them.
MODULES: dict[str, Callable[[Any, Callable[[], None]], None]] = {
    "keras.src.backend.tensorflow.core": _of_variables,
    "keras.src.optimizers.base_optimizer": _of_optimizers,
    "keras.src.optimizers.loss_scale_optimizer": _of_loss_scale,
    "keras.src.trainers.trainer": _of_models,
    "keras.src.backend.tensorflow.trainer": _of_fit,
    "keras.src.layers.normalization.batch_normalization": _of_batch_normalization,
    "keras.src.legacy.backend": _of_backend,
    "keras.optimizers.legacy": _of_legacy_optimizers,
    "tf_keras.api._v2.keras": _of_tf_keras,
    "tensorflow.keras": _of_tf_keras,  # the same module, where a script imports it by this name
}
