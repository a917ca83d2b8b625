"""Train until rank 1 misbehaves as the first argument says; `-` for a job that succeeds."""

from __future__ import annotations

import os
import signal
import sys
import time

import hvkeras as hvd

how = sys.argv[1]
if how == "never_init" and os.environ.get("MISBEHAVE_RANK") == "1":
    time.sleep(300)
hvd.init()

import tensorflow as tf  # noqa: E402 - the import that a late init() must not need


@tf.function
def step(value: tf.Tensor) -> tf.Tensor:
    return hvd.allreduce(value, name="loop")


def misbehave() -> None:
    if how == "raise":
        raise ValueError("the sky is falling")
    if how == "exit":
        sys.exit(7)
    if how == "leave":
        sys.exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":
        time.sleep(300)
    if how == "differ":
        hvd.allreduce(tf.ones([7]), name="loop")
    if how == "other":
        hvd.broadcast(tf.ones([100]), root_rank=0, name="another")


for number in range(1000 if how != "-" else 10):
    step(tf.ones([100]))
    if number == 5:
        print("step 5", flush=True)
        if hvd.rank() == 1 and how != "wait":
            misbehave()
    if how == "wait" and number > 5 and hvd.rank() == 1:
        time.sleep(300)
print("all steps done", flush=True)
