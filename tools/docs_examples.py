"""Extension of griffe that shows the `Example:` section of docstrings as code in the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

# The heading, and the indented lines below it.
_EXAMPLE = re.compile(r"^Example:\n((?:(?: {4}.*)?\n)*(?: {4}.*))", re.MULTILINE)


class CodeExamples(griffe.Extension):
    """Fence the lines below `Example:`, which griffe would otherwise treat as prose."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"Examples:\n    ```python\n{found[1].rstrip()}\n    ```\n", obj.docstring.value)
