"""Repairs of Keras 3: functions of ours in the place of its own, which `restore()` takes away again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

_hooked: list[tuple[Any, str, Any]] = []  # what has a repair, its name, and what stood there


def put(owner: Any, name: str, repaired: Callable[..., Any]) -> None:
    """Calls `repaired(original, ...)` in the place of a function, if there is one: old Kerases lack one.

    Args:
        owner: The module or class.
        name: The function's name.
        repaired: What is called instead.
    """
    original = getattr(owner, name, None)
    if original is not None:
        _hooked.append((owner, name, original))

        @functools.wraps(original)
        def mended(*args: Any, **kwargs: Any) -> Any:
            return repaired(original, *args, **kwargs)

        setattr(owner, name, mended)


def restore() -> None:
    """Takes the repairs away."""
    while _hooked:
        setattr(*_hooked.pop())


def mentions(function: Any, word: str) -> bool:
    """Whether the code of a function, or of one within it, uses a name that has a word in it.

    Args:
        function: The function; None and what has no Python code mention nothing.
        word: A part of a name.
    """
    code = getattr(function, "__code__", None)
    codes: list[CodeType] = [code] if code is not None else []
    for one in codes:
        codes += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return any(word in name for one in codes for name in one.co_names)
