"""Summary at the end of a failed test session: failed tests, commands to rerun them, and the failing ranks' logs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import schedule
from harness.job import LaunchError, Outcome, recent

LOG = "log of the failing rank"  # section of a pytest report
_MAX_FAILURES = 3  # failures in the summary


class FailureReport:
    """Pytest plugin of the main process.

    Args:
        write_times: Whether to write the durations of groups of tests, for `harness.schedule`.
    """

    def __init__(self, write_times: bool) -> None:
        self._write_times = write_times
        self._times: Counter[str] = Counter()
        self._failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record failures and durations."""
        if report.failed:
            self._failed.append(report)
        self._times[getattr(report, "group", "")] += report.duration  # type: ignore[assignment]

    def pytest_unconfigure(self) -> None:
        """Write the durations, and print the summary last."""
        if self._write_times:
            schedule.write_times(self._times)
        if self._failed:
            print(summary(self._failed))


def log_of(item: pytest.Item, error: BaseException | None) -> str:
    """Return the log of the failing rank or of rank 0, from the test's outcome or its last job."""
    if isinstance(error, LaunchError) and error.outcome is not None:
        return error.outcome.failing_log()
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    found = [value for value in arguments.values() if isinstance(value, Outcome)] or list(recent[-1:])
    return found[-1].failing_log() if found else ""


def summary(reports: Sequence[pytest.TestReport]) -> str:
    """Return the summary of failed tests."""
    lines = []
    for report in reports[:_MAX_FAILURES]:
        lines += ["", f"FAILED {report.nodeid} ({report.when})"]
        lines += [text.rstrip() for name, text in report.sections if name == LOG and text]
        lines += [f"to rerun: {_pytest()} '{report.nodeid}'"]
    return "\n".join(lines)


def _pytest() -> str:
    folder = Path(os.path.relpath(Path(sys.prefix) / "bin"))
    return str(folder / "pytest")
