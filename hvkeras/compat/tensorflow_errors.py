"""Errors that are TensorFlow's as well, since Horovod raises them from its operations."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvkeras.errors import HvkerasError, UsageError


class _InWords:
    """TensorFlow's exceptions take the operation that failed, too; here there is only a text."""

    message: str

    def __init__(self, text: str) -> None:
        super().__init__(None, None, text)  # type: ignore[call-arg]  # TensorFlow's exception comes next in each class

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class MismatchError(_InWords, tf.errors.FailedPreconditionError, HvkerasError):  # type: ignore[misc]  # it has no types
    """Ranks make collectives that differ in shape, type, operation, root or name; raised on each of them.

    The job goes on if the exception is caught on all ranks. It is TensorFlow's `FailedPreconditionError` as well, which
    Horovod raises, and which graphs raise.

    Args:
        text: What differs, between which ranks.
    """


class DuplicateNameError(_InWords, tf.errors.InvalidArgumentError, HvkerasError):  # type: ignore[misc]  # as above
    """Two threads make the same collective at once; also TensorFlow's `InvalidArgumentError`, which Horovod raises.

    Args:
        text: Which collective.
    """


class ArgumentError(_InWords, tf.errors.InvalidArgumentError, UsageError):  # type: ignore[misc]  # as above
    """A collective cannot be made with these arguments; also TensorFlow's `InvalidArgumentError`, as in Horovod.

    Args:
        text: Which argument.
    """
