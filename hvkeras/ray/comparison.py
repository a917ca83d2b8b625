"""`hvkeras.ray.compare`: compares backends by jobs on a Ray cluster."""

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

STOP_WITHIN = 10.0  # seconds for a job that was ended to say so


def compare(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    np: int | Sequence[int] = 2, backends: str | Sequence[str] | None = None, repeat: int = 1, baseline: bool = True,
    timeout: float = TIMEOUT, out: str | Path | None = None, verbose: bool = False,
    settings: RaySettings | None = None, **executor: Any,
) -> ComparisonResult:
    """Compares a training function on each backend and on one process, by jobs on Ray.

    It is `hvd.compare`, with ranks in the workers of executors, which Ray packs onto few nodes.

    Example:
        ray.init("auto")
        result = hvkeras.ray.compare(train, args=(0.01,), np=4, out="/shared/comparison", cpus_per_worker=2)

    Args:
        func: The function; it calls `hvd.init()` itself, without a backend.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        np: The number of ranks; several numbers give a scaling curve.
        backends: The backends, in order; by default, all that work in the driver.
        repeat: How often each job runs.
        baseline: Whether to run on one process as well.
        timeout: The time limit of each run, in seconds.
        out: The folder for the report and the ranks' records; all nodes must share it.
        verbose: Whether Ray shows the output of all ranks, which otherwise goes to files in that folder.
        settings: Settings of the executors: what `RayExecutor.create_settings` returns.
        **executor: Further arguments of `RayExecutor`, such as `cpus_per_worker`.

    Returns:
        The result, with `rows` and `table()`; a notebook displays it as the report.

    Raises:
        NotInstalledError: Ray is not installed.
        UsageError: An argument is wrong.
        MachineError: No backend works here.
    """
    require_ray()
    trial = functools.partial(RayTrial, call=functools.partial(func, *args, **(kwargs or {})), settings=settings,
                              options=executor, shown=verbose)
    return compared(func, flags_of(np, backends, repeat, baseline, timeout, None, out, verbose, trial))


@dataclass(frozen=True)
class RayTrial(Trial):
    """One job of a comparison, on Ray.

    Attributes:
        call: What each rank calls.
        settings: Settings of its executor.
        options: Further arguments of the executor.
        shown: Whether Ray shows the output of all ranks.
    """

    call: Callable[[], Any] = print
    settings: RaySettings | None = None
    options: Mapping[str, Any] | None = None
    shown: bool = False

    def run_job(self, timeout: float, update: Callable[[float], None]) -> str:
        """Runs the job to its end; see `Trial.run_job`."""
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
        begun = time.monotonic()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(TICK)
                update(time.monotonic() - begun)
                if time.monotonic() - begun > timeout:
                    return timeout_message(timeout)
        finally:
            executor.shutdown()
            thread.join(STOP_WITHIN)
        return errors[0] if errors else ""


def _recorded(call: Callable[[], Any], folder: str) -> None:
    """Makes the call on a rank, whose output goes to files in the folder, if there is one."""
    if folder:
        own = Path(folder) / f"rank.{os.environ['HVKERAS_RUN_RANK']}"
        own.mkdir(parents=True, exist_ok=True)
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, (own / name).open("w", buffering=1))
            os.dup2(getattr(sys, name).fileno(), descriptor)
    call()
    hvd.shutdown()  # completes the record before this rank's process may be ended
