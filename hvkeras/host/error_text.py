"""Exceptions in one line."""

from __future__ import annotations

import re
import traceback

_GRAPH_ERROR = "Graph execution error:"  # how TensorFlow begins, with where the node was made, before it says why


def summary(error: BaseException) -> str:
    """An exception in one line; of TensorFlow's errors in graphs, the line that says what happened."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    first = text.splitlines()[0]
    what = re.search(r"^(\S.*)\n\s*\[\[\{\{node", text, re.MULTILINE)
    return f"{first.removesuffix(_GRAPH_ERROR)}{what[1]}" if what and first.endswith(_GRAPH_ERROR) else first
