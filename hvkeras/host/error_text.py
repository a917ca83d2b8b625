"""Short texts for messages: exceptions in one line."""

from __future__ import annotations

import re
import traceback

_GRAPH_ERROR = "Graph execution error:"  # TensorFlow begins with this and the node's origin, then says why


def summary(error: BaseException) -> str:
    """Returns an exception in one line; for TensorFlow's errors in graphs, the line that says what happened."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    first = text.splitlines()[0]
    what = re.search(r"^(\S.*)\n\s*\[\[\{\{node", text, re.MULTILINE)
    return f"{first.removesuffix(_GRAPH_ERROR)}{what[1]}" if what and first.endswith(_GRAPH_ERROR) else first
