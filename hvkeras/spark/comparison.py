"""`hvkeras.spark.compare`: compares backends by jobs on Spark."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvkeras.comparison.command import TIMEOUT
from hvkeras.comparison.functions import ComparisonResult, compared, flags_of
from hvkeras.comparison.result import ONE_PROCESS
from hvkeras.comparison.trial import Trial, timeout_message
from hvkeras.errors import HvkerasError
from hvkeras.launcher.calls import pickled_call
from hvkeras.spark.jobs import exported, run_order
from hvkeras.spark.order import Order
from hvkeras.spark.output import DriverOutput
from hvkeras.spark.session import active_context


def compare(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    np: int | Sequence[int] = 2, backends: str | Sequence[str] | None = None, repeat: int = 1, baseline: bool = True,
    timeout: float = TIMEOUT, out: str | Path | None = None, verbose: bool = False,
) -> ComparisonResult:
    """Compares a training function on each backend and on one process, by jobs on Spark.

    It is `hvd.compare`, with ranks in the tasks of the Spark session.

    Example:
        result = hvkeras.spark.compare(train, args=(0.01,), np=4, out="/shared/comparison")

    Args:
        func: The function; it calls `hvd.init()` itself, without a backend.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        np: The number of ranks; several numbers give a scaling curve.
        backends: The backends, in order; by default, all that work in the driver.
        repeat: How often each job runs.
        baseline: Whether to run on one process as well.
        timeout: The time limit of each run, in seconds.
        out: The folder for the report and the ranks' records; all hosts of ranks must share it.
        verbose: Whether to show the output of all ranks.

    Returns:
        The result, with `rows` and `table()`; a notebook displays it as the report.

    Raises:
        UsageError: An argument is wrong, the function cannot be pickled, or there is no Spark session.
        MachineError: No backend works here.
    """
    trial = functools.partial(SparkTrial, context=active_context(), call=pickled_call(func, args, kwargs))
    return compared(func, flags_of(np, backends, repeat, baseline, timeout, None, out, verbose, trial))


@dataclass(frozen=True)
class SparkTrial(Trial):
    """One job of a comparison, on Spark.

    Attributes:
        context: The Spark context.
        call: The function call of each rank.
    """

    context: Any = None
    call: bytes = b""

    def run_job(self, timeout: float, update: Callable[[float], None]) -> str:
        """Runs the job to its end; see `Trial.run_job`."""
        backend = "local" if self.name == ONE_PROCESS else self.name
        further = {"HVKERAS_RECORD": str(self.records), "HVKERAS_BACKEND": backend}
        order = Order(self.call, self.processes, secrets.token_hex(32), exported(self.environment, further))

        def watch(seconds: float) -> None:
            update(seconds)
            if seconds > timeout:
                raise TimeoutError

        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context((self.folder / name).open("w")) for name in ("stdout", "stderr"))
            try:
                run_order(self.context, order, output=DriverOutput(out, err, folder=self.folder), watch=watch)
            except TimeoutError:
                return timeout_message(timeout)
            except HvkerasError as error:
                print(error, file=err)
                return str(error).splitlines()[min(1, str(error).count("\n"))]
        return ""
