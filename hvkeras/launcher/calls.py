"""Serialization of function calls for ranks, and of their results, with cloudpickle."""

from __future__ import annotations

import collections
import io
import linecache
import os
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

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
        return _dumps((func, tuple(args), dict(kwargs or {})))
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
        return _dumps(result)
    except Exception as error:  # whatever an object's own pickling raises
        raise UsageError(explain(f"What the function returns must be picklable ({type(error).__name__}: {error})",
                                 "return numbers, arrays, weights or paths", returned=type(result))) from error


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduced_code(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[Any, ...]]:
    """Reduce a code object together with its source, which AutoGraph and tracebacks read.

    cloudpickle replaces the name of the file, and a notebook's cells are in no file.
    """
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _code_with_source, (make, arguments, code.co_filename, linecache.getlines(code.co_filename))


def _code_with_source(make: Callable[..., types.CodeType], arguments: Sequence[Any], filename: str,
                      lines: list[str]) -> types.CodeType:
    if lines and not os.path.exists(filename):
        linecache.cache.setdefault(filename, (sum(map(len, lines)), None, lines, filename))
    return make(*arguments).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of functions with their source."""

    dispatch_table: ClassVar[Any] = collections.ChainMap({types.CodeType: _reduced_code},
                                                         cloudpickle.Pickler.dispatch_table)
