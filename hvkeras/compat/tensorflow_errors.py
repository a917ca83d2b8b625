"""Errors that are also TensorFlow errors, since Horovod's operations raise TensorFlow's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras.errors import HvkerasError, UsageError

if TYPE_CHECKING:

    class _FailedPreconditionError(Exception):
        """What type checkers see of TensorFlow's class, like the next one."""

        message: str

    class _InvalidArgumentError(Exception):
        message: str
else:
    _FailedPreconditionError = tf.errors.FailedPreconditionError
    _InvalidArgumentError = tf.errors.InvalidArgumentError


class _InWords:
    """Base of exceptions with only a text; TensorFlow's exceptions also take the operation that failed."""

    message: str

    def __init__(self, text: str) -> None:
        super().__init__(None, None, text)  # type: ignore[call-arg]  # TensorFlow's exception comes next in each class

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class MismatchError(_InWords, _FailedPreconditionError, HvkerasError):
    """Ranks call collectives that differ in shape, type, operation, root or name; raised on each of these ranks.

    The job continues if all ranks catch the exception. It is also TensorFlow's `FailedPreconditionError`, which Horovod
    and graphs raise.

    Args:
        text: What differs, and between which ranks.
    """


class DuplicateNameError(_InWords, _InvalidArgumentError, HvkerasError):
    """Two threads call the same collective at once; also TensorFlow's `InvalidArgumentError`, which Horovod raises.

    Args:
        text: Which collective.
    """


class ArgumentError(_InWords, _InvalidArgumentError, UsageError):
    """A collective does not support these arguments; also TensorFlow's `InvalidArgumentError`, as in Horovod.

    Args:
        text: Which argument.
    """
