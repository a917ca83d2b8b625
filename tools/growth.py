"""Growth of a rank's memory with collectives of new names, and with repeated tracing of a function.

    hvkeras run -np 2 --backend native python tools/growth.py

The baseline is the same loop with a local operation instead of the collective, because TensorFlow itself keeps each
trace. Both loops warm up before the measurement. Rank 0 prints the growth of its resident memory in each loop, and then
the duration of the first call of a function with one collective, with and without AutoGraph.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import psutil
import tensorflow as tf

import hvkeras as hvd
from hvkeras.job.session import current_session

Operation = Callable[[Any, str], Any]
MIB = 1 << 20
numbers = itertools.count()  # for names and shapes that were not used before


def identity(tensor: Any, name: str) -> Any:
    """Run a local operation."""
    return tf.identity(tensor, name=name)


def allreduce(tensor: Any, name: str) -> Any:
    """Run a collective."""
    return hvd.allreduce(tensor, name=name)


def traced(tensor: Any, name: str) -> Any:
    """Run a local operation in a `tf.function`, as the backend `horovod` runs collectives to name their nodes."""
    return tf.function(lambda given: tf.identity(given, name=name), autograph=False)(tensor)


def resident() -> int:
    """Return this process's resident memory in bytes, after freed memory is returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def call(operation: Operation, times: int) -> None:
    """Call an operation eagerly, each time with a new name."""
    tensor = tf.ones([4])
    for _ in range(times):
        operation(tensor, f"use.{next(numbers)}")


def trace(operation: Operation, times: int) -> None:
    """Call one function repeatedly with tensors of a new length, so that it is traced each time."""
    function = tf.function(lambda tensor: operation(tensor, "retraced"), autograph=False)
    for _ in range(times):
        function(tf.ones([next(numbers) + 1]))


def growth(use: Callable[[Operation, int], None], operation: Operation, times: int, before: int) -> float:
    """Return the growth of the resident memory in bytes per call, after `before` calls to warm up."""
    use(operation, before)
    hvd.barrier()
    start = resident()
    use(operation, times)
    return (resident() - start) / times


def first_call(operation: Operation, autograph: bool) -> float:
    """Return the seconds of the first call of a new function."""
    function = tf.function(lambda tensor: operation(tensor, f"first.{next(numbers)}"), autograph=autograph)
    begin = time.perf_counter()
    function(tf.ones([4]))
    return time.perf_counter() - begin


def main() -> None:
    """Measure on all ranks, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="eager collectives, each with a new name")
    parser.add_argument("--traces", type=int, default=200, help="traces of one function")
    flags = parser.parse_args()
    hvd.init()
    tf.get_logger().setLevel("ERROR")  # no warnings about repeated tracing
    first_call(identity, autograph=True)  # initializes TensorFlow's devices
    seconds = {autograph: first_call(allreduce, autograph) for autograph in (True, False)}
    rows = []
    for what, use, times, before in (("eager call with a new name", call, flags.calls, flags.calls // 10),
                                     ("trace", trace, flags.traces, flags.traces // 10)):
        for name, operation in (("a local operation", identity), ("a local operation in a tf.function", traced),
                                ("hvd.allreduce", allreduce)):
            if (use, operation) != (trace, traced):
                count = times // 10 if operation is traced else times  # slow, and the same each time
                rows.append((what, count, name, growth(use, operation, count, before)))
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, backend {current_session().backend.name}; memory growth on rank 0:")
        for what, times, name, each in rows:
            print(f"  {times:6,} x {what:26}  {name:36}  {each / 1024:8.2f} KiB each  {times * each / MIB:7.1f} MiB")
        print(f"first call of a function with one collective: {seconds[True]:.2f} s with AutoGraph,"
              f" {seconds[False]:.2f} s without")
    hvd.shutdown()


if __name__ == "__main__":
    main()
