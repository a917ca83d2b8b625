"""Function calls that travel to ranks, and results that travel back; both are serialised with cloudpickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from hvkeras.errors import UsageError, explain


def pickled_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Serialises a function call.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        What `pickled_result` takes.

    Raises:
        UsageError: It cannot be pickled.
    """
    if not callable(func):
        raise UsageError(explain("hvkeras.run takes a function, and so do hvkeras.compare and hvkeras.spark.run",
                                 func=func))
    try:
        return bytes(cloudpickle.dumps((func, tuple(args), dict(kwargs or {}))))
    except Exception as error:  # whatever an object's own pickling raises
        raise UsageError(explain(f"The function and its arguments must be picklable ({type(error).__name__}: {error})",
                                 "create models and datasets inside the function", func=func)) from error


def loaded_call(call: bytes) -> Callable[[], Any]:
    """Restores a function call.

    Args:
        call: What `pickled_call` has made.

    Returns:
        A function without parameters that makes the call.
    """
    function, arguments, named = pickle.loads(call)
    return lambda: function(*arguments, **named)


def pickled_result(result: Any) -> bytes:
    """Serialises what a function has returned, for `pickle.loads`.

    Args:
        result: What it has returned.

    Raises:
        UsageError: It cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:  # whatever an object's own pickling raises
        raise UsageError(explain(f"What the function returns must be picklable ({type(error).__name__}: {error})",
                                 "return numbers, arrays, weights or paths", returned=type(result))) from error
