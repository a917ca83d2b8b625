"""Exclude functions of hvkeras from AutoGraph's conversion, without importing TensorFlow."""

from __future__ import annotations

import sys
from types import FunctionType


def exclude_from_autograph(module: str) -> None:
    """Exclude the functions and methods of a module from AutoGraph's conversion.

    Converting a function takes tenths of a second in a user's first step. It sets the same attribute as
    `tf.autograph.experimental.do_not_convert`.

    Args:
        module: The module's name. Call this in its last line.
    """
    for entity in list(vars(sys.modules[module]).values()):
        if getattr(entity, "__module__", None) != module:
            continue
        for member in vars(entity).values() if isinstance(entity, type) else [entity]:
            function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            if isinstance(function, FunctionType):
                function.autograph_info__ = {}  # type: ignore[attr-defined]
