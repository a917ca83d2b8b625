"""Try to connect to an address of UCX through a device, like a leader of the job, and print the result."""

from __future__ import annotations

import sys

from hvkeras.backends.cpp_library import library
from hvkeras.backends.native.network import ucx_folder
from hvkeras.backends.native.ucx import Ucx
from hvkeras.errors import MachineError, PeerError

ucx = Ucx(library(), ucx_folder())
own = ucx.open(0, {"NET_DEVICES": sys.argv[2], "TLS": "tcp", "TCP_CONN_NB": "y", "RNDV_THRESH": "inf"}, 2)
try:
    ucx.connect(0, 1, [bytes.fromhex(sys.argv[1]), own], ["a rank of the job", "a stranger"], 1, 3.0)
except (MachineError, PeerError) as error:
    print(str(error).partition(": ")[2])
else:
    print("connected")
ucx.close(0)
