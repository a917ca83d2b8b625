"""Common code of all functions that start a job on Spark."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hvkeras.errors import UsageError, explain
from hvkeras.horovod import as_horovod
from hvkeras.host.console import say
from hvkeras.settings import TABLE, Settings
from hvkeras.spark.barrier_job import BarrierJob
from hvkeras.spark.order import Order
from hvkeras.spark.output import DriverOutput

_EXPORTED = ("HVKERAS_", "HOROVOD_", "KERAS_", "TF_")  # prefixes of the driver's variables that ranks inherit
_NOT_EXPORTED = {"HVKERAS_SECRET", "TF_CONFIG", *(row.variable for row in TABLE if row.internal)}
_printed: set[str] = set()


def exported(environ: Mapping[str, str], further: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that the driver passes to ranks.

    Args:
        further: Additional variables, which take precedence.
    """
    inherited = {name: value for name, value in environ.items()
                 if name.startswith(_EXPORTED) and name not in _NOT_EXPORTED}
    return {**inherited, **{name: str(value) for name, value in (further or {}).items()}}


def run_order(context: Any, order: Order, start_timeout: float | None = None, output: DriverOutput | None = None,
              watch: Callable[[float], None] | None = None) -> list[Any]:
    """Run a job, and return its results in rank order.

    Args:
        start_timeout: Seconds within which Spark must start all tasks; by default HVKERAS_SPARK_START_TIMEOUT.
        output: The target of the ranks' output; None to leave it in the logs of Spark's executors.
        watch: Called several times per second with the elapsed seconds; the job is cancelled if it raises.

    Raises:
        HvkerasError: As for `hvkeras.spark.run`.
    """
    if not isinstance(order.size, int) or order.size < 1:
        raise UsageError(explain("The number of ranks must be positive", "num_proc=2", num_proc=order.size))
    settings = Settings(order.environment)
    timeout = settings.spark_start_timeout if start_timeout is None else float(start_timeout)
    order = replace(order, as_horovod=as_horovod.is_installed())
    with output.served(context, order) if output is not None else contextlib.nullcontext(order) as served:
        results = BarrierJob(context, served, timeout, watch).run()
    return [pickle.loads(result) for result in results]


def say_once(text: str) -> None:
    """Print a line, unless this process has printed it already."""
    if text not in _printed:
        _printed.add(text)
        say(text)


def say_ignored(what: str, **arguments: tuple[Any, str]) -> None:
    """Report, once per process, arguments that are accepted for compatibility but have no effect.

    Args:
        what: The name of the function or class.
        **arguments: The value of each argument, and the reason. None and "" count as not passed.
    """
    for name, (value, reason) in arguments.items():
        if value not in (None, ""):
            say_once(f"{what} ignores {name}: {reason}")
