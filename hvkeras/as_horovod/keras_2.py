"""What to write instead of Keras 2's ways, which Keras 3 refuses in words of its own."""

from __future__ import annotations

import sys

_LEGACY = "or set TF_USE_LEGACY_KERAS=1, with tf_keras installed"

# What Keras 3 says, and what its users shall do.
_HINTS = (
    ("'experimental_run_tf_function'", "leave experimental_run_tf_function out of compile()"),
    ("not recognized: {'lr'", "write learning_rate= instead of lr="),
    ("has no attribute 'lr'", "write optimizer.learning_rate instead of optimizer.lr"),
    ("has no attribute '_create_all_weights'", "write optimizer.build(variables)"),
    ("'list' object is not callable", "if this is optimizer.variables(), write optimizer.variables"),
)


def hint_for(error: BaseException) -> str:
    """A sentence for an exception of Keras 3 that a script for Keras 2 has met; "" for all others.

    Args:
        error: The exception.

    Returns:
        `HINT: <fix>.`, or "".
    """
    if "keras" not in sys.modules or not isinstance(error, (TypeError, ValueError, AttributeError)):
        return ""
    hint = next((hint for text, hint in _HINTS if text in str(error)), "")
    return f"HINT: {hint}, {_LEGACY}." if hint else ""
