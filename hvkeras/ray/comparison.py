"""`hvkeras.ray.compare`: compares backends with jobs on a Ray cluster."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hvkeras as hvd
from hvkeras.comparison.command import TIMEOUT
from hvkeras.comparison.functions import ComparisonResult, compared, flags_of
from hvkeras.comparison.result import ONE_PROCESS
from hvkeras.comparison.trial import TICK, Trial, timeout_message
from hvkeras.errors import HvkerasError
from hvkeras.ray.executor import RayExecutor
from hvkeras.ray.job import RankError
from hvkeras.ray.ray_settings import RaySettings, require_ray
from hvkeras.settings import PREFIX

STOP_WITHIN = 10.0  # seconds for the thread of a terminated job to return


def compare(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    np: int | Sequence[int] = 2, backends: str | Sequence[str] | None = None, repeat: int = 1, baseline: bool = True,
    timeout: float = TIMEOUT, out: str | Path | None = None, verbose: bool = False,
    settings: RaySettings | None = None, **executor: Any,
) -> ComparisonResult:
    """Compare a training function on each backend and in a single process, with jobs on Ray.

    This is `hvd.compare` with ranks in the workers of executors, which Ray packs onto few nodes.

    Example:
        ray.init("auto")
        result = hvkeras.ray.compare(train, args=(0.01,), np=4, out="/shared/comparison", cpus_per_worker=2)

    Args:
        func: The function; it must call `hvd.init()`, without a backend.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        np: The number of ranks; several numbers yield a scaling curve.
        backends: The backends, in order; by default, all that are available in the driver.
        repeat: The number of runs of each job.
        baseline: Whether to run in a single process as well.
        timeout: The time limit of each run in seconds.
        out: The folder for the report and the ranks' records, on storage that all nodes share.
        verbose: Whether Ray shows the output of all ranks, which otherwise goes to files in that folder.
        settings: Settings of the executors, as returned by `RayExecutor.create_settings`.
        **executor: Additional arguments of `RayExecutor`, such as `cpus_per_worker`.

    Returns:
        The result, with `rows` and `table()`; notebooks display it as a report.

    Raises:
        NotInstalledError: Ray is not installed.
        UsageError: An argument is invalid.
        MachineError: No backend is available.
    """
    require_ray()
    trial = functools.partial(RayTrial, call=functools.partial(func, *args, **(kwargs or {})), settings=settings,
                              options=executor, shown=verbose)
    return compared(func, flags_of(np, backends, repeat, baseline, timeout, None, out, verbose, trial))


@dataclass(frozen=True)
class RayTrial(Trial):
    """One job of a comparison, on Ray.

    Attributes:
        call: The function of each rank.
        settings: Settings of the executor.
        options: Additional arguments of the executor.
        shown: Whether Ray shows the output of all ranks.
    """

    call: Callable[[], Any] = print
    settings: RaySettings | None = None
    options: Mapping[str, Any] | None = None
    shown: bool = False

    def run_job(self, timeout: float, update: Callable[[float], None]) -> str:
        """Run the job until it ends; see `Trial.run_job`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("stdout", "stderr"):
            (self.folder / name).touch()
        variables = {name: value for name, value in self.environment.items() if name.startswith(PREFIX)}
        variables[f"{PREFIX}BACKEND"] = "local" if self.name == ONE_PROCESS else self.name
        executor = RayExecutor(self.settings, num_workers=self.processes, **(self.options or {}))
        errors: list[str] = []

        def work() -> None:
            try:
                executor.start(extra_env_vars=variables)
                executor.run(_recorded, [self.call, "" if self.shown else str(self.folder.absolute())])
            except RankError as error:
                errors.append(error.cause.sentence())
            except HvkerasError as error:
                errors.append(str(error))

        thread = threading.Thread(target=work, name="hvkeras-ray-compare", daemon=True)
        started_at = time.monotonic()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(TICK)
                update(time.monotonic() - started_at)
                if time.monotonic() - started_at > timeout:
                    return timeout_message(timeout)
        finally:
            executor.shutdown()
            thread.join(STOP_WITHIN)
        return errors[0] if errors else ""


def _recorded(call: Callable[[], Any], folder: str) -> None:
    """Call the function on a rank, with its output redirected to files in the folder; "" for no redirection."""
    if folder:
        rank_folder = Path(folder) / f"rank.{os.environ['HVKERAS_RUN_RANK']}"
        rank_folder.mkdir(parents=True, exist_ok=True)
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, (rank_folder / name).open("w", buffering=1))
            os.dup2(getattr(sys, name).fileno(), descriptor)
    call()
    hvd.shutdown()  # completes the record before the driver terminates this process
