"""Does what `endless.py` does, and prints the addresses of UCX, which only the control channel carries otherwise."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path

from hvkeras.backends.native.ucx import Ucx

opened = Ucx.open


def recorded(self: Ucx, group: int, settings: Mapping[str, str], hosts: int) -> bytes:
    """Opens a link, and prints where it is."""
    address = opened(self, group, settings, hosts)
    print(f"address {address.hex()}", flush=True)
    return address


Ucx.open = recorded  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("endless.py")))
