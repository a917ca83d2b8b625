"""Run cells in an IPython kernel, and print their outputs: JSON, a list of outputs per cell.

Argument: a JSON file with a list of cells.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

DEADLINE = 300.0  # seconds per cell


class Cell:
    """A cell's outputs, as in a notebook file."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []
        self.changes = 0  # of existing outputs

    def take(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        name = content.get("transient", {}).get("display_id")
        if kind == "update_display_data":
            self.changes += 1
            for output in self.outputs:
                if output["display_id"] == name:
                    output["data"] = content["data"]
        elif kind in ("display_data", "execute_result"):
            self.outputs.append({"kind": kind, "data": content["data"], "display_id": name})
        elif kind == "stream":
            self.outputs.append({"kind": content["name"], "data": content["text"], "display_id": None})
        elif kind == "error":
            self.outputs.append({"kind": kind, "data": "\n".join(content["traceback"]), "display_id": None})


def main() -> None:
    manager = KernelManager(transport="ipc", ip=str(Path("kernel").absolute()))
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        cells = []
        for text in json.loads(Path(sys.argv[1]).read_text()):
            cells.append(Cell())
            client.execute_interactive(text, timeout=DEADLINE, output_hook=cells[-1].take)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(json.dumps([[cell.outputs, cell.changes] for cell in cells]))


main()
