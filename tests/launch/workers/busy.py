"""Run collectives of all kinds and sizes from two threads, until another process terminates a rank."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import hvkeras as hvd

hvd.init()

import tensorflow as tf  # noqa: E402 - init() must not need it

SIZES = (1, 1000, 300_001, 1_000_000)
ends_at = float(sys.argv[1])  # seconds after which rank 1 exits; 0 for never


@tf.function
def mixed(value: tf.Tensor, name: str) -> tf.Tensor:
    value = hvd.allreduce(value, name=f"{name} mean")
    value = hvd.broadcast(value, root_rank=hvd.size() - 1, name=f"{name} from the last")
    parts = hvd.allgather(tf.reshape(value, [-1, 1]), name=f"{name} gathered")
    return hvd.reducescatter(parts, name=f"{name} scattered")


def work(name: str) -> None:
    for count in itertools.cycle(SIZES):
        mixed(tf.ones([count]), name)


threads = [threading.Thread(target=work, args=(f"thread {number}",), daemon=True) for number in range(2)]
for count in SIZES:
    mixed(tf.ones([count]), "first")
for thread in threads:
    thread.start()
print("busy", flush=True)
if ends_at and hvd.rank() == 1:
    time.sleep(ends_at)
    sys.exit(7)
for thread in threads:
    thread.join()
