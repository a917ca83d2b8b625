"""Bottlenecks of a job and their remedies: the advice in a report on one run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hvkeras.diagnostics.run_summary import Summary
from hvkeras.diagnostics.time_split import TimeSplit

# Minimum fractions of the typical step, or of all time, to report a finding; docs/report.md has the same table.
THRESHOLDS: Mapping[str, float] = {
    "steps": 20,  # minimum number of steps timed on each rank for any finding
    "seconds": 5,  # minimum total duration of these steps, because other load on a machine varies within seconds
    "slow rank": 0.10,  # of a step, by which a rank is busy longer than the others
    "input": 0.10,  # of a step, waiting for the next batch
    "wait": 0.15,  # of a step, waiting for other ranks, if no rank is consistently slow
    "communication": 0.20,  # of a step
    "compression": 1 / 3,  # of a step in communication, to suggest 8 bits between hosts
    "update": 0.10,  # of a step, if each rank updates all weights
    "pauses": 0.30,  # of all time, in validation, checkpoints and other long work between steps
    "whole": 1 / 3,  # of the estimated work of a divided function, computed by all ranks
    "load": 0.15,  # of the ranks' cores, used by other processes
}
_REASON = 0.25  # minimum fraction of a rank's delay to mention a cause


@dataclass(frozen=True)
class Straggler:
    """Straggler: the rank that the others wait for.

    Attributes:
        seconds: Additional busy time per step, relative to the median of the others.
        parts: Seconds of it due to `input` and `compute`; negligible parts are omitted.
    """

    rank: int
    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Finding:
    """Bottleneck of a job.

    Attributes:
        what: `slow rank`, `input`, `wait`, `communication`, `update`, `whole` or `pauses`, as in `THRESHOLDS`.
        share: Fraction of a step; for pauses, of all time; for `whole`, of the estimated work.
        text: Description of the problem.
        remedy: Suggested fix.
    """

    what: str
    share: float
    text: str
    remedy: str


def has_enough_steps(splits: Mapping[int, TimeSplit]) -> bool:
    """Return whether enough steps were timed to draw conclusions."""
    return bool(splits) and all(split.steps >= THRESHOLDS["steps"] and split.steps * split.step >= THRESHOLDS["seconds"]
                                for split in splits.values())


def slowest_rank(splits: Mapping[int, TimeSplit]) -> Straggler | None:
    """Find the straggler: the rank that is busy longest.

    Args:
        splits: Time breakdown of a typical step, by rank.

    Returns:
        The straggler; None if the ranks are similar or too few steps were timed.
    """
    if len(splits) < 2 or not has_enough_steps(splits):
        return None
    busy = {rank: split.busy for rank, split in splits.items()}
    rank = max(busy, key=lambda each: busy[each])
    others = [split for each, split in splits.items() if each != rank]
    more = busy[rank] - median(split.busy for split in others)
    if more < THRESHOLDS["slow rank"] * splits[rank].step:
        return None
    parts = {"input": splits[rank].input - median(split.input for split in others),
             "compute": splits[rank].busy - splits[rank].input - median(split.busy - split.input for split in others)}
    return Straggler(rank, more, {part: seconds for part, seconds in parts.items() if seconds >= _REASON * more})


def findings(summary: Summary) -> list[Finding]:
    """Return the bottlenecks of a job, the largest first; an empty list if too few steps were timed."""
    splits = summary.splits
    if not has_enough_steps(splits):
        return []
    found = [_slow_rank(summary), _input(splits), _wait(summary), _communication(summary), _update(summary),
             _whole(summary), _pauses(summary)]
    return sorted((finding for finding in found if finding is not None), key=lambda finding: -finding.share)


# Advice in the report on one run, which reports of hvkeras compare omit.
COMPARE = " hvkeras compare shows whether another backend is faster here."


def limit(splits: Mapping[int, TimeSplit], found: Sequence[Finding], command: str = "") -> str:
    """Return a description of the main bottleneck and its remedy; "" if no steps were timed.

    Args:
        splits: Time breakdown of a typical step, by rank.
        found: Result of `findings`.
        command: Command of the ranks, if it is known.
    """
    if found:
        return f"What limits training most: {found[0].text} {found[0].remedy}"
    if not splits:
        return ""
    if not has_enough_steps(splits):
        return _too_short(splits, command)
    return ("Training is limited by computation alone. Try jit_compile=True with the native backend, mixed precision"
            " on GPUs, or more ranks.")


_EPOCHS = re.compile(r"(--epochs[= ])(\d+)(?!\S)")


def _too_short(splits: Mapping[int, TimeSplit], command: str) -> str:
    """Return how many steps were timed, how many are needed, and how to get them."""
    count, seconds = min((split.steps, split.steps * split.step) for split in splits.values())
    least = {part: THRESHOLDS[part] for part in ("steps", "seconds")}
    times = max(2, math.ceil(max(least["steps"] / max(count, 1), least["seconds"] / max(seconds, 1e-3))))
    option = _EPOCHS.search(command)
    epochs = f", for example with {times:,} times the epochs in fit"
    how = f": {option[1]}{times * int(option[2])}" if option else epochs
    timed = f"{count} typical step{'s' * (count != 1)}, {seconds:.2g} s in all, were timed on a rank"
    return (f"The run is too short to judge what limits it: {timed}, and at least {least['steps']:g} steps and"
            f" {least['seconds']:g} s are needed. Train {times:,} times as long{how}.")


def machine_notes(summary: Summary) -> list[str]:
    """Return messages about ranks that share cores, and about other processes that use them."""
    share, host = summary.other_load
    here = f" on {host}" if host else ""
    busy = (f"Other processes used {share:.0%} of the ranks' cores{here} during training: steps take longer, and vary"
            " more, than on an idle machine.")
    return [*summary.oversubscription, *([busy] if share >= THRESHOLDS["load"] else [])]


_REMEDIES = {
    "input": "Check where it reads its data from, partition the data evenly (hvd.shard), and read ahead with"
             " prefetch(tf.data.AUTOTUNE), cache(), or more parallel calls of map() and interleave().",
    "compute": "Check what else runs on its cores (threads, other jobs, a slower machine), and whether its batches are"
               " larger, or its callbacks do more, than those of the others.",
}


def explain_delay(summary: Summary, slowest: Straggler) -> str:
    """Return why a rank is slow, as the end of a sentence."""
    names = {"input": "its input takes", "compute": "its computing takes"}
    reasons = [f"{names[part]} {milliseconds(seconds)} longer" for part, seconds in slowest.parts.items()]
    others = "rank" if summary.size == 2 else "ranks"
    return f"{' and '.join(reasons)} than that of the other {others}"


def _slow_rank(summary: Summary) -> Finding | None:
    slowest = slowest_rank(summary.splits)
    if slowest is None:
        return None
    share = slowest.seconds / summary.splits[slowest.rank].step
    remedy = " ".join(_REMEDIES[part] for part in slowest.parts)
    return Finding("slow rank", share, f"All ranks wait for {summary.name(slowest.rank)} ({share:.0%} of each step), as"
                   f" {explain_delay(summary, slowest)}.", remedy)


def _input(splits: Mapping[int, TimeSplit]) -> Finding | None:
    slowest = slowest_rank(splits)
    others = [split for rank, split in splits.items() if slowest is None or rank != slowest.rank]
    share = median(split.input / split.step for split in others)  # a slow rank is a separate finding
    if share < THRESHOLDS["input"]:
        return None
    return Finding("input", share, f"Training waits for data: {share:.0%} of a step passes until the next batch"
                   " arrives.", "End the dataset with prefetch(tf.data.AUTOTUNE), give map() and interleave()"
                   " num_parallel_calls=tf.data.AUTOTUNE, and use cache() for what does not change. Where the cores"
                   " are busy already, prepare the data once, beforehand.")


def _wait(summary: Summary) -> Finding | None:
    waits = [(split.wait or 0.0) / split.step for split in summary.splits.values()]
    share = sum(waits) / len(waits)
    if share < THRESHOLDS["wait"] or slowest_rank(summary.splits) is not None:
        return None
    text = (f"The ranks are uneven from step to step: {share:.0%} of a step is spent waiting, sometimes for one rank"
            " and sometimes for another.")
    if machine_notes(summary):
        return Finding("wait", share, text, "They also wait for free cores.")
    return Finding("wait", share, text, "Batches of different lengths take different times: sort or pad them in the"
                   " same way on all ranks.")


def _communication(summary: Summary) -> Finding | None:
    splits = summary.splits
    share = median(split.communication / split.step for split in splits.values())
    if share < THRESHOLDS["communication"]:
        return None
    waits = "" if all(split.wait is not None for split in splits.values()) else (
        " (waiting for other ranks included, which cannot be separated as a record is missing)")
    remedy = ("With a larger batch per rank, gradients are exchanged less often; backward_passes_per_step does the same"
              " without more memory.")
    if share > THRESHOLDS["compression"] and summary.backend == "native" and summary.host_count > 1:
        remedy += (" compression=hvd.Compression.int8 sends a quarter of the bytes between hosts, and fp16 half;"
                   " hvkeras compare --compression none,fp16,int8 shows the time, and the loss beside the exact one.")
    else:
        remedy += " compression=hvd.Compression.fp16 halves the bytes, which helps on slow networks."
    return Finding("communication", share, f"Communication that is not hidden by computing takes {share:.0%} of a"
                   f" step{waits}.", remedy + COMPARE)


def _update(summary: Summary) -> Finding | None:
    share = median(split.update / split.step for split in summary.splits.values())
    if share < THRESHOLDS["update"] or summary.size == 1 or summary.shares_update or summary.backend != "native":
        return None  # on other backends, a sharded update takes more time than it saves
    return Finding("update", share, f"Each rank updates all weights, which takes {share:.0%} of a step.",
                   f"With DistributedOptimizer(shard_update=True), each rank updates 1/{summary.size} of them, and"
                   f" stores 1/{summary.size} of the optimizer's state; hvkeras compare --shard-update on,off measures"
                   " the gain.")


def _whole(summary: Summary) -> Finding | None:
    function = max(summary.functions, key=lambda each: each["share"], default=None)
    if function is None or function["share"] < THRESHOLDS["whole"]:
        return None
    places = "; ".join(f"{place} ({why})" for place, _, why in function["places"][:3])
    return Finding("whole", function["share"], f"All ranks compute {function['share']:.0%} of the work of"
                   f" {function['name']}, by estimate: {places}.", "docs/data-parallel.md says what is divided.")


def _pauses(summary: Summary) -> Finding | None:
    share = summary.pause_share
    if share < THRESHOLDS["pauses"]:
        return None
    return Finding("pauses", share, f"{share:.0%} of the time from the first step to the last was spent in steps that"
                   " took over five times as long as others: validation, checkpoints, callbacks at the end of an epoch,"
                   " or data that had not arrived.", "Validate and save less often, or on fewer samples.")


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
