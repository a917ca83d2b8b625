"""`hvkeras.compare`: compare a Python function on each backend and on one process, from a script or a notebook."""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hvkeras.comparison import report, results_file
from hvkeras.comparison.command import TIMEOUT, WIDEST, comparison_of, print_table
from hvkeras.comparison.rows import Comparison
from hvkeras.comparison.trial import Trial, progress_display
from hvkeras.diagnostics.charts import missing
from hvkeras.diagnostics.html_page import fragment
from hvkeras.errors import UsageError, explain
from hvkeras.launcher.functions import command_of
from hvkeras.launcher.placement import place_ranks


class ComparisonResult:
    """Result of `hvkeras.compare`: shown as a table in a terminal, and as the report with charts in a notebook.

    Attributes:
        rows: A dictionary for each backend and number of processes, for `pandas.DataFrame(result.rows)`; the names
            are those of `results.json`.
        runs: A dictionary for each run, with the names of `results.json`.
        sentences: A summary: the fastest backend, the agreement of the results, and the bottleneck.
        folder: The folder of `report.html`, `results.json`, the charts and the output of all ranks.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        written = results_file.document(comparison)
        self.rows: list[dict[str, Any]] = written["rows"]
        self.runs: list[dict[str, Any]] = written["runs"]
        self.sentences: list[str] = written["sentences"]
        self.folder: Path = comparison.folder

    def table(self) -> str:
        """Return the table of `hvkeras compare` as text, with an explanation of its columns."""
        screen = io.StringIO()
        print_table(self._comparison, Console(file=screen, highlight=False, soft_wrap=True, width=WIDEST,
                                                force_jupyter=False))  # otherwise rich would show it in the cell
        return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        drawn = {} if missing() else report.charts(self._comparison)
        return fragment(report.summary(self._comparison), report.sections(self._comparison, drawn))


def compare(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    np: int | Sequence[int] = 2, backends: str | Sequence[str] | None = None, repeat: int = 1, baseline: bool = True,
    timeout: float = TIMEOUT, hosts: str | None = None, out: str | Path | None = None, verbose: bool = False,
) -> ComparisonResult:
    """Run a training function on each backend and on one process, and compare their speed and results.

    This is `hvkeras compare` for a function, which is sent to the processes as by `hvkeras.run`. The function
    must call `hvd.init()` itself, without a backend, and train with a distributed optimizer or tape. Its return value
    is discarded.

    Example:
        def train(rate):
            hvd.init()
            ...

        result = hvd.compare(train, args=(0.01,), np=2, repeat=3)
        pandas.DataFrame(result.rows)

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        np: The number of processes; several numbers give a scaling curve.
        backends: The backends, in order; by default, all that are available.
        repeat: The number of runs of each job.
        baseline: Whether to run on one process as well.
        timeout: The time limit of each run, in seconds.
        hosts: As in `hvkeras run -H`; all hosts must then share the current folder and `out`.
        out: The folder for the report and the output of all ranks; by default, a new temporary folder.
        verbose: Whether to show the output of all ranks.

    Returns:
        The result, with `rows` and `table()`; a notebook displays it as the report.

    Raises:
        UsageError: An argument is wrong, or the function cannot be pickled.
        MachineError: No backend works here.
    """
    flags = flags_of(np, backends, repeat, baseline, timeout, hosts, out, verbose)
    remote = not all(host.local for host in place_ranks(max(flags.np, default=1), hosts, None))
    with tempfile.TemporaryDirectory(prefix=".hvkeras-compare-", dir="." if remote else None) as folder:
        flags.command = command_of(func, args, kwargs, Path(folder).absolute())
        return compared(func, flags)


def flags_of(
    np: int | Sequence[int], backends: str | Sequence[str] | None, repeat: int, baseline: bool, timeout: float,
    hosts: str | None, out: str | Path | None, verbose: bool, trial: Callable[..., Trial] = Trial,
) -> argparse.Namespace:
    """Return the flags of `hvkeras compare` for the arguments of `compare`.

    Args:
        np: See `compare`, like all arguments but `trial`.
        backends: See `compare`.
        repeat: See `compare`.
        baseline: See `compare`.
        timeout: See `compare`.
        hosts: See `compare`.
        out: See `compare`.
        verbose: See `compare`.
        trial: Class of a run.

    Raises:
        UsageError: An argument is wrong.
    """
    sizes = (np,) if isinstance(np, int) else tuple(np)
    if not all(isinstance(number, int) and number > 0 for number in (*sizes, repeat)) or not timeout > 0:
        raise UsageError(explain("Processes, repeats and seconds must be positive", "np=2, repeat=3", np=np,
                                 repeat=repeat, timeout=timeout))
    return argparse.Namespace(
        np=tuple(sorted(set(sizes))), baseline=baseline, repeat=repeat, timeout=timeout, hosts=hosts, shard_update=(),
        compression=(),
        backends=backends if backends is None or isinstance(backends, str) else ",".join(backends),
        out=None if out is None else str(out), verbose=verbose, data_parallel=False, preload=True, trial=trial,
        command=())


def compared(func: Callable[..., Any], flags: argparse.Namespace) -> ComparisonResult:
    """Run the comparison of a function.

    Raises:
        MachineError: No backend works here.
    """
    return ComparisonResult(comparison_of(flags, progress_display(), f"{getattr(func, '__qualname__', repr(func))}()"))
