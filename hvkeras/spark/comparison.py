"""`hvkeras.spark.compare`: compares backends with jobs on Spark."""

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
    """Compare a training function on each backend and in a single process, with jobs on Spark.

    This is `hvd.compare` with ranks in the tasks of the Spark session.

    Example:
        result = hvkeras.spark.compare(train, args=(0.01,), np=4, out="/shared/comparison")

    Args:
        func: The function; it must call `hvd.init()`, without a backend.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        np: The number of ranks; several numbers yield a scaling curve.
        backends: The backends, in order; by default, all that are available in the driver.
        repeat: The number of runs of each job.
        baseline: Whether to run in a single process as well.
        timeout: The time limit of each run in seconds.
        out: The folder for the report and the ranks' records, on storage that all hosts of ranks share.
        verbose: Whether to show the output of all ranks.

    Returns:
        The result, with `rows` and `table()`; notebooks display it as a report.

    Raises:
        UsageError: An argument is invalid, the function cannot be pickled, or there is no Spark session.
        MachineError: No backend is available.
    """
    trial = functools.partial(SparkTrial, context=active_context(), call=pickled_call(func, args, kwargs))
    return compared(func, flags_of(np, backends, repeat, baseline, timeout, None, out, verbose, trial))


@dataclass(frozen=True)
class SparkTrial(Trial):
    """One job of a comparison, on Spark.

    Attributes:
        context: The Spark context.
        call: The pickled function call of each rank.
    """

    context: Any = None
    call: bytes = b""

    def run_job(self, timeout: float, update: Callable[[float], None]) -> str:
        """Run the job until it ends; see `Trial.run_job`."""
        backend = "local" if self.name == ONE_PROCESS else self.name
        extra = {"HVKERAS_RECORD": str(self.records), "HVKERAS_BACKEND": backend}
        order = Order(self.call, self.processes, secrets.token_hex(32), exported(self.environment, extra))

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
