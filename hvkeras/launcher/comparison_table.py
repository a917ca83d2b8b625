"""The table of `hvkeras compare`, and the lines under it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from hvkeras.launcher.comparison import ONE_PROCESS, WARM_UP, Number, Result

UNKNOWN, NOT_HERE = "?", "-"


def reference_of(results: Sequence[Result]) -> str:
    """The first backend that ran, by whose weights the others are judged; "" if none did."""
    return next((row.name for row in results if row.name != ONE_PROCESS and not row.reason), "")


def table(results: Sequence[Result], processes: int) -> tuple[Table, list[str]]:
    """Lays the results out.

    Args:
        results: The rows.
        processes: How many ranks the jobs of several ranks had.

    Returns:
        The table, and the notes under it.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    reference = reference_of(results)
    headers = ["backend", "step, ms\n(quartiles)", "samples\nper s", f"share of\n{processes} x one\nprocess",
               "accuracy", "loss", f"weights\nagainst\n{reference}" if reference else "weights"]
    for place, header in enumerate(headers):
        made.add_column(header, justify="right" if place else "left", no_wrap=True, vertical="bottom")
    single = next((row.samples for row in results if row.name == ONE_PROCESS), None)
    reasons: dict[str, int] = {}
    for row in results:
        if row.reason:
            made.add_row(row.name, f"failed ({reasons.setdefault(row.reason, len(reasons) + 1)})")
            continue
        marks = "".join(f" ({reasons.setdefault(remark, len(reasons) + 1)})" for remark in row.remarks)
        made.add_row(row.name, *_cells(row, single, row.name == reference, marks))
    return made, [f"({number}) {reason}" for reason, number in reasons.items()]


def _cells(row: Result, single: float | None, is_reference: bool, marks: str) -> list[str]:
    """All cells but the name."""
    step = UNKNOWN if row.step is None else (f"{_milliseconds(row.step[1])} ({_milliseconds(row.step[0])}"
                                             f"-{_milliseconds(row.step[2])})")
    share = UNKNOWN if row.samples is None or not single else f"{row.samples / (row.processes * single):.0%}"
    if row.difference is None:
        difference = NOT_HERE if is_reference or row.name == ONE_PROCESS else UNKNOWN
    else:
        difference = row.difference if isinstance(row.difference, str) else f"{row.difference:.1e}"
        difference = "0" if row.difference == 0 else difference
    return [step + (marks if row.step is None else ""), _rate(row.samples) + (marks if row.step is not None else ""),
            share, NOT_HERE if row.accuracy is None else f"{row.accuracy.value:.4f}",
            NOT_HERE if row.loss is None else f"{row.loss.value:.4g}", difference]


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rate(samples: float | None) -> str:
    if samples is None:
        return UNKNOWN
    return f"{samples:,.0f}" if samples >= 100 else f"{samples:.3g}"


def explanations(results: Sequence[Result], processes: int, cores: str) -> list[str]:
    """Says what the columns are.

    Args:
        results: The rows.
        processes: How many ranks the jobs of several ranks had.
        cores: What one process computed with, in words, or "".
    """
    reference = reference_of(results)
    lines = [f"step: median and quartiles on rank 0, without the first {WARM_UP} steps",
             "samples: those of all ranks in a typical step, over the median step time",
             f"share: samples per s over {processes} times those of one process{f' ({cores})' if cores else ''}"]
    whats: dict[str, list[str]] = {}
    for what in ("accuracy", "loss"):
        names: dict[str, list[str]] = {}
        for row in results:
            number: Number | None = getattr(row, what)
            if number is not None:
                names.setdefault(number.source, []).append(row.name)
        for source, rows in names.items():
            whats.setdefault(source, []).append(what if len(names) == 1 else f"{what} of {' and '.join(rows)}")
    lines += [f"{', '.join(numbers)}: from {source}" for source, numbers in whats.items()]
    if any(row.difference is not None for row in results):
        lines.append(f"weights: largest difference of a final weight to {reference}'s, over the largest weight")
    return lines
