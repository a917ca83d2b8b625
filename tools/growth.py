"""What use leaves behind: how a rank's memory grows with collectives of new names, and with functions traced again.

    hvkeras run -np 2 --backend native python tools/growth.py

Each kind of use is held against the same loop without hvkeras, a local operation in the collective's place, since
TensorFlow keeps each trace itself; both have run before they are measured. Rank 0 prints what each loop added to its
resident memory. At the end it prints how long the first call of a function takes that AutoGraph converts, and that has
one collective, against one that AutoGraph leaves alone.
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
numbers = itertools.count()  # of names that were never used before


def identity(tensor: Any, name: str) -> Any:
    """A local operation."""
    return tf.identity(tensor, name=name)


def allreduce(tensor: Any, name: str) -> Any:
    """A collective."""
    return hvd.allreduce(tensor, name=name)


def traced(tensor: Any, name: str) -> Any:
    """A local operation in a function of its own, as Horovod's engine has its collectives: it takes names of nodes."""
    return tf.function(lambda given: tf.identity(given, name=name), autograph=False)(tensor)


def resident() -> int:
    """This process's resident memory in bytes, once what nobody holds is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def call(operation: Operation, times: int) -> None:
    """Calls an operation eagerly, each time under a new name."""
    tensor = tf.ones([4])
    for _ in range(times):
        operation(tensor, f"use.{next(numbers)}")


def trace(operation: Operation, times: int) -> None:
    """Has one function traced for a new length, and run, again and again."""
    function = tf.function(lambda tensor: operation(tensor, "retraced"), autograph=False)
    for _ in range(times):
        function(tf.ones([next(numbers) + 1]))


def growth(use: Callable[[Operation, int], None], operation: Operation, times: int, before: int) -> float:
    """Bytes that each use adds to the resident memory, after some that are not measured."""
    use(operation, before)
    hvd.barrier()
    start = resident()
    use(operation, times)
    return (resident() - start) / times


def first_call(operation: Operation, autograph: bool) -> float:
    """Seconds that the first call of a new function takes."""
    function = tf.function(lambda tensor: operation(tensor, f"first.{next(numbers)}"), autograph=autograph)
    begin = time.perf_counter()
    function(tf.ones([4]))
    return time.perf_counter() - begin


def main() -> None:
    """Measures on all ranks, and prints on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="eager collectives, each with a new name")
    parser.add_argument("--traces", type=int, default=200, help="shapes that a function is traced for")
    flags = parser.parse_args()
    hvd.init()
    tf.get_logger().setLevel("ERROR")  # it warns of what is traced often
    first_call(identity, autograph=True)  # starts TensorFlow's devices
    seconds = {autograph: first_call(allreduce, autograph) for autograph in (True, False)}
    rows = []
    for what, use, times, before in (("eager call with a new name", call, flags.calls, flags.calls // 10),
                                     ("trace", trace, flags.traces, flags.traces // 10)):
        for name, operation in (("a local operation", identity), ("a local operation, traced for itself", traced),
                                ("hvd.allreduce", allreduce)):
            if (use, operation) != (trace, traced):
                count = times // 10 if operation is traced else times  # slow, and the same each time
                rows.append((what, count, name, growth(use, operation, count, before)))
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, backend {current_session().backend.name}; memory left behind on rank 0:")
        for what, times, name, each in rows:
            print(f"  {times:6,} x {what:26}  {name:36}  {each / 1024:8.2f} KiB each  {times * each / MIB:7.1f} MiB")
        print(f"first call of a function with one collective: {seconds[True]:.2f} s where AutoGraph converts the"
              f" function, {seconds[False]:.2f} s where it does not")
    hvd.shutdown()


if __name__ == "__main__":
    main()
