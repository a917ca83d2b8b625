"""Fork a process for each kind of exit, print how each has ended, and run one more allreduce."""

from __future__ import annotations

import os
import signal
import sys
import time

import tensorflow as tf

import hvkeras as hvd
from hvkeras.backends.cpp_library import library

WAYS = ("end", "exit", "raise", "collective", "operation", "init", "shutdown", "again")
WITHIN = 30.0  # seconds; timeout for the exit of a child


def end_of(pid: int) -> int | str:
    deadline = time.monotonic() + WITHIN
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def in_child(way: str) -> None:
    """Run in a child before the end of its script."""
    if way == "exit":
        sys.exit(10 + hvd.rank() + 10 * hvd.size())
    if way == "raise":
        raise ValueError("only in a child")
    try:
        if way == "collective":
            hvd.allreduce([1.0], name="in a child")
        if way == "init":
            hvd.init()
        if way in ("shutdown", "again"):
            hvd.shutdown()
        if way == "again":
            hvd.init()
        if way == "operation":
            of_a_graph()
    except (hvd.UsageError, tf.errors.AbortedError) as error:
        print(way, error, flush=True)


def of_a_graph() -> None:
    """Run the engine's operation directly, as traced graphs do."""
    if os.environ["HVKERAS_BACKEND"] == "native":
        library().operations.hvkeras_allreduce(inputs=[[1.0]], key="", group=0, reduction=0, before="1.0", after="1.0",
                                               order=[], named=[list(b"in a child")])


hvd.init()
hvd.allreduce([1.0], name="before")
ends = {}
for way in WAYS:
    if not (pid := os.fork()):
        in_child(way)
        break
    ends[way] = end_of(pid)
else:
    print("ends", ends, "after", hvd.allreduce([1.0], op=hvd.Sum, name="after").numpy(), flush=True)
    hvd.shutdown()
    if not os.fork():
        sys.exit(3)
    os.wait()
    hvd.init()
    print("again", hvd.allreduce([1.0], op=hvd.Sum, name="again").numpy(), flush=True)
