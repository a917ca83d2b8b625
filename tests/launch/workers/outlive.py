"""Run one allreduce. Then the process of a rank outlives its script; the arguments are the way and the rank."""

from __future__ import annotations

import atexit
import sys
import threading
import time

import hvkeras as hvd
from hvkeras.job.session import current_session

how, culprit = sys.argv[1], int(sys.argv[2])
hvd.init()


def linger() -> None:
    print("lingers", flush=True)
    time.sleep(300)


class Lingering:
    def __del__(self) -> None:
        linger()


hvd.allreduce([1.0, 2.0])
if hvd.rank() == culprit:
    if how == "thread":
        threading.Thread(target=linger, name="uploader").start()
    if how == "atexit":
        atexit.register(linger)
    if how == "del":
        lingering = Lingering()
    if how == "engine":
        setattr(type(current_session().backend), "stop", lambda backend: linger())  # noqa: B010 - mypy wants it so
    if how == "work":  # for longer than the timeout for processes after their scripts
        time.sleep(6)
        print("worked", flush=True)
