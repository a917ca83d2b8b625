"""Everything that reaches into Keras beyond its public API, and all differences between its versions.

Three families of optimizers exist: Keras 3's, tf_keras's, and tf_keras's legacy ones
(`tf_keras.optimizers.legacy`). Each has one method through which every update goes (the seam):
`apply` in Keras 3, `apply_gradients` in tf_keras. Under mixed precision a `LossScaleOptimizer`
stands before it and decides there whether to skip the step, so that one is a seam as well.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

KERAS, TF_KERAS, TF_KERAS_LEGACY = "keras", "tf_keras", "tf_keras.legacy"


def default_keras() -> Any:
    """The Keras that `tf.keras` is: Keras 3, or tf_keras when `TF_USE_LEGACY_KERAS` says so."""
    if tf.keras.Model.__module__.startswith("tf_keras."):
        import tf_keras

        return tf_keras
    import keras

    return keras


# Optimizers.


def family_of(optimizer: Any) -> str | None:
    """Which family an optimizer is of; None for anything else. Imports no Keras that is not there yet."""
    keras: Any = sys.modules.get("keras")
    tf_keras: Any = sys.modules.get("tf_keras")
    if hasattr(keras, "optimizers") and isinstance(optimizer, keras.optimizers.Optimizer):
        return KERAS
    if tf_keras is not None:
        if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
            return TF_KERAS_LEGACY
        if isinstance(optimizer, tf_keras.optimizers.Optimizer):
            return TF_KERAS
    return None


def foreign_backend() -> str | None:
    """The backend of Keras 3 if it is not TensorFlow."""
    keras: Any = sys.modules.get("keras")
    name = str(keras.backend.backend()) if hasattr(keras, "backend") else "tensorflow"
    return None if name == "tensorflow" else name


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a `LossScaleOptimizer`; None if it is not one."""
    if not any(cls.__name__.startswith("LossScaleOptimizer") for cls in type(optimizer).__mro__):
        return None
    return getattr(optimizer, "inner_optimizer", None)


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the optimizer's variables, unless they exist."""
    with tf.init_scope():
        if family_of(optimizer) == TF_KERAS_LEGACY:
            optimizer._create_all_weights(list(variables))
        elif not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            optimizer.build(list(variables))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """All variables of an optimizer: iterations, learning rate, slots and the loss scale."""
    found = optimizer.variables
    variables = list(found() if family_of(optimizer) == TF_KERAS_LEGACY else found)
    # What tf_keras keeps out of `variables`:
    loss_scale: Any = getattr(optimizer, "_loss_scale", None)
    if hasattr(loss_scale, "current_loss_scale"):
        variables += [loss_scale.current_loss_scale, loss_scale.counter]
    plain = inner_optimizer(optimizer) or optimizer
    others = plain.__dict__.get("_hyper", {"learning_rate": plain.__dict__.get("_learning_rate")})
    known = {id(variable) for variable in variables}
    return variables + [other for _, other in sorted(others.items())
                        if isinstance(other, tf.Variable) and id(other) not in known]


def advance_iterations(optimizer: Any) -> None:
    """Counts a step in which nothing is applied."""
    optimizer = inner_optimizer(optimizer) or optimizer
    counter = optimizer._iterations if family_of(optimizer) == KERAS else optimizer.iterations
    counter.assign_add(1)


def step_counter(optimizer: Any) -> int:
    """How many steps of training an optimizer has counted; passes that only accumulate count as well.

    Steps that a `LossScaleOptimizer` of Keras 3 skipped do not.
    """
    optimizer = inner_optimizer(optimizer) or optimizer
    counter = optimizer._iterations if family_of(optimizer) == KERAS else optimizer.iterations
    return int(native(counter))


def learning_rate_source(optimizer: Any) -> Any:
    """What an optimizer takes its learning rate from: a variable, number, schedule or function; None for several."""
    optimizer = inner_optimizer(optimizer) or optimizer
    if hasattr(optimizer, "_inner_optimizers"):
        return None
    if family_of(optimizer) == TF_KERAS_LEGACY:
        return optimizer._hyper.get("learning_rate")
    return optimizer.__dict__.get("_learning_rate")


def learning_rate(optimizer: Any) -> float | None:
    """An optimizer's learning rate; None where it is not one number that can be set."""
    source = native(learning_rate_source(optimizer))
    if isinstance(source, tf.Variable):
        return float(source.numpy())
    return float(source) if isinstance(source, (int, float)) else None


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Sets the learning rate that `learning_rate` reads."""
    (inner_optimizer(optimizer) or optimizer).learning_rate = value


def as_learning_rate(optimizer: Any, value: float) -> float:
    """What becomes of a number in the optimizer's variable, which has fewer digits than Python's numbers."""
    source = native(learning_rate_source(optimizer))
    return float(source.dtype.as_numpy_dtype(value)) if isinstance(source, tf.Variable) else float(value)


def is_schedule(thing: Any) -> bool:
    """Whether this is a learning rate schedule of any Keras."""
    return any(cls.__name__ == "LearningRateSchedule" for cls in type(thing).__mro__)


def velocities(optimizer: Any) -> list[tf.Variable]:
    """The slots whose values are in proportion to the learning rate: the momenta of SGD and RMSprop.

    Other optimizers (Adam, Lion, Muon, ...) average gradients before the learning rate comes in.
    """
    optimizer = inner_optimizer(optimizer) or optimizer
    family = family_of(optimizer)
    if family == TF_KERAS_LEGACY:
        return [slots["momentum"] for slots in optimizer._slots.values() if "momentum" in slots
                and type(optimizer).__name__ in ("SGD", "RMSprop")]
    names = {"SGD": "momentums", "RMSprop": "_momentums"}
    known = [names[cls.__name__] for cls in type(optimizer).__mro__ if cls.__name__ in names]
    if not known or not optimizer.momentum:
        return []
    return [native(slot) for slot in getattr(optimizer, known[0], ()) if slot is not None]


def reduces_elsewhere(arguments: dict[str, Any]) -> bool:
    """Whether the caller of tf_keras's `apply_gradients` says that the gradients are reduced already."""
    return bool(arguments.get("skip_gradients_aggregation")) or not arguments.get("experimental_aggregate_gradients",
                                                                                 True)


@contextlib.contextmanager
def attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute for a while, past the `__setattr__` of optimizers."""
    before = instance.__dict__.get(name)
    instance.__dict__[name] = value
    try:
        yield
    finally:
        instance.__dict__[name] = before


# Dynamic subclasses.


def subclass_like(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    """Makes a subclass of `mixin` and `base` that is saved under the name of `base`."""
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    exported = {name: base.__dict__[name] for name in ("_keras_api_names", "_keras_api_names_v1")
                if name in base.__dict__}  # tf_keras looks its public names up there
    made: type = type(base)(base.__name__, (mixin, base), {**namespace, **exported, **attributes})
    for module, tables in _NAMES_BY_CLASS:
        if module in sys.modules:
            for table in tables:
                names = getattr(sys.modules[module], table, {})
                if base in names:
                    names[made] = names[base]
    return made


# Where Keras looks up the public name of a class that it saves. Without these the file would name
# Keras's private modules, which move between versions.
_NAMES_BY_CLASS = (
    ("keras.src.api_export", ("REGISTERED_OBJS_TO_NAMES",)),
    ("keras.src.saving.object_registration", ("GLOBAL_CUSTOM_NAMES",)),
    ("tf_keras.src.saving.object_registration", ("_GLOBAL_CUSTOM_NAMES",)),
)


def adopt_class(instance: Any, cls: type) -> None:
    """Makes an existing object an instance of a subclass, past the `__setattr__` of optimizers."""
    object.__setattr__(instance, "__class__", cls)


# Hooks into Keras's own classes, each set once.


def hook_loss_scale(family: str, around: Callable[..., Any]) -> None:
    """Puts `around(original, optimizer, gradients, variables)` before the finite check of `LossScaleOptimizer`.

    Args:
        family: Whose `LossScaleOptimizer`.
        around: Takes a function that finishes the step with the gradients it is given, the
            `LossScaleOptimizer`, the gradients and their variables.
    """
    if family == KERAS:
        import keras

        hook(keras.optimizers.LossScaleOptimizer, "apply", functools.partial(_keras_step, around))
        return
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    for cls in (loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3):
        hook(cls, "apply_gradients", functools.partial(_tf_keras_step, around))


def _keras_step(around: Callable[..., Any], original: Callable[..., Any], self: Any, grads: Any,
                trainable_variables: Any = None) -> Any:
    return around(lambda reduced: original(self, reduced, trainable_variables), self, grads,
                  self._trainable_variables if trainable_variables is None else trainable_variables)


def _tf_keras_step(around: Callable[..., Any], original: Callable[..., Any], self: Any, grads_and_vars: Any,
                   *args: Any, **kwargs: Any) -> Any:
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    if reduces_elsewhere(kwargs):
        return original(self, pairs, *args, **kwargs)
    return around(lambda reduced: original(self, list(zip(reduced, variables, strict=True)), *args, **kwargs), self,
                  [gradient for gradient, _ in pairs], variables)


def hook_jit_compile(refuse: Callable[[], bool]) -> None:
    """Makes Keras 3's `jit_compile="auto"` mean False while `refuse` says so."""
    import keras

    def resolve(original: Callable[..., Any], self: Any) -> Any:
        resolved = original(self)
        return False if resolved and refuse() else resolved

    hook(keras.Model, "_resolve_auto_jit_compile", resolve)


def hook(cls: type, method: str, replacement: Callable[..., Any]) -> bool:
    """Puts `replacement(original, self, *args, **kwargs)` in the place of a method, once.

    Args:
        cls: The class; its subclasses are hooked with it unless they have a method of their own.
        method: The method's name.
        replacement: What runs instead; it calls `original(self, ...)` where it wants to.

    Returns:
        Whether the class has that method.
    """
    original = getattr(cls, method, None)
    if original is None:
        return False
    if not hasattr(original, "_hvkeras_hook"):

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, self, *args, **kwargs)

        hooked._hvkeras_hook = True  # type: ignore[attr-defined]
        _hooked.append((cls, method, cls.__dict__.get(method)))
        setattr(cls, method, hooked)
    return True


def unhook_all() -> None:
    """Gives every hooked class back its own methods."""
    while _hooked:
        cls, method, own = _hooked.pop()
        if own is None:
            delattr(cls, method)  # it was inherited
        else:
            setattr(cls, method, own)


# Class, method, and what stood in the class itself; the latest last.
_hooked: list[tuple[type, str, Any]] = []


# Models and variables.


def model_weights(model: Any) -> list[Any]:
    """The model's trainable and non-trainable weights: no metrics, no states of random seeds."""
    return list(model.weights)


def repair_optimizer(model: Any, filepath: Any) -> None:
    """Gives a model from a Keras 3 HDF5 file the optimizer state of the file.

    Keras builds that optimizer on an empty list of variables, so that `fit` fails for want of known
    ones, with or without hvkeras.
    """
    broken: Any = getattr(model, "optimizer", None)
    if family_of(broken) != KERAS or not broken.built or broken._trainable_variables or not model.trainable_variables:
        return
    import h5py  # type: ignore[import-untyped]
    from keras.src.legacy.saving import legacy_h5_format

    model.optimizer = type(broken).from_config(broken.get_config())
    model.optimizer.build(model.trainable_variables)
    with h5py.File(filepath, "r") as file:
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
        for variable, value in zip(model.optimizer.variables, values, strict=True):
            variable.assign(value[()])


def endings_of_saved(weights_only: bool) -> tuple[str, ...]:
    """How a path can end that Keras saves to: any way in tf_keras."""
    if default_keras().__name__ == TF_KERAS:
        return ("",)
    return (".weights.h5",) if weights_only else (".keras", ".h5")


def steps_by_itself(model: Any) -> bool:
    """Whether the model trains in Keras's own `train_step`, through `model.optimizer`."""
    return type(model).train_step.__module__.split(".")[0] in ("keras", "tf_keras")


def native(variable: Any) -> Any:
    """The `tf.Variable` of a Keras 3 variable; any other as it is."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def variable_key(variable: Any) -> Any:
    """What tells variables apart, the same for a Keras 3 variable and its `tf.Variable`."""
    return native(variable)._unique_id


def variable_name(variable: Any) -> str:
    """A variable's name for messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "unnamed variable")
