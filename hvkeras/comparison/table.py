"""Table of `hvkeras compare`, the notes below it, and a summary in three sentences.

The summary is the fastest backend, the agreement of the results, and the bottleneck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from hvkeras.comparison.result import ONE_PROCESS, SHARED, WARM_UP, Number, compression_of
from hvkeras.comparison.rows import Comparison, Row, reference_of
from hvkeras.diagnostics.findings import COMPARE, limit

UNKNOWN, NOT_APPLICABLE = "?", "-"


def cells(comparison: Comparison) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the cells of the table.

    Returns:
        The headers; the rows, of which failed ones have only two cells; and the notes below the table.
    """
    reference = reference_of(comparison.compared)
    headers = ["backend", "step, ms\n(quartiles)", "samples\nper s"]
    headers[2:2] = ["spread"] if comparison.repeat > 1 else []
    if comparison.single is not None:
        headers.append("speed-up\nover one\nprocess" if comparison.data_parallel else
                       f"share of\n{comparison.processes} x one\nprocess")
    headers += ["accuracy", "loss", f"weights\nagainst\n{reference}" if reference else "weights"]
    headers += ["peak\nmemory,\nMB"] if _has_memory_column(comparison) else []
    headers += ["sent in\na step,\nMB"] if _has_compression(comparison) else []
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
    """Return the table of the results for a terminal."""
    headers, rows, notes = cells(comparison)
    return _laid_out(headers, rows), notes


def _laid_out(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for index, header in enumerate(headers):
        result.add_column(header, justify="right" if index else "left", no_wrap=True, vertical="bottom")
    for row in rows:
        result.add_row(*row)
    return result


def scaling_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the cells of the table of rates by number of processes: the headers, and the rows."""
    relative = "speed-up" if comparison.data_parallel else "share"
    headers = [f"samples per s\n({relative}) on", *(str(size) for size in comparison.sizes)]
    rows = []
    for name in dict.fromkeys(row.name for row in comparison.rows if row.name != ONE_PROCESS):
        own = {row.processes: row for row in comparison.rows if row.name == name}
        rows.append([name, *(_scaling_cell(comparison, own[size]) for size in comparison.sizes)])
    return headers, rows


def _scaling_cell(comparison: Comparison, row: Row) -> str:
    relative = _relative_speed(comparison, row)
    return "failed" if row.reason else rate(row.samples) + (f" ({relative})" if relative else "")


def _relative_speed(comparison: Comparison, row: Row) -> str:
    """Return the speed-up over one process for scripts for one process, otherwise the share; "" if unknown."""
    speed_up, share = comparison.speed_up(row), comparison.share(row)
    if speed_up is None or share is None:
        return ""
    return f"{speed_up:.2f}" if comparison.data_parallel else f"{share:.0%}"


def scaling_table(comparison: Comparison) -> Table:
    """Return the table of rates by number of processes for a terminal."""
    return _laid_out(*scaling_cells(comparison))


def _cells(comparison: Comparison, row: Row, is_reference: bool, marks: str) -> list[str]:
    """Return all cells except the name."""
    step = UNKNOWN if row.step is None else (f"{milliseconds(row.step[1])} ({milliseconds(row.step[0])}"
                                             f"-{milliseconds(row.step[2])})")
    spread = [NOT_APPLICABLE if row.spread is None else f"{row.spread:.0%}"] if comparison.repeat > 1 else []
    shares = [_relative_speed(comparison, row) or UNKNOWN] if comparison.single is not None else []
    if row.difference is None:
        difference = NOT_APPLICABLE if is_reference or row.name == ONE_PROCESS else UNKNOWN
    else:
        difference = row.difference if isinstance(row.difference, str) else f"{row.difference:.1e}"
        difference = "0" if row.difference == 0 else difference
    sent = [(NOT_APPLICABLE if row.name == ONE_PROCESS else UNKNOWN) if row.sent is None else f"{row.sent / 1e6:.3g}"]
    memory = [UNKNOWN if row.peak_memory is None else f"{row.peak_memory / 1e6:,.0f}"]
    return [step + (marks if row.step is None else ""), *spread, rate(row.samples) + (marks if row.step else ""),
            *shares, NOT_APPLICABLE if row.accuracy is None else f"{row.accuracy.value:.4f}",
            NOT_APPLICABLE if row.loss is None else f"{row.loss.value:.4g}", difference,
            *(memory if _has_memory_column(comparison) else []), *(sent if _has_compression(comparison) else [])]


def _has_memory_column(comparison: Comparison) -> bool:
    return any(row.name.endswith(SHARED) for row in comparison.rows)


def _has_compression(comparison: Comparison) -> bool:
    return any(compression_of(row.name) != "none" for row in comparison.rows)


def milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds, with at least three significant digits."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(samples: float | None) -> str:
    """Format samples per second, with at least three significant digits."""
    if samples is None:
        return UNKNOWN
    return f"{samples:,.0f}" if samples >= 100 else f"{samples:.3g}"


def explanations(comparison: Comparison) -> list[str]:
    """Return the explanations of the columns, one per line."""
    shown, reference = comparison.shown, reference_of(comparison.compared)
    over = f", over the steps of {comparison.repeat} runs" if comparison.repeat > 1 else ""
    lines = [f"step: median and quartiles on rank 0, without the first {WARM_UP} steps{over}"]
    if comparison.repeat > 1:
        lines.append("spread: between the medians of the slowest and of the fastest run, over the median step time")
    lines.append("samples: those of all ranks in a typical step, over the median step time")
    if comparison.single is not None and comparison.data_parallel:
        lines.append("speed-up: step time of one process, which uses all cores, over that of the backend; steps have"
                     " the same samples")
    elif comparison.single is not None:
        cores = f" ({comparison.cores})" if comparison.cores else ""
        lines.append(f"share: samples per s over {comparison.processes} times those of one process{cores}")
    by_source: dict[str, list[str]] = {}
    for metric in ("accuracy", "loss"):
        names: dict[str, list[str]] = {}
        for row in shown:
            number: Number | None = getattr(row, metric)
            if number is not None:
                names.setdefault(number.source, []).append(row.name)
        for source, rows in names.items():
            by_source.setdefault(source, []).append(metric if len(names) == 1 else f"{metric} of {' and '.join(rows)}")
    lines += [f"{', '.join(numbers)}: from {source}" for source, numbers in by_source.items()]
    if any(row.difference is not None for row in shown):
        first = "'s first run" if comparison.repeat > 1 else "'s"
        lines.append(f"weights: largest difference of a final weight to {reference}{first}, over the largest weight")
    lines += ["memory: that of the rank that needed the most memory"] * _has_memory_column(comparison)
    lines += ["sent: bytes that rank 0's host sends over its network cards, other programs' included"
              ] * _has_compression(comparison)
    lines += _compiling(shown)
    if "load_before" in comparison.machine:
        lines.append(f"machine: {comparison.machine['cpu']}, {len(comparison.machine['cores'])} cores, load before the"
                     f" first run: {comparison.machine['load_before'][0]:.1f}")
    return lines


def _compiling(rows: Sequence[Row]) -> list[str]:
    seconds = {row.name: max((run.compiling for run in row.good), default=0.0) for row in rows}
    known = [f"{name} {longest:.1f} s" for name, longest in seconds.items() if longest]
    return [f"compiling of the optimizer's update, not a part of any step: {', '.join(known)}"] if known else []


# Sums in another order differ in their last bits, which training amplifies. A difference up to this fraction of the
# largest weight counts as a rounding error.
TOLERANCE = 1e-3
LOSS_TOLERANCE = 0.01  # as a fraction of the loss


def sentences(comparison: Comparison) -> list[str]:
    """Return the summary of a report in three sentences."""
    return [speed(comparison), agreement(comparison), bottleneck(comparison)]


IDLE = 0.15  # fraction of the cores that other processes use on a machine that counts as idle


def warnings(comparison: Comparison) -> list[str]:
    """Return what makes the times of a comparison doubtful: other processes' load, and ranks that share cores."""
    runs = [run for row in comparison.rows for run in row.good]
    shared = list(dict.fromkeys(text for run in runs for text in run.oversubscription))
    machine = comparison.machine
    before = machine.get("busy_before", 0.0)
    busiest = max(runs, key=lambda run: run.other_load, default=None)
    during = busiest.other_load if busiest is not None else 0.0
    if max(before, during) < IDLE:
        return shared
    load = f" (load average {machine['load_before'][0]:.1f} on {len(machine['cores'])} cores)" if before >= IDLE else ""
    parts = [f"{before:.0%} of the cores before the first run{load}"] * (before >= IDLE)
    if busiest is not None and during >= IDLE:
        parts.append(f"up to {during:.0%} during the runs, most with {busiest.name}")
    again = "" if comparison.repeat > 1 else ", and use --repeat 3"
    busy = (f"The machine was not idle: other processes used {', and '.join(parts)}. Differences between backends may"
            f" come from this load. End the other processes before you compare{again}.")
    return [*shared, busy]


def speed(comparison: Comparison) -> str:
    """Return a sentence on the fastest backend, and by how much it was faster."""
    timed = sorted((row for row in comparison.compared if row.step is not None), key=_median)
    on = f"on {comparison.processes} processes"
    if not timed:
        if reference_of(comparison.compared):
            return f"How fast the backends are {on} is not known, as no step was timed: the table gives the reason."
        return f"No backend ran {on}: the table gives the reason."
    fastest, *others = timed
    if not others:
        alone = "no other backend ran" if len(comparison.compared) > 1 else "no other backend was asked for"
        return f"{fastest.name} took {_step_text(fastest)} {on}; {alone}."
    similar = [row for row in others if _ranges_overlap(fastest, row)]
    slower = [row for row in others if row not in similar]
    if similar:
        names = " and ".join(_name_and_step(row) for row in [fastest, *similar])
        sentence = f"There is no clear difference {on} between {names}: their spreads overlap"
        more = "" if comparison.repeat > 1 else "; --repeat 3 shows how much runs vary"
        return sentence + "".join(f"; {_slower_text(fastest, row)}" for row in slower) + f"{more}."
    return (f"{fastest.name} was the fastest {on}, with {_step_text(fastest)}: "
            + ", and ".join(_slower_text(fastest, row) for row in slower) + ".")


def _median(row: Row) -> float:
    return math.inf if row.step is None else row.step[1]


def _name_and_step(row: Row) -> str:
    return f"{row.name} ({_step_text(row)})"


def _step_text(row: Row) -> str:
    if row.range is None:
        return "a step time that is not known"
    low, high = row.range
    over = f"in {len(row.medians)} runs" if len(row.medians) > 1 else "in half of the steps"
    return f"{milliseconds(_median(row))} ms per step, {milliseconds(low)} to {milliseconds(high)} {over}"


def _slower_text(fastest: Row, row: Row) -> str:
    return f"{row.name} took {_median(row) / _median(fastest):.2g} times as long ({_step_text(row)})"


def _ranges_overlap(one: Row, other: Row) -> bool:
    if one.range is None or other.range is None:
        return False
    return one.range[0] <= other.range[1] and other.range[0] <= one.range[1]


def agreement(comparison: Comparison) -> str:
    """Return a sentence on whether the backends produced the same weights and loss."""
    ran = [row for row in comparison.compared if not row.reason]
    reference = reference_of(ran)
    exact = compression_of(reference or "") == "none"
    compressed = [row for row in ran if exact and compression_of(row.name) != "none"]
    ran = [row for row in ran if row not in compressed]
    beside = _compressed_losses(ran, compressed)
    others = [row for row in ran if row.name != reference]
    if not others and beside:
        return beside
    if beside:
        return f"{_agreement(ran, others, reference)} {beside}"
    return _agreement(ran, others, reference)


def _compressed_losses(exact: list[Row], compressed: list[Row]) -> str:
    """Return a sentence on the final losses of compressed runs beside the exact ones; "" without any."""
    losses = [f"{row.loss.value:.4g} with {row.name}" for row in compressed if row.loss is not None]
    known = [f"{row.loss.value:.4g} with {row.name}" for row in exact if row.loss is not None]
    if not losses or not known:
        return ""
    return (f"Compression changes the weights: the final loss is {', '.join(losses)}, and {known[0]}. Other seeds show"
            " how much a loss varies by itself.")


def _agreement(ran: list[Row], others: list[Row], reference: str | None) -> str:
    if not others:
        return "Whether the results agree cannot be determined with fewer than two backends that ran."
    text = [f"{row.name}'s are {row.difference}" for row in others if isinstance(row.difference, str)]
    if text:
        return f"The results do not agree: the weights cannot be compared with {reference}'s ({', '.join(text)})."
    known = [row.difference for row in others if isinstance(row.difference, float)]
    similar, losses = _losses(ran)
    if not known:
        return f"Whether the weights agree is not known, as none were recorded{losses}."
    largest = max(known)
    own = next((row.difference for row in ran if row.name == reference), None)
    noise = own if isinstance(own, float) else 0.0
    if largest <= TOLERANCE and similar:
        if largest == 0:
            return f"The results agree: all backends end with the same weights, to the last bit{losses}."
        return (f"The results agree: final weights differ by at most {largest:.1e} of the largest one, as sums in"
                f" another order do{losses}.")
    if largest <= TOLERANCE:
        return f"The final weights agree (to {largest:.1e} of the largest one){losses}."
    if largest <= 2 * noise:
        return (f"Whether the results agree cannot be determined, as the script is not reproducible: {reference}'s own"
                f" runs end with weights that differ by {noise:.1e} of the largest one, and the backends differ no"
                f" more ({largest:.1e}){losses}; set seeds to find out.")
    furthest = next(row.name for row in others if row.difference == largest)
    return (f"The results do not agree: {furthest}'s final weights differ from {reference}'s by {largest:.1e} of the"
            f" largest one{losses}; unless the script sets no seeds, do not trust its speed.")


def _losses(rows: list[Row]) -> tuple[bool, str]:
    """Return whether the final losses agree or are unknown, and their values as the end of a sentence."""
    values = [row.loss.value for row in rows if row.loss is not None]
    if len(values) < 2:
        return True, ""
    if not all(map(math.isfinite, values)):
        return False, ", but not all losses are finite"
    low, high = min(values), max(values)
    text = f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}"
    if high - low <= LOSS_TOLERANCE * max(abs(low), abs(high)):
        return True, f", and the final loss is {text}"
    return False, f", but the final losses are {text}"


def bottleneck(comparison: Comparison) -> str:
    """Return a sentence on the bottleneck of the fastest backend, with advice."""
    timed = sorted((row for row in comparison.compared if row.step is not None), key=_median)
    if not timed:
        return "What limits the job is not known, as no step was timed."
    fastest = timed[0]
    share, speed_up = comparison.share(fastest), comparison.speed_up(fastest)
    size = comparison.processes
    if share is None or speed_up is None:
        efficiency = ""
    elif comparison.data_parallel:
        efficiency = f"With {fastest.name}, {size} processes train {_times(speed_up)} one process. "
    else:
        efficiency = (f"With {fastest.name}, the scaling efficiency on {size} processes is {share:.0%}"
                      f"{_slower(speed_up)}. ")
    first = fastest.good[0]
    limits = sorted(first.limits, key=lambda finding: finding.what == "pauses")  # last, as pauses are between the steps
    text = limit(first.splits, limits, comparison.command).replace(COMPARE, "")
    return (efficiency + text).strip() or "What limits the job is not known, as its step time could not be split."


def _times(speed: float) -> str:
    return f"{speed:.2f} times as fast as" if speed >= 0.995 else f"more slowly, at {speed:.2f} times the speed of"


def _slower(speed: float) -> str:
    return f": they are slower than one, with {speed:.2g} times its samples per second" if speed < 0.995 else ""
