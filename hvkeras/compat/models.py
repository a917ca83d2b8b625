"""Weights and files of models."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from hvkeras.compat.families import KERAS, TF_KERAS, default_keras, family_of, is_of_keras, loaded_families
from hvkeras.compat.variables import as_tf_variable


def model_weights(model: Any) -> list[Any]:
    """Return the model's trainable and non-trainable weights, without metrics and random seed states.

    Weights of tf_keras layers that are not variables, or have no fixed shape, are excluded: see `learned_state`.
    """
    return [weight for weight in model.weights if _has_fixed_shape(as_tf_variable(weight))]


def _has_fixed_shape(weight: Any) -> bool:
    return hasattr(weight, "shape") and bool(weight.shape.is_fully_defined())


def is_synchronized(layer: Any) -> bool:
    """Return whether a BatchNormalization uses the moments of the global batch."""
    return bool(getattr(layer, "synchronized", False)) and getattr(layer, "virtual_batch_size", None) is None


def is_built(model: Any) -> bool:
    """Return whether the model has all of its weights before its first step.

    Keras never marks a model as built that is not called itself, but calls nested models in its `train_step`.
    """
    maker = next(cls for cls in type(model).__mro__ if "build" in vars(cls))
    makes_none = is_of_keras(maker) and maker.__name__ in ("Model", "Layer") and bool(model.layers)
    return all(layer.built for layer in model.layers) and (bool(model.built) or makes_none)


def build_for(model: Any, batch: Any) -> None:
    """Create the weights that a model's first step would create, by tracing the model's call in training mode.

    Args:
        batch: The `element_spec` of the data: inputs, or a tuple of inputs and more.

    Raises:
        Exception: Any exception of the model's call, which may need concrete values, or be missing in a model whose
            `train_step` calls other models.
    """
    inputs = batch[0] if isinstance(batch, tuple) else batch
    is_keras_3 = KERAS in loaded_families() and isinstance(model, sys.modules[KERAS].Model)
    takes_training = not is_keras_3 or model._call_has_training_arg

    def call(x: Any) -> None:
        model(x, **({"training": True} if takes_training else {}))

    built = model.built
    try:
        # As in Keras's own step function, AutoGraph converts the model's call with tf_keras only.
        traced = tf.function(tf.autograph.experimental.do_not_convert(call) if is_keras_3 else call)
        traced.get_concrete_function(inputs)
    except Exception:
        model.built = built  # the failed call has marked the model as built
        raise


def repair_optimizer(model: Any, filepath: Any) -> None:
    """Restore the optimizer state of a model that was loaded from a Keras 3 HDF5 file.

    Keras builds that optimizer with an empty list of variables, so that `fit` fails on unknown variables, also without
    hvkeras.
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
    """Return the file name extensions that Keras accepts for saving; tf_keras accepts any."""
    if default_keras().__name__ == TF_KERAS:
        return ("",)
    return (".weights.h5",) if weights_only else (".keras", ".h5")
