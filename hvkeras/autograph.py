"""How AutoGraph is told to leave functions of ours as they are, where TensorFlow need not have been imported."""

from __future__ import annotations

import sys
from types import FunctionType


def leave_as_it_is(module: str) -> None:
    """Exempts what a module defines, functions and methods, from AutoGraph's conversion.

    Converting a function takes tenths of a second in a user's first step. The mark is the one that
    `tf.autograph.experimental.do_not_convert` leaves.

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
