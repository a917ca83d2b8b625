"""Errors that are also TensorFlow errors, as Horovod's operations raise TensorFlow's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras.errors import HvkerasError, UsageError

if TYPE_CHECKING:

    class _FailedPreconditionError(Exception):
        # Stand-ins for type checkers.
        message: str

    class _InvalidArgumentError(Exception):
        message: str
else:
    _FailedPreconditionError = tf.errors.FailedPreconditionError
    _InvalidArgumentError = tf.errors.InvalidArgumentError


class _TextError:
    """Base of exceptions with only a message; TensorFlow's exceptions also take the operation that failed."""

    message: str

    def __init__(self, text: str) -> None:
        super().__init__(None, None, text)  # type: ignore[call-arg]  # TensorFlow's exception comes next in each class

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class MismatchError(_TextError, _FailedPreconditionError, HvkerasError):
    """Ranks have called collectives that differ in shape, type, operation, root or name; raised on each of these ranks.

    The job continues if all ranks catch the exception. It is also TensorFlow's `FailedPreconditionError`, which Horovod
    and graphs raise.

    Args:
        text: Description of the difference and of the ranks.
    """


class DuplicateNameError(_TextError, _InvalidArgumentError, HvkerasError):
    """Two threads have called a collective at once; also TensorFlow's `InvalidArgumentError`, which Horovod raises.

    Args:
        text: Name of the collective.
    """


class ArgumentError(_TextError, _InvalidArgumentError, UsageError):
    """A collective does not support these arguments; also TensorFlow's `InvalidArgumentError`, as in Horovod.

    Args:
        text: Description of the invalid argument.
    """
