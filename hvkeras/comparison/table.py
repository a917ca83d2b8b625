"""The table of `hvkeras compare`, and the notes below it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from hvkeras.comparison.result import ONE_PROCESS, SHARED, WARM_UP, Number
from hvkeras.comparison.rows import Comparison, Row, reference_of

UNKNOWN, NOT_HERE = "?", "-"


def cells(comparison: Comparison) -> tuple[list[str], list[list[str]], list[str]]:
    """Formats the results.

    Args:
        comparison: The comparison.

    Returns:
        The headers; the rows, where a failed one has only two cells; and the notes below them.
    """
    reference = reference_of(comparison.compared)
    headers = ["backend", "step, ms\n(quartiles)", "samples\nper s"]
    headers[2:2] = ["spread"] if comparison.repeat > 1 else []
    if comparison.single is not None:
        headers.append(f"share of\n{comparison.processes} x one\nprocess")
    headers += ["accuracy", "loss", f"weights\nagainst\n{reference}" if reference else "weights"]
    headers += ["peak\nmemory,\nMB"] if _compares_memory(comparison) else []
    reasons: dict[str, int] = {}
    rows = []
    for row in comparison.shown:
        if row.reason:
            rows.append([row.name, f"failed ({reasons.setdefault(row.reason, len(reasons) + 1)})"])
            continue
        marks = "".join(f" ({reasons.setdefault(remark, len(reasons) + 1)})" for remark in row.remarks)
        rows.append([row.name, *_cells(comparison, row, row.name == reference, marks)])
    return headers, rows, [f"({number}) {reason}" for reason, number in reasons.items()]


def table(comparison: Comparison) -> tuple[Table, list[str]]:
    """Builds the table of the results for a terminal.

    Args:
        comparison: The comparison.

    Returns:
        The table, and the notes below it.
    """
    headers, rows, notes = cells(comparison)
    return _laid_out(headers, rows), notes


def _laid_out(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for place, header in enumerate(headers):
        made.add_column(header, justify="right" if place else "left", no_wrap=True, vertical="bottom")
    for row in rows:
        made.add_row(*row)
    return made


def scaling_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Formats the rates of the backends on each number of processes: the headers, and the rows."""
    headers = ["samples per s\n(share) on", *(str(size) for size in comparison.sizes)]
    rows = []
    for name in dict.fromkeys(row.name for row in comparison.rows if row.name != ONE_PROCESS):
        own = {row.processes: row for row in comparison.rows if row.name == name}
        rows.append([name, *(_scaling_cell(comparison, own[size]) for size in comparison.sizes)])
    return headers, rows


def _scaling_cell(comparison: Comparison, row: Row) -> str:
    share = comparison.share(row)
    return "failed" if row.reason else rate(row.samples) + (f" ({share:.0%})" if share is not None else "")


def scaling_table(comparison: Comparison) -> Table:
    """Builds the table of the backends' rates on each number of processes."""
    return _laid_out(*scaling_cells(comparison))


def _cells(comparison: Comparison, row: Row, is_reference: bool, marks: str) -> list[str]:
    """All cells except the name."""
    step = UNKNOWN if row.step is None else (f"{milliseconds(row.step[1])} ({milliseconds(row.step[0])}"
                                             f"-{milliseconds(row.step[2])})")
    spread = [NOT_HERE if row.spread is None else f"{row.spread:.0%}"] if comparison.repeat > 1 else []
    share = comparison.share(row)
    shares = [UNKNOWN if share is None else f"{share:.0%}"] if comparison.single is not None else []
    if row.difference is None:
        difference = NOT_HERE if is_reference or row.name == ONE_PROCESS else UNKNOWN
    else:
        difference = row.difference if isinstance(row.difference, str) else f"{row.difference:.1e}"
        difference = "0" if row.difference == 0 else difference
    memory = [UNKNOWN if row.peak_memory is None else f"{row.peak_memory / 1e6:,.0f}"]
    return [step + (marks if row.step is None else ""), *spread, rate(row.samples) + (marks if row.step else ""),
            *shares, NOT_HERE if row.accuracy is None else f"{row.accuracy.value:.4f}",
            NOT_HERE if row.loss is None else f"{row.loss.value:.4g}", difference,
            *(memory if _compares_memory(comparison) else [])]


def _compares_memory(comparison: Comparison) -> bool:
    """Whether the comparison is one of memory as well: with and without a shared update."""
    return any(row.name.endswith(SHARED) for row in comparison.rows)


def milliseconds(seconds: float) -> str:
    """Formats a duration in milliseconds, with at least three significant digits."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(samples: float | None) -> str:
    """Formats samples per second, with at least three significant digits."""
    if samples is None:
        return UNKNOWN
    return f"{samples:,.0f}" if samples >= 100 else f"{samples:.3g}"


def explanations(comparison: Comparison) -> list[str]:
    """Explains the columns.

    Args:
        comparison: The comparison.
    """
    shown, reference = comparison.shown, reference_of(comparison.compared)
    over = f", over the steps of {comparison.repeat} runs" if comparison.repeat > 1 else ""
    lines = [f"step: median and quartiles on rank 0, without the first {WARM_UP} steps{over}"]
    if comparison.repeat > 1:
        lines.append("spread: between the medians of the slowest and of the fastest run, over the median step time")
    lines.append("samples: those of all ranks in a typical step, over the median step time")
    if comparison.single is not None:
        cores = f" ({comparison.cores})" if comparison.cores else ""
        lines.append(f"share: samples per s over {comparison.processes} times those of one process{cores}")
    whats: dict[str, list[str]] = {}
    for what in ("accuracy", "loss"):
        names: dict[str, list[str]] = {}
        for row in shown:
            number: Number | None = getattr(row, what)
            if number is not None:
                names.setdefault(number.source, []).append(row.name)
        for source, rows in names.items():
            whats.setdefault(source, []).append(what if len(names) == 1 else f"{what} of {' and '.join(rows)}")
    lines += [f"{', '.join(numbers)}: from {source}" for source, numbers in whats.items()]
    if any(row.difference is not None for row in shown):
        first = "'s first run" if comparison.repeat > 1 else "'s"
        lines.append(f"weights: largest difference of a final weight to {reference}{first}, over the largest weight")
    lines += ["memory: that of the rank that needed the most memory"] * _compares_memory(comparison)
    lines += _compiling(shown)
    if "load_before" in comparison.machine:
        lines.append(f"machine: {comparison.machine['cpu']}, {len(comparison.machine['cores'])} cores, load before the"
                     f" first run: {comparison.machine['load_before'][0]:.1f}")
    return lines


def _compiling(rows: Sequence[Row]) -> list[str]:
    """How long XLA compiled the update of the optimizer, if it did."""
    seconds = {row.name: max((run.compiling for run in row.good), default=0.0) for row in rows}
    known = [f"{name} {longest:.1f} s" for name, longest in seconds.items() if longest]
    return [f"compiling of the optimizer's update, not a part of any step: {', '.join(known)}"] if known else []
