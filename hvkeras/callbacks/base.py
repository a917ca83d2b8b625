"""`KerasCallback`: the base of callbacks, that of the Keras which `tf.keras` refers to when it is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras import compat

if TYPE_CHECKING:
    from hvkeras.typing import Callback as _Callback
else:
    _Callback = compat.default_keras().callbacks.Callback


class KerasCallback(_Callback):
    """A callback of Keras with the attribute that Horovod's callbacks have for classes derived from them."""

    @property
    def backend(self) -> Any:
        """The module `tf.keras.backend`, by which classes derived from Horovod's callbacks read and set variables."""
        return tf.keras.backend
