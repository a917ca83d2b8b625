"""Set settings before `init()`, differently on each rank. Then rank 1 never calls a collective."""

from __future__ import annotations

import os
import time

from hvkeras.control.launch_environments import detect_launch

os.environ |= {"HVKERAS_STALL_WARNING": "1", "HVKERAS_STALL_SHUTDOWN": "40" if detect_launch().rank else "3"}
import hvkeras as hvd

hvd.init()
if hvd.rank() == 1:
    time.sleep(300)
hvd.allreduce(1.0)
