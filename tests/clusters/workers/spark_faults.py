"""A driver on executors of its own: `python spark_faults.py MASTER [CHECK...]`; what happens to them is told."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from typing import Any

import psutil
from pyspark.sql import SparkSession

import hvkeras as hvd
from harness.checks import check, run_checks

spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").config(
    "spark.ui.showConsoleProgress", "false").getOrCreate()
context = spark.sparkContext
context.setLogLevel("OFF")


def failed(**options: Any) -> list[str]:
    """The class and the text of what a job raises that waits for a minute after `hvd.init()`."""

    def wait() -> None:
        import hvkeras as hvd

        hvd.init("tfdist")
        print(os.getpid(), os.getppid())
        time.sleep(60)

    try:
        hvd.spark.run(wait, num_proc=2, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("the job did not fail")


@check
def ranks_on_two_executors_reduce():
    def train():
        import hvkeras as hvd

        hvd.init()
        return hvd.rank(), hvd.size(), hvd.local_size(), float(hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum))

    return hvd.spark.run(train, num_proc=2)


@check
def fewer_slots_than_ranks_are_waited_for():
    said = io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stderr(said):
        try:
            hvd.spark.run(os.getpid, num_proc=3, start_timeout=7)
        except Exception as error:
            return type(error).__name__, str(error), said.getvalue(), time.monotonic() - began
    raise AssertionError("there are three slots")


@check
def slots_that_another_job_uses_are_waited_for():
    busy = threading.Thread(target=lambda: context.parallelize([1], 1).foreach(lambda _: time.sleep(15)))
    busy.start()
    time.sleep(3)
    try:
        hvd.spark.run(os.getpid, num_proc=2, start_timeout=4)
    except Exception as error:
        found = type(error).__name__, str(error)
    busy.join()
    return *found, len(hvd.spark.run(os.getpid, num_proc=2))


@check
def a_lost_executor_is_named_and_nothing_is_left_or_trained_again():
    out = io.StringIO()

    def kill() -> None:
        while out.getvalue().count("\n") < 2:
            time.sleep(0.1)
        java = psutil.Process(int(out.getvalue().split()[1]))
        while "java" not in java.name():
            java = psutil.Process(java.ppid())
        java.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    report = failed(stdout=out)
    killer.join()
    pids = [int(line.split()[-2]) for line in out.getvalue().splitlines()]
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return *report, not any(map(psutil.pid_exists, pids)), len(pids)


@check
def an_interrupted_driver_goes_on_without_the_job():
    out = io.StringIO()

    def interrupt() -> None:
        while out.getvalue().count("\n") < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        failed(stdout=out)
    except KeyboardInterrupt:
        interrupted = True
    interrupter.join()
    return interrupted, len(hvd.spark.run(os.getpid, num_proc=2))


if __name__ == "__main__":
    run_checks(after=spark.stop, chosen=sys.argv[2:])
