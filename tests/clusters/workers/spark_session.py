"""A driver with one Spark session, in which many jobs run: `python spark_session.py MASTER [CHECK...]`."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras.spark.order import Order
from hvkeras.spark.rank_task import RankTask

spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").config(
    "spark.ui.showConsoleProgress", "false").getOrCreate()
context = spark.sparkContext
context.setLogLevel("OFF")


def failed(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The class and the text of what a job raises, and whether its processes are gone."""
    try:
        hvd.spark.run(function, args, num_proc=2, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("the job did not fail")


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
            return True
        time.sleep(0.1)
    return False


@check
def results_come_in_rank_order_and_output_reaches_the_driver():
    secret = context.broadcast({"of": "the driver"})
    out, err = io.StringIO(), io.StringIO()

    def answer(first, second):
        rank = int(os.environ["HOROVOD_RANK"])
        print(f"hello from {rank}")
        print("a complaint", file=sys.stderr)
        together = BarrierTaskContext.get().allGather(f"rank {rank}")
        return rank, first, second, os.environ["OF_THE_USER"], secret.value["of"], sorted(together), os.getpid()

    found = hvd.spark.run(answer, args=(1,), kwargs={"second": "two"}, num_proc=2, env={"OF_THE_USER": "yes"},
                          stdout=out, stderr=err)
    assert len({each[-1] for each in found}) == 2
    return [each[:-1] for each in found], sorted(out.getvalue().splitlines()), sorted(err.getvalue().splitlines())


@check
def jobs_of_one_session_reduce_though_workers_are_used_again():
    # What the user's own functions import stays in their workers.
    context.parallelize(range(2), 2).map(lambda _: __import__("tensorflow").constant(1.0).numpy()).collect()

    def train(factor):
        import hvkeras as hvd

        hvd.init()
        return hvd.rank(), hvd.size(), hvd.local_size(), float(hvd.allreduce(factor * (hvd.rank() + 1.0), op=hvd.Sum))

    return [hvd.spark.run(train, args=(factor,), num_proc=2) for factor in (1, 10)]


@check
def a_failed_rank_is_named_with_its_traceback():
    def train():
        import hvkeras as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("the data are not there")
        hvd.allreduce(1.0)

    return failed(train)


@check
def so_is_one_that_fails_before_the_others_meet_it():
    def train():
        import hvkeras as hvd

        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("early")
        hvd.init()

    return failed(train)


@check
def so_is_one_that_exits():
    return failed(lambda: sys.exit(3) if os.environ["HOROVOD_RANK"] == "1" else time.sleep(60))


@check
def a_killed_rank_is_named_and_nothing_is_left():
    out = io.StringIO()

    def train():
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print(os.getpid(), os.getppid(), child.pid)
        if os.environ["HOROVOD_RANK"] == "1":
            print("the last words", file=sys.stderr)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    report = failed(train, stdout=out)
    return *report, gone([int(pid) for line in out.getvalue().splitlines() for pid in line.split()[1:]])


@check
def a_killed_worker_of_spark_is_named_and_nothing_is_left():
    out = io.StringIO()

    def train():
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print(os.getpid(), os.getppid(), child.pid)
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
        time.sleep(60)

    report = failed(train, stdout=out)
    return *report, gone([int(pid) for line in out.getvalue().splitlines() for pid in line.split()[1:]])


@check
def a_cancelled_job_leaves_nothing():
    out = io.StringIO()

    def train():
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print(os.getpid(), os.getppid(), child.pid)
        time.sleep(60)

    def cancel():
        while out.getvalue().count("\n") < 2:
            time.sleep(0.1)
        context.cancelAllJobs()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    report = failed(train, stdout=out)
    canceller.join()
    return *report, gone([int(pid) for line in out.getvalue().splitlines() for pid in line.split()[1:]])


DRIVER = """
from pyspark.sql import SparkSession

import hvkeras.spark

SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

def wait():
    import os
    import time

    print("pids", os.getpid(), os.getppid(), flush=True)
    time.sleep(300)

hvkeras.spark.run(wait, num_proc=2)
"""


@check
def a_killed_driver_leaves_nothing():
    driver = subprocess.Popen([sys.executable, "-I", "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True)
    assert driver.stdout is not None
    pids: list[int] = []
    while len(pids) < 4:
        line = driver.stdout.readline()
        assert line, "the driver has ended"
        pids += [int(word) for word in line.partition("pids ")[2].split()]
    driver.kill()
    driver.wait()
    return len(pids), gone(pids)


@check
def tasks_that_spark_starts_again_are_refused():
    def task(_):
        order = Order(b"", 2, "secret", {})
        again = BarrierTaskContext.get()
        again._attemptNumber = 1  # Spark itself does not start such a stage again
        with contextlib.ExitStack() as stack:
            try:
                RankTask(order, again, stack).run()
            except ValueError as error:
                yield type(error).__name__, str(error)

    return context.parallelize(range(2), 2).barrier().mapPartitions(task).collect()


@check
def an_elastic_job_goes_on_from_its_last_commit():
    with tempfile.TemporaryDirectory() as folder:
        def train(mark):
            import hvkeras as hvd

            hvd.init()
            state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, begun_at=[], first=0)

            @hvd.elastic.run
            def loop(state):
                state.begun_at = [*state.begun_at, state.epoch]
                state.first = state.first or hvd.broadcast_object(os.getpid())
                while state.epoch < 4:
                    state.epoch += 1
                    state.commit()
                    if state.epoch == 2 and hvd.rank() == 1 and not os.path.exists(mark):
                        open(mark, "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)
                    hvd.allreduce(1.0)
                return state.epoch, state.begun_at, os.getpid() == state.first

            return loop(state)

        return hvd.spark.run_elastic(train, (f"{folder}/mark",), num_proc=2, verbose=0)


@check
def backends_are_compared_by_jobs_on_spark():
    def train():
        import keras
        import numpy as np

        import hvkeras as hvd

        hvd.init()
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        x = np.ones([32, 3])
        model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        result = hvd.spark.compare(train, np=2, backends="native,tfdist", baseline=False, out=folder)
        return [[row["backend"], row["failure"], row["weight_difference"]] for row in result.rows], os.listdir(folder)


@check
def mistakes_are_told_at_once():
    def module_of_the_driver():
        return 1

    module_of_the_driver.__module__ = "nowhere_to_be_found"
    module_of_the_driver.__qualname__ = module_of_the_driver.__name__
    sys.modules["nowhere_to_be_found"] = type(sys)("nowhere_to_be_found")
    sys.modules["nowhere_to_be_found"].module_of_the_driver = module_of_the_driver
    found = [failed(module_of_the_driver), failed(threading.Lock)]
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            hvd.spark.run(time.time, num_proc=64)
        except hvd.UsageError as error:
            found.append([type(error).__name__, str(error)])
    return found


if __name__ == "__main__":
    run_checks(after=spark.stop, chosen=sys.argv[2:])
