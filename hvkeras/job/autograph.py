"""Excludes functions of hvkeras from AutoGraph's conversion, without the need to import TensorFlow first."""

from __future__ import annotations

import sys
from types import FunctionType


def exclude_from_autograph(module: str) -> None:
    """Exempts the functions and methods that a module defines from AutoGraph's conversion.

    Converting a function takes tenths of a second in a user's first step. The mark is the attribute that
    `tf.autograph.experimental.do_not_convert` sets.

    Args:
        module: The module's name; its last line calls this.
    """
    for entity in list(vars(sys.modules[module]).values()):
        if getattr(entity, "__module__", None) != module:
            continue
        for member in vars(entity).values() if isinstance(entity, type) else [entity]:
            function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            if isinstance(function, FunctionType):
                function.autograph_info__ = {}  # type: ignore[attr-defined]
