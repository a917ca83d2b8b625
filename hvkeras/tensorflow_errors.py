"""Errors that are TensorFlow's as well, since Horovod raises them from its operations."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvkeras.errors import HvkerasError, UsageError


class MismatchError(HvkerasError, tf.errors.FailedPreconditionError):  # type: ignore[misc]  # TensorFlow has no types
    """Ranks make collectives that differ in shape, type, operation, root or name; raised on each of them.

    The job goes on if the exception is caught on all ranks. It is TensorFlow's `FailedPreconditionError` as well, which
    Horovod raises, and which graphs raise.

    Args:
        text: What differs, between which ranks.
    """

    def __init__(self, text: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, text)

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class DuplicateNameError(HvkerasError, tf.errors.InvalidArgumentError):  # type: ignore[misc]  # TensorFlow has no types
    """Two threads make the same collective at once; also TensorFlow's `InvalidArgumentError`, which Horovod raises.

    Args:
        text: Which collective.
    """

    def __init__(self, text: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, text)

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class ArgumentError(UsageError, tf.errors.InvalidArgumentError):  # type: ignore[misc]  # TensorFlow has no types
    """A collective cannot be made with these arguments; also TensorFlow's `InvalidArgumentError`, as in Horovod.

    Args:
        text: Which argument.
    """

    def __init__(self, text: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, text)

    def __reduce__(self) -> Any:
        return type(self), (self.message,)
