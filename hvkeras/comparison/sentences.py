"""A comparison in three sentences: which backend is fastest, whether the results agree, and what limits the job."""

from __future__ import annotations

import math

from hvkeras.comparison.result import ONE_PROCESS
from hvkeras.comparison.rows import Comparison, Row, reference_of
from hvkeras.comparison.table import milliseconds
from hvkeras.diagnostics.findings import COMPARE, limit

# Sums in a different order differ in their last bits, and training amplifies that. A difference up to this fraction of
# the largest weight counts as rounding, not as a different result.
TOLERANCE = 1e-3
LOSS_TOLERANCE = 0.01  # of the loss


def sentences(comparison: Comparison) -> list[str]:
    """The three sentences at the beginning of a report.

    Args:
        comparison: The comparison.
    """
    return [speed(comparison), agreement(comparison), bottleneck(comparison)]


def speed(comparison: Comparison) -> str:
    """Which backend was the fastest, and by how much."""
    timed = sorted((row for row in comparison.compared if row.step is not None), key=_median)
    on = f"on {comparison.processes} processes"
    if not timed:
        if reference_of(comparison.compared):
            return f"How fast the backends are {on} is not known, as no step was timed: the table gives the reason."
        return f"No backend ran {on}: the table gives the reason."
    fastest, *others = timed
    if not others:
        alone = "no other backend ran" if len(comparison.compared) > 1 else "no other backend was asked for"
        return f"{fastest.name} took {_step_of(fastest)} {on}; {alone}."
    similar = [row for row in others if _overlap(fastest, row)]
    slower = [row for row in others if row not in similar]
    if similar:
        names = " and ".join(_with_step(row) for row in [fastest, *similar])
        sentence = f"There is no clear difference {on} between {names}: their spreads overlap"
        return sentence + "".join(f"; {_times(fastest, row)}" for row in slower) + "."
    return (f"{fastest.name} was the fastest {on}, with {_step_of(fastest)}: "
            + ", and ".join(_times(fastest, row) for row in slower) + ".")


def _median(row: Row) -> float:
    return math.inf if row.step is None else row.step[1]


def _with_step(row: Row) -> str:
    return f"{row.name} ({_step_of(row)})"


def _step_of(row: Row) -> str:
    """A row's step time and its spread."""
    if row.range is None:
        return "a step time that is not known"
    low, high = row.range
    over = f"in {len(row.medians)} runs" if len(row.medians) > 1 else "in half of the steps"
    return f"{milliseconds(_median(row))} ms per step, {milliseconds(low)} to {milliseconds(high)} {over}"


def _times(fastest: Row, row: Row) -> str:
    return f"{row.name} took {_median(row) / _median(fastest):.2g} times as long ({_step_of(row)})"


def _overlap(one: Row, other: Row) -> bool:
    if one.range is None or other.range is None:
        return False
    return one.range[0] <= other.range[1] and other.range[0] <= one.range[1]


def agreement(comparison: Comparison) -> str:
    """Whether the backends produced the same weights and the same loss."""
    ran = [row for row in comparison.compared if not row.reason]
    reference = reference_of(ran)
    others = [row for row in ran if row.name != reference]
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
    """Whether the final losses agree or are unknown; and their values, as the end of a sentence."""
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
    """What limits the job on the fastest backend, and what to try."""
    timed = sorted((row for row in comparison.compared if row.step is not None), key=_median)
    if not timed:
        return "What limits the job is not known, as no step was timed."
    fastest = timed[0]
    share = comparison.share(fastest)
    size = comparison.processes
    kept = "" if share is None else (f"With {fastest.name}, {size} processes do {share:.0%} of {size} times what"
                                     f" {ONE_PROCESS} does{_slower(share * size)}. ")
    first = fastest.good[0]
    limits = sorted(first.limits, key=lambda finding: finding.what == "pauses")  # pauses lie between the steps
    text = limit(first.splits, limits).replace(COMPARE, "")
    return (kept + text).strip() or "What limits the job is not known, as the time of its steps could not be split."


def _slower(speed: float) -> str:
    """Says that several processes are slower than one if their speed, relative to one, is below 1; "" otherwise."""
    return f": they are slower than one, with {speed:.2g} times its samples per second" if speed < 0.995 else ""
