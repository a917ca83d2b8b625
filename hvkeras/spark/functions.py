"""`hvkeras.spark.run`: runs a function on ranks in the tasks of a Spark job."""

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
_COMMITS = "HVKERAS_ELASTIC_DIR"


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
    _say_what_is_not_encrypted(context)
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
    """Runs a function that uses `hvd.elastic`: when a rank is lost, the others go on from the last commit.

    Another rank joins at a commit where Spark has a free slot, up to the most ranks. If all are lost, the job goes on
    from the commit on the disk of rank 0, as far as the next rank 0 has that; all hosts have a folder that they share
    (HVKERAS_ELASTIC_DIR).

    Example:
        hvkeras.spark.run_elastic(train, num_proc=4, min_num_proc=2)

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks; by default, Spark's default parallelism.
        min_num_proc: The fewest ranks to train with; `num_proc` by default.
        max_num_proc: The most; `num_proc` by default.
        start_timeout: Seconds that the job waits for slots, if `elastic_timeout` is None.
        elastic_timeout: Seconds that the job waits for slots for the fewest ranks, at the start and later.
        reset_limit: How often the ranks may change, as some fail, join or leave; no limit by default, but that of an
            exception that comes twice in a row.
        env: As for `run`.
        stdout: As for `run`.
        stderr: As for `run`.
        verbose: 0 hides the ranks' output.
        nics: As for `run`.
        prefix_output_with_timestamp: As for `run`.
        min_np: The same as `min_num_proc`, which it overrides.
        max_np: The same as `max_num_proc`, which it overrides.

    Returns:
        The results of the ranks that are there at the end, in rank order.

    Raises:
        UsageError: As for `run`.
        PeerError: Ranks have failed too often, or there were no slots in time.
    """
    context = active_context()
    usual = int(context.defaultParallelism) if num_proc is None else num_proc
    fewest, most = min_np or min_num_proc or usual, max(usual, max_np or max_num_proc or 0)
    if not 1 <= fewest <= usual:
        raise UsageError(explain("1 <= min_num_proc <= num_proc must hold", "min_num_proc=2, num_proc=4",
                                 min_num_proc=fewest, num_proc=usual))
    environment = exported(os.environ, _with_interfaces(env, nics))
    # Rank 0 keeps commits on its host, in case that all ranks are lost, unless a shared folder was chosen.
    commits = "" if environment.get(_COMMITS) else str(Path(tempfile.gettempdir()) / f"hvkeras-{secrets.token_hex(8)}")
    if commits:
        environment[_COMMITS] = commits
    timeout = elastic_timeout or start_timeout or Settings(environment).spark_start_timeout
    first = min(usual, max(fewest, slots_of(context)))
    _say_what_is_not_encrypted(context)
    output = Output((stdout, stderr) if verbose else None, prefix_output_with_timestamp)
    return ElasticSparkJob(context, pickled_call(fn, args, kwargs), (fewest, most), first,
                      reset_limit, timeout, environment, commits, output).run()


def _with_interfaces(env: Mapping[str, str] | None, nics: Sequence[str] | str | None) -> dict[str, str]:
    environment = dict(env or {})
    if nics:
        environment["HVKERAS_NETWORK_INTERFACES"] = nics if isinstance(nics, str) else ",".join(nics)
    return environment


def _say_what_is_not_encrypted(context: Any) -> None:
    if is_on(context, "spark.ssl.enabled") or is_on(context, "spark.network.crypto.enabled"):
        say_once("Spark encrypts its connections, but those between ranks are not encrypted")
