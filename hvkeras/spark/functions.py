"""`hvkeras.spark.run` and `run_elastic`: run a function on ranks in the tasks of a Spark job."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvkeras.errors import UsageError, explain
from hvkeras.launcher.calls import pickled_call
from hvkeras.launcher.reported_job import Output
from hvkeras.settings import Settings
from hvkeras.spark.elastic_job import ElasticSparkJob
from hvkeras.spark.jobs import exported, run_order, say_ignored, say_once
from hvkeras.spark.order import Order
from hvkeras.spark.output import DriverOutput
from hvkeras.spark.session import active_context, is_on, slots_of

ResultT = TypeVar("ResultT")
_FOLDER = "HVKERAS_ELASTIC_DIR"


def run(
    fn: Callable[..., ResultT], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None, start_timeout: float | None = None, use_mpi: bool | None = None,
    use_gloo: bool | None = None, extra_mpi_args: str | None = None, env: Mapping[str, str] | None = None,
    stdout: Any = None, stderr: Any = None, verbose: int = 1, nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False, executable: str | None = None,
) -> list[ResultT]:
    """Run a function on ranks in the tasks of a Spark job, and return the result of each rank.

    The tasks form one barrier stage, so Spark starts all of them at once. The function runs in a separate process. It
    must call `hvd.init()` and can use `pyspark.BarrierTaskContext.get()`. The driver shows the ranks' output. If a
    rank fails, the job ends, and the exception names the rank.

    Example:
        spark = SparkSession.builder.getOrCreate()

        def train(rate):
            hvd.init()
            ...
            return history.history["loss"]

        losses = hvkeras.spark.run(train, args=(0.01,), num_proc=4)

    Args:
        fn: The function; cloudpickle pickles it, so it may be defined in a notebook.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks; by default, Spark's default parallelism.
        start_timeout: Seconds within which Spark must start all tasks; by default HVKERAS_SPARK_START_TIMEOUT.
        use_mpi: Accepted for compatibility with Horovod: HVKERAS_BACKEND or `hvd.init` selects the backend.
        use_gloo: See `use_mpi`.
        extra_mpi_args: Accepted for compatibility with Horovod: Spark starts the ranks.
        env: Additional environment variables of the ranks. Ranks also inherit the driver's variables that begin with
            HVKERAS_, HOROVOD_, KERAS_ or TF_.
        stdout: Text stream for the ranks' standard output; by default that of the driver.
        stderr: Text stream for the ranks' standard error; by default that of the driver.
        verbose: 0 leaves the ranks' output in the logs of Spark's executors.
        nics: Network interfaces between hosts.
        prefix_output_with_timestamp: Whether to prefix lines of output with the time.
        executable: Accepted for compatibility with Horovod: spark.pyspark.python selects the interpreter.

    Returns:
        The results, in rank order.

    Raises:
        UsageError: An argument is invalid, there is no Spark session, or it cannot run that many tasks at once.
        MachineError: Spark did not start the tasks in time.
        PeerError: The function failed on a rank; the message contains its traceback.
    """
    say_ignored("hvkeras.spark.run", extra_mpi_args=(extra_mpi_args, "Spark starts the ranks"),
                executable=(executable, "spark.pyspark.python selects the interpreter of Spark's workers"))
    del use_mpi, use_gloo
    context = active_context()
    size = int(context.defaultParallelism) if num_proc is None else num_proc
    _warn_of_unencrypted_connections(context)
    environment = _with_interfaces(env, nics)
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
    """Run a function that uses `hvd.elastic`: when a rank is lost, the others resume from the last commit.

    New ranks join at a commit where Spark has free slots, up to `max_num_proc`. If all ranks are lost, the job resumes
    from the commit on the disk of rank 0, provided that the new rank 0 can read it. With HVKERAS_ELASTIC_DIR set to a
    shared folder, every host can.

    Example:
        hvkeras.spark.run_elastic(train, num_proc=4, min_num_proc=2)

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks; by default, Spark's default parallelism.
        min_num_proc: The minimum number of ranks; by default `num_proc`.
        max_num_proc: The maximum number of ranks; by default `num_proc`.
        start_timeout: Used as `elastic_timeout` if that is None.
        elastic_timeout: Seconds to wait for slots for the minimum number of ranks, at the start and after failures.
        reset_limit: The maximum number of resets, as ranks fail, join or leave. By default there is no limit, except
            that the same exception twice in a row ends the job.
        env: As for `run`.
        stdout: As for `run`.
        stderr: As for `run`.
        verbose: 0 hides the ranks' output.
        nics: As for `run`.
        prefix_output_with_timestamp: As for `run`.
        min_np: Alias of `min_num_proc`, which it overrides.
        max_np: Alias of `max_num_proc`, which it overrides.

    Returns:
        The results of the ranks that participate at the end, in rank order.

    Raises:
        UsageError: As for `run`.
        PeerError: Ranks failed too often, or slots did not become available in time.
    """
    context = active_context()
    size = int(context.defaultParallelism) if num_proc is None else num_proc
    minimum, maximum = min_np or min_num_proc or size, max(size, max_np or max_num_proc or 0)
    if not 1 <= minimum <= size:
        raise UsageError(explain("1 <= min_num_proc <= num_proc must hold", "min_num_proc=2, num_proc=4",
                                 min_num_proc=minimum, num_proc=size))
    environment = exported(os.environ, _with_interfaces(env, nics))
    # Without a shared folder, rank 0 stores commits on its host, in case all ranks are lost.
    commits = "" if environment.get(_FOLDER) else str(Path(tempfile.gettempdir()) / f"hvkeras-{secrets.token_hex(8)}")
    if commits:
        environment[_FOLDER] = commits
    timeout = elastic_timeout or start_timeout or Settings(environment).spark_start_timeout
    first = min(size, max(minimum, slots_of(context)))
    _warn_of_unencrypted_connections(context)
    output = Output((stdout, stderr) if verbose else None, prefix_output_with_timestamp)
    return ElasticSparkJob(context, pickled_call(fn, args, kwargs), (minimum, maximum), first,
                           reset_limit, timeout, environment, commits, output).run()


def _with_interfaces(env: Mapping[str, str] | None, nics: Sequence[str] | str | None) -> dict[str, str]:
    environment = dict(env or {})
    if nics:
        environment["HVKERAS_NETWORK_INTERFACES"] = nics if isinstance(nics, str) else ",".join(nics)
    return environment


def _warn_of_unencrypted_connections(context: Any) -> None:
    if is_on(context, "spark.ssl.enabled") or is_on(context, "spark.network.crypto.enabled"):
        say_once("Spark encrypts its connections, but connections between ranks are not encrypted")
