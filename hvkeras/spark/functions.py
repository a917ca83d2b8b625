"""`hvkeras.spark.run`: runs a function on ranks in the tasks of a Spark job."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvkeras.errors import PeerError, UsageError, explain
from hvkeras.host.console import say
from hvkeras.launcher.calls import pickled_call
from hvkeras.spark.jobs import exported, run_order, say_ignored, say_once
from hvkeras.spark.order import Order
from hvkeras.spark.output import DriverOutput
from hvkeras.spark.session import active_context, is_fixed, is_on, slots_of

ResultT = TypeVar("ResultT")
_COMMITS = "HVKERAS_ELASTIC_DIR"
_RESETS = 3


def run(
    fn: Callable[..., ResultT], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None, start_timeout: float | None = None, use_mpi: bool | None = None,
    use_gloo: bool | None = None, extra_mpi_args: str | None = None, env: Mapping[str, str] | None = None,
    stdout: Any = None, stderr: Any = None, verbose: int = 1, nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False, executable: str | None = None,
) -> list[ResultT]:
    """Runs a function on ranks in the tasks of a Spark job, and returns the result from each.

    The tasks are those of one barrier stage, which Spark starts all at once. The function calls `hvd.init()` itself, in
    a process of its own, in which `pyspark.BarrierTaskContext.get()` works. The driver shows what the ranks print. A
    rank that fails ends the job, and the exception names it.

    Example:
        spark = SparkSession.builder.getOrCreate()

        def train(rate):
            hvd.init()
            ...
            return history.history["loss"]

        losses = hvkeras.spark.run(train, args=(0.01,), num_proc=4)

    Args:
        fn: The function; it is pickled by cloudpickle, and may be defined in a notebook.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks; by default, Spark's default parallelism.
        start_timeout: Seconds within which Spark must start all tasks; HVKERAS_SPARK_START_TIMEOUT by default.
        use_mpi: Accepted for compatibility with Horovod: HVKERAS_BACKEND or `hvd.init` selects the backend.
        use_gloo: See `use_mpi`.
        extra_mpi_args: Accepted for compatibility with Horovod: Spark starts the ranks.
        env: Further variables of the ranks. They also get the driver's variables that begin with HVKERAS_, HOROVOD_,
            KERAS_ or TF_.
        stdout: Text stream for the ranks' standard output; that of the driver by default.
        stderr: The same for their standard error.
        verbose: 0 leaves the ranks' output in the logs of Spark's executors.
        nics: Network interfaces between hosts.
        prefix_output_with_timestamp: Whether lines of output begin with the time.
        executable: Accepted for compatibility with Horovod: spark.pyspark.python names the Python.

    Returns:
        The results, in rank order.

    Raises:
        UsageError: An argument is wrong, there is no Spark session, or it can never run so many tasks at once.
        MachineError: Spark has not started the tasks in time.
        PeerError: The function failed on some rank; the message has that rank's traceback.
    """
    say_ignored("hvkeras.spark.run", extra_mpi_args=(extra_mpi_args, "Spark starts the ranks"),
                executable=(executable, "spark.pyspark.python names the Python of Spark's workers"))
    del use_mpi, use_gloo
    context = active_context()
    size = int(context.defaultParallelism) if num_proc is None else num_proc
    environment = dict(env or {})
    if nics:
        environment["HVKERAS_NETWORK_INTERFACES"] = nics if isinstance(nics, str) else ",".join(nics)
    if is_on(context, "spark.ssl.enabled") or is_on(context, "spark.network.crypto.enabled"):
        say_once("Spark encrypts its connections, but those between ranks are not encrypted")
    order = Order(pickled_call(fn, args, kwargs), size, secrets.token_hex(32), exported(os.environ, environment))
    output = DriverOutput(stdout, stderr, prefix_output_with_timestamp) if verbose else None
    return run_order(context, order, start_timeout, output)


def run_elastic(
    fn: Callable[..., ResultT], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None, min_num_proc: int | None = None, max_num_proc: int | None = None,
    start_timeout: float | None = None, elastic_timeout: float | None = None, reset_limit: int | None = None,
    env: Mapping[str, str] | None = None, stdout: Any = None, stderr: Any = None, verbose: int = 1,
    nics: Sequence[str] | str | None = None, prefix_output_with_timestamp: bool = False, min_np: int | None = None,
    max_np: int | None = None,
) -> list[ResultT]:
    """Runs a function that uses `hvd.elastic`, again with all ranks when one has failed.

    Each time, it has as many ranks as Spark has slots, within the limits. It goes on from the last commit of rank 0,
    which is in the folder HVKERAS_ELASTIC_DIR; all hosts must share that folder, since rank 0 may run on another one
    the next time.

    Example:
        hvkeras.spark.run_elastic(train, num_proc=4, min_num_proc=2, env={"HVKERAS_ELASTIC_DIR": "/shared/commits"})

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks; by default, Spark's default parallelism.
        min_num_proc: The fewest ranks to train with; `num_proc` by default.
        max_num_proc: The most; `num_proc` by default.
        start_timeout: As for `run`.
        elastic_timeout: The same for the times after the first; `start_timeout` by default.
        reset_limit: How often the function runs again; 3 times by default.
        env: As for `run`.
        stdout: As for `run`.
        stderr: As for `run`.
        verbose: As for `run`.
        nics: As for `run`.
        prefix_output_with_timestamp: As for `run`.
        min_np: The same as `min_num_proc`, which it overrides.
        max_np: The same as `max_num_proc`, which it overrides.

    Returns:
        The results of the last time, in rank order.

    Raises:
        UsageError: As for `run`, or there is no folder for commits that all hosts share.
        MachineError: As for `run`.
        PeerError: A rank has failed each time.
    """
    context = active_context()
    usual = int(context.defaultParallelism) if num_proc is None else num_proc
    fewest, most = min_np or min_num_proc or usual, max(usual, max_np or max_num_proc or 0)
    environment = {**dict(os.environ), **dict(env or {})}
    with contextlib.ExitStack() as stack:
        own: dict[str, str] = {}
        if not environment.get(_COMMITS):
            if not is_fixed(context):
                raise UsageError(explain("Elastic jobs on several hosts need a folder for commits that all of them"
                                         " share", f'env={{"{_COMMITS}": "/a/shared/folder"}}', master=context.master))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvkeras-commits-"))
            own = {_COMMITS: folder, "HVKERAS_RUN_COMMITS": "on"}
        limit = _RESETS if reset_limit is None else reset_limit
        timeout = start_timeout
        for reset in range(limit + 1):
            size = min(most, max(fewest, slots_of(context)))
            try:
                return run(fn, args, kwargs, size, timeout, env={**dict(env or {}), **own}, stdout=stdout,
                           stderr=stderr, verbose=verbose, nics=nics,
                           prefix_output_with_timestamp=prefix_output_with_timestamp)
            except PeerError as error:
                if reset == limit:
                    raise
                say(f"{error}\nhvkeras: runs the function again with all ranks, reset {reset + 1} of at most {limit}")
            timeout = start_timeout if elastic_timeout is None else elastic_timeout
    raise AssertionError("the last reset returns or raises")
