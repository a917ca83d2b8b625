"""Serialization of function calls for ranks, and of their results, with cloudpickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from hvkeras.errors import UsageError, explain


def pickled_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Serialize a function call.

    Returns:
        Bytes for `loaded_call`.

    Raises:
        UsageError: The call cannot be pickled.
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
    """Deserialize a function call.

    Args:
        call: Bytes from `pickled_call`.

    Returns:
        A function without parameters that makes the call.
    """
    function, arguments, named = pickle.loads(call)
    return lambda: function(*arguments, **named)


def pickled_result(result: Any) -> bytes:
    """Serialize a function's result, for `pickle.loads`.

    Raises:
        UsageError: The result cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:  # whatever an object's own pickling raises
        raise UsageError(explain(f"What the function returns must be picklable ({type(error).__name__}: {error})",
                                 "return numbers, arrays, weights or paths", returned=type(result))) from error
