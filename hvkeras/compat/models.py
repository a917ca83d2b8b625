"""Models: their weights, and their files."""

from __future__ import annotations

from typing import Any

from hvkeras.compat.families import KERAS, TF_KERAS, default_keras, family_of
from hvkeras.compat.variables import native


def model_weights(model: Any) -> list[Any]:
    """The model's trainable and non-trainable weights: no metrics, no states of random seeds.

    What layers of tf_keras have learned and keep in weights that are no variables, or of no fixed shape, is not among
    them: see `learned_state`.
    """
    return [weight for weight in model.weights if _has_fixed_shape(native(weight))]


def _has_fixed_shape(weight: Any) -> bool:
    return hasattr(weight, "shape") and bool(weight.shape.is_fully_defined())


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
