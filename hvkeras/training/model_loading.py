"""Loading of saved models to continue training on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvkeras import compat
from hvkeras.collectives.compression import Compression
from hvkeras.gradients.optimizer import DistributedOptimizer
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.typing import CompressorLike, Model, PathLike


def load_model(
    filepath: PathLike, custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None, compression: CompressorLike = Compression.none,
    legacy_opts: bool = False,  # noqa: ARG001 - Horovod's parameter
    shard_update: bool | str = "auto",
) -> Model:
    """Load a saved model and distribute its optimizer, with the saved optimizer state.

    The file always holds the plain Keras optimizer, so any saved model with an optimizer works.

    Example:
        model = hvd.load_model("model.keras")
        model.fit(x, y)                           # resumes where it stopped, on all ranks

    Args:
        filepath: A `.keras` or `.h5` file; with tf_keras also a SavedModel folder.
        custom_optimizers: User-defined optimizer classes that the model was trained with.
        custom_objects: Classes or functions by name that Keras needs to load the model.
        compression: The compression of gradients.
        legacy_opts: Accepted for compatibility with Horovod; the file contains the kind of optimizer.
        shard_update: As for `DistributedOptimizer`.

    Returns:
        The compiled model; its optimizer is distributed if it was saved with one.

    Raises:
        NotInitializedError: `init()` was not called.
        OSError: The file does not exist.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model: Model = compat.default_keras().models.load_model(filepath, custom_objects=objects)
    compat.repair_optimizer(model, filepath)
    optimizer: Any = getattr(model, "optimizer", None)
    # A custom object may have distributed it already.
    if compat.family_of(optimizer) is not None and distributed_part(optimizer) is None:
        DistributedOptimizer(optimizer, compression=compression, shard_update=shard_update)
    return model
