"""Variables, step counters and learning rates of optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.compat.families import KERAS, TF_KERAS_LEGACY, family_of, is_of_keras
from hvkeras.compat.variables import as_tf_variable, value_of


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a `LossScaleOptimizer`; None for other optimizers."""
    if not any(cls.__name__.startswith("LossScaleOptimizer") for cls in type(optimizer).__mro__):
        return None
    return getattr(optimizer, "inner_optimizer", None)


def applies_as_keras(optimizer: Any) -> bool:
    """Return whether the user has not overridden how an optimizer applies gradients."""
    return is_of_keras(next(base for base in type(optimizer).__mro__ if "apply" in vars(base)))


def loss_scale(optimizer: Any) -> Any:
    """Return the current scale of a `LossScaleOptimizer`, as a tensor."""
    scale = getattr(optimizer, "dynamic_scale", None)  # of Keras 3
    return tf.convert_to_tensor(optimizer.loss_scale if scale is None else as_tf_variable(scale))


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create an optimizer's variables unless they exist."""
    with tf.init_scope():
        if family_of(optimizer) == TF_KERAS_LEGACY:
            optimizer._create_all_weights(list(variables))
        elif not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            optimizer.build(list(variables))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return all variables of an optimizer: iterations, learning rate, slots and the loss scale."""
    found = optimizer.variables
    variables = list(found() if family_of(optimizer) == TF_KERAS_LEGACY else found)
    # tf_keras does not include these in `variables`:
    loss_scale: Any = getattr(optimizer, "_loss_scale", None)
    if hasattr(loss_scale, "current_loss_scale"):
        variables += [loss_scale.current_loss_scale, loss_scale.counter]
    plain = inner_optimizer(optimizer) or optimizer
    others = plain.__dict__.get("_hyper", {"learning_rate": plain.__dict__.get("_learning_rate")})
    known = {id(variable) for variable in variables}
    return variables + [other for _, other in sorted(others.items())
                        if isinstance(other, tf.Variable) and id(other) not in known]


# Optimizers of Keras 3 whose update of a variable depends only on its value, gradient and slots.
_INDEPENDENT_UPDATES = frozenset({"SGD", "RMSprop", "Adam", "AdamW", "Adamax", "Nadam", "Adagrad", "Adadelta", "Lion",
                                  "Ftrl",
                         "Lamb"})
CLIPS_BY_NORM = ("clipnorm", "global_clipnorm")  # attributes of optimizers that clip by the norm of complete gradients
_GLOBAL_OPTIONS = ("clipvalue", "use_ema", "gradient_accumulation_steps", "loss_scale_factor")


# Optimizers that update elements independently, and those that depend on the complete variable.
_ELEMENTWISE = frozenset({"SGD", "RMSprop", "Adam", "AdamW", "Adamax", "Nadam", "Adagrad", "Adadelta", "Lion", "Ftrl"})
_VARIABLEWISE = frozenset({"Lamb", "Adafactor", "Muon"})
_STEP_METHODS = ("update_step", "_update_step", "_backend_update_step", "apply", "_internal_apply_gradients", "build")


def kind_of_update(plain: type) -> str:
    """Return the granularity at which an optimizer's update may be sharded: "elements", "variables" or "" if unknown.

    A user-defined class counts as its nearest base class of Keras, but as "variables" if it overrides a step.

    Args:
        plain: The optimizer's class, as Keras or the user defines it.
    """
    overrides_step = False
    for cls in plain.__mro__:
        if is_of_keras(cls):
            if cls.__name__ == "Nadam" and cls.__module__.startswith("tf_keras"):
                return ""  # the update of one variable changes state that the others read
            if cls.__name__ in _ELEMENTWISE:
                return "variables" if overrides_step else "elements"
            return "variables" if cls.__name__ in _VARIABLEWISE else ""
        overrides_step = overrides_step or any(name in cls.__dict__ for name in _STEP_METHODS)
    return ""


def updates_one_by_one(optimizer: Any, plain: type, is_clipped: bool) -> bool:
    """Return whether an optimizer updates each variable independently, with no computation over all variables.

    Args:
        optimizer: An optimizer of Keras 3.
        plain: The optimizer's class, as Keras defines it.
        is_clipped: Whether the optimizer receives clipped gradients.
    """
    with_all = _GLOBAL_OPTIONS if is_clipped else (*CLIPS_BY_NORM, *_GLOBAL_OPTIONS)
    return plain.__name__ in _INDEPENDENT_UPDATES and not any(getattr(optimizer, name, None) for name in with_all)


def with_slots(optimizer: Any, variable: Any) -> list[Any]:
    """Return a variable and its slots in an optimizer, in a fixed order.

    Args:
        optimizer: An optimizer of Keras 3, built.
        variable: A trainable variable of the optimizer.

    Returns:
        `tf.Variable`s; None where the variable has no such slot.
    """
    index, count = optimizer._get_variable_index(variable), len(optimizer._trainable_variables)
    slots = [each[index] for name, each in sorted(vars(optimizer).items())
             if isinstance(each, list) and len(each) == count and name not in ("_variables", "_trainable_variables")]
    return [found if isinstance(found := as_tf_variable(one), tf.Variable) else None for one in (variable, *slots)]


def numbered_slots(optimizer: Any, count: int) -> Iterator[tuple[int, Any]]:
    """Yield pairs of a variable's index and one of its slots.

    Optimizers hold slots in lists with an entry for each variable, or in nested collections of such lists.

    Args:
        optimizer: A built optimizer of Keras 3 or tf_keras, except for legacy ones.
        count: The number of variables for which it was built.
    """
    for name, each in sorted(vars(optimizer).items()):
        # TensorFlow's `_self_` attributes list all that it tracks, by name.
        if name not in ("_variables", "_trainable_variables") and not name.startswith("_self_"):
            yield from _indexed(each, count)


def _indexed(entries: Any, count: int) -> list[tuple[int, Any]]:
    if isinstance(entries, dict):
        entries = list(entries.values())
    if not isinstance(entries, (list, tuple)):
        return []
    within = [found for entry in entries for found in _indexed(entry, count)]
    if within or len(entries) != count:
        return within
    return [(number, slot) for number, entry in enumerate(entries) for slot in tf.nest.flatten(entry)
            if isinstance(as_tf_variable(slot), tf.Variable)]


def is_decayed(optimizer: Any, variable: Any) -> bool:
    """Return whether an optimizer of Keras 3 applies weight decay to a variable outside of its update step."""
    return bool(optimizer.weight_decay) and bool(optimizer._use_weight_decay(as_tf_variable(variable)))


def advance_iterations(optimizer: Any) -> None:
    """Count a step without an update."""
    step_counter_variable(optimizer).assign_add(1)


def start_averages(optimizer: Any, variables: Sequence[Any], passes: int) -> None:
    """Set the averages of an optimizer of Keras 3 to the weights if this is its first update after several passes.

    Keras starts the averages at iteration 0, but passes that only accumulate are iterations, too.

    Args:
        variables: The variables, or this rank's parts of them, in the order of the averages.
        passes: The number of passes per update.
    """
    if passes == 1 or not optimizer.use_ema:
        return
    is_first = tf.less(as_tf_variable(optimizer.iterations), passes)
    for variable, average in zip(variables, optimizer._model_variables_moving_average, strict=False):
        if average is not None:
            average.assign(tf.where(is_first, as_tf_variable(variable), as_tf_variable(average)))


def step_counter(optimizer: Any) -> int:
    """Return the number of training steps that an optimizer has counted, including passes that only accumulate.

    Steps that a Keras 3 `LossScaleOptimizer` has skipped are not included.
    """
    return int(value_of(step_counter_variable(optimizer)))


def step_counter_variable(optimizer: Any) -> Any:
    """Return the variable that counts an optimizer's steps."""
    optimizer = inner_optimizer(optimizer) or optimizer
    # In newer Keras 3, `iterations` is not the variable: it excludes the passes of gradient_accumulation_steps.
    return getattr(optimizer, "_iterations", optimizer.iterations) if family_of(optimizer) == KERAS else (
        optimizer.iterations)


def learning_rate_source(optimizer: Any) -> Any:
    """Return the source of the learning rate: a variable, number, schedule or function; None if there are several."""
    optimizer = inner_optimizer(optimizer) or optimizer
    if hasattr(optimizer, "_inner_optimizers"):
        return None
    if family_of(optimizer) == TF_KERAS_LEGACY:
        return optimizer._hyper.get("learning_rate")
    return getattr(optimizer, "__dict__", {}).get("_learning_rate")


def learning_rate(optimizer: Any) -> float | None:
    """Return an optimizer's learning rate; None if it is not a single number that can be set."""
    source = as_tf_variable(learning_rate_source(optimizer))
    if isinstance(source, tf.Variable):
        return float(value_of(source))
    return float(source) if isinstance(source, (int, float)) else None


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Set the learning rate that `learning_rate` reads."""
    (inner_optimizer(optimizer) or optimizer).learning_rate = value


def as_learning_rate(optimizer: Any, value: float) -> float:
    """Round a number to the precision of the optimizer's learning rate variable."""
    source = as_tf_variable(learning_rate_source(optimizer))
    return float(source.dtype.as_numpy_dtype(value)) if isinstance(source, tf.Variable) else float(value)


def numbers_of(optimizer: Any) -> dict[str, float]:
    """Return the numbers of an optimizer that determine its updates, by their names in messages."""
    plain = inner_optimizer(optimizer) or optimizer
    rate = learning_rate_source(optimizer)
    if is_schedule(rate):
        rate = rate(plain.iterations)
    found = {"the learning rate": rate, "the momentum": getattr(plain, "momentum", None),
             "the weight decay": getattr(plain, "weight_decay", None),
             "the loss scale": None if plain is optimizer else loss_scale(optimizer),
             "the number of iterations": getattr(plain, "iterations", None)}
    values = {name: as_tf_variable(value) for name, value in found.items()}
    return {name: float(value if isinstance(value, (int, float)) else np.asarray(value)) for name, value in
            values.items() if isinstance(value, (int, float, tf.Variable, tf.Tensor))}


def is_schedule(thing: Any) -> bool:
    """Return whether an object is a learning rate schedule of any Keras."""
    return any(cls.__name__ == "LearningRateSchedule" for cls in type(thing).__mro__)


def velocities(optimizer: Any) -> list[tf.Variable]:
    """Return the slots whose values are proportional to the learning rate: the momenta of SGD and RMSprop.

    Other optimizers (Adam, Lion, Muon, ...) average gradients before they apply the learning rate.
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
    return [as_tf_variable(slot) for slot in getattr(optimizer, known[0], ()) if slot is not None]


def gradients_of(loss: Any, variables: Sequence[Any], tape: Any) -> list[tuple[Any, Any]]:
    """Return pairs of a gradient and its variable, as optimizers of Keras 2 compute them.

    Args:
        loss: A tensor, or a function that returns one.
        tape: The tape that has recorded the tensor; None if `loss` is a function.
    """
    tape = tf.GradientTape() if tape is None else tape
    if callable(loss):
        with tape:
            loss = loss()
    return list(zip(tape.gradient(loss, [as_tf_variable(one) for one in variables]), variables, strict=True))


def weighed_loss(loss: Any, grad_loss: Any, tape: Any) -> Any:
    """Return a loss whose gradients include the factor `grad_loss`, which newer tf_keras optimizers do not accept.

    Args:
        loss: A tensor, or a function that returns one.
        grad_loss: The gradient of the loss; None for ones.
        tape: The tape that has recorded the tensor.
    """
    if grad_loss is None:
        return loss
    if callable(loss):
        return lambda: loss() * grad_loss
    with tape:
        return loss * grad_loss


def reduces_elsewhere(arguments: dict[str, Any]) -> bool:
    """Return whether the caller of tf_keras's `apply_gradients` states that the gradients are already reduced."""
    return bool(arguments.get("skip_gradients_aggregation")) or not arguments.get("experimental_aggregate_gradients",
                                                                                 True)


def forget_slots(optimizer: Any) -> None:
    """Remove an optimizer's slots, so that it can be built for other variables.

    Args:
        optimizer: A built optimizer of Keras 3 or tf_keras, except for legacy ones.
    """
    preserved = {id(as_tf_variable(optimizer.__dict__.get(name))) for name in ("_iterations", "_learning_rate")}
    slots = [each for each in optimizer._variables if id(as_tf_variable(each)) not in preserved]
    if family_of(optimizer) == KERAS:
        for slot in slots:
            optimizer._untrack_variable(slot)
        optimizer._trainable_variables_indices.clear()
        optimizer.built = False
    else:
        optimizer._variables[:] = [each for each in optimizer._variables if id(as_tf_variable(each)) in preserved]
        optimizer._built = False


@contextlib.contextmanager
def attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager that sets an attribute temporarily, bypassing the `__setattr__` of optimizers."""
    missing = object()
    before = instance.__dict__.get(name, missing)
    instance.__dict__[name] = value
    try:
        yield
    finally:
        if before is missing:
            del instance.__dict__[name]
        else:
            instance.__dict__[name] = before
