"""Rank 1 never calls init()."""

from __future__ import annotations

import time

import hvkeras as hvd
from hvkeras.control.launch_environments import detect_launch

if detect_launch().rank == 1:
    time.sleep(300)
hvd.init()
