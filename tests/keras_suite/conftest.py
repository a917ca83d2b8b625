"""Prints how many of Keras's tests passed in each group."""

from __future__ import annotations

import pytest

_SUMMARY = "keras_suite"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a line for each group."""
    reports = [report for found in terminalreporter.stats.values() for report in found
               if isinstance(report, pytest.TestReport) and report.when == "call"]
    lines = {f"{report.nodeid.partition('[')[2][:-1]}: {text}, in {report.duration:.0f} s"
             for report in reports for name, text in report.user_properties if name == _SUMMARY}
    if lines:
        terminalreporter.section("Keras's tests")
        for line in sorted(lines):
            terminalreporter.line(line)
