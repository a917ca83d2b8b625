"""`MismatchError`: the ranks make collectives that do not fit together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvkeras.errors import HvkerasError


class MismatchError(HvkerasError, tf.errors.FailedPreconditionError):  # type: ignore[misc]  # TensorFlow has no types
    """Ranks make collectives that differ in shape, type, operation, root or name; raised on each of them.

    In eager mode the job goes on if the exception is caught on all ranks. It is TensorFlow's `FailedPreconditionError`
    as well, which Horovod raises.

    Args:
        text: What differs, between which ranks.
    """

    def __init__(self, text: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, text)

    def __reduce__(self) -> Any:
        return type(self), (self.message,)
