"""Ranks that fail or mismatch in functions compiled by XLA; the argument selects the case."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import tensorflow as tf

import hvkeras as hvd


def different_names() -> Any:
    return hvd.allreduce(tf.zeros(2), name=f"of {hvd.rank()}")


def different_order() -> Any:
    names = ("first", "second")
    return [hvd.allreduce(tf.zeros(2), name=name) for name in (names if hvd.rank() else reversed(names))]


def different_rows() -> Any:
    return hvd.allgather(tf.zeros([1 + hvd.rank(), 2]))


def a_sum() -> Any:
    return hvd.allreduce(tf.zeros(2), name="a sum")


hvd.init()
case = sys.argv[1]
cases = {"names": different_names, "order": different_order, "rows": different_rows}
step = tf.function(cases.get(case, a_sum), jit_compile=True)
if case == "killed":
    step()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
step()
hvd.shutdown()
