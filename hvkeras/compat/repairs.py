"""Repairs of Keras 3: our functions replace Keras's own until `restore()` removes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

_hooked: list[tuple[Any, str, Any]] = []  # owner, name and original of each repaired function


def put(owner: Any, name: str, repaired: Callable[..., Any]) -> None:
    """Replaces a function with `repaired(original, ...)`, if it exists: old versions of Keras lack some.

    Args:
        owner: The module or class.
        name: The function's name.
        repaired: The function to call instead.
    """
    original = getattr(owner, name, None)
    if original is not None:
        _hooked.append((owner, name, original))

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return repaired(original, *args, **kwargs)

        setattr(owner, name, patched)


def restore() -> None:
    """Removes the repairs."""
    while _hooked:
        setattr(*_hooked.pop())


def mentions(function: Any, word: str) -> bool:
    """Whether the code of a function, or of a function nested in it, uses a name that contains a word.

    Args:
        function: The function; the result is False for None and for objects without Python code.
        word: A part of a name.
    """
    code = getattr(function, "__code__", None)
    codes: list[CodeType] = [code] if code is not None else []
    for one in codes:
        codes += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return any(word in name for one in codes for name in one.co_names)
