"""Report on one run: `report.html` for people, and the same data in `report.json` for programs."""

from __future__ import annotations

import dataclasses
import json
import math
from html import escape
from pathlib import Path
from typing import Any

from hvkeras import __version__
from hvkeras.diagnostics import charts
from hvkeras.diagnostics.findings import (
    Finding,
    findings,
    has_enough_steps,
    limit,
    machine_notes,
    milliseconds,
    slowest_rank,
)
from hvkeras.diagnostics.html_page import Section, page, table_html
from hvkeras.diagnostics.record import WELL
from hvkeras.diagnostics.run_summary import Summary
from hvkeras.host.files import write_durably

PAGE, DATA = "report.html", "report.json"
SCHEMA = 1  # version of the format of report.json; see docs/report.md
SHOWN = 20  # maximum number of collectives, and of stalls, that the page shows
_SHOWN_SHARE = 0.01  # of the work of a function
BARS = 32  # maximum number of ranks that the chart shows
_PARTS = ("input", "compute", "update", "wait", "communication")
_SPLIT_NOTE = (
    "A step lasts from the time at which a rank's gradients are ready to the same time of the next step."
    " Input: waiting for the next batch. Compute: forward and backward pass, callbacks. Update: weight update, once all"
    " gradients are reduced. Wait: waiting for ranks that enter a collective later. Communication: remaining time in"
    " collectives that did not overlap with other work. Hidden: collectives that overlapped with computing, not part of"
    " the step. Warm-up and pauses are excluded.")


def write_report(folder: Path) -> Path:
    """Write the report on the records in a folder, of a completed, failed or running job.

    Args:
        folder: Folder of `hvkeras run --report` or HVKERAS_REPORT.

    Returns:
        Path of the HTML page.

    Raises:
        MachineError: There are no records.
        OSError: The folder cannot be written to.
    """
    summary = Summary.of(folder)
    found = findings(summary)
    sentences = _sentences(summary, found)
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / DATA, json.dumps(_data(summary, found, sentences), indent=2, allow_nan=False) + "\n")
    write_durably(folder / PAGE, page(_title(summary), sentences, _sections(summary, found)))
    return folder / PAGE


def _title(summary: Summary) -> str:
    hosts = len({summary.host(rank) for rank in range(summary.size)})
    ranks = f"{summary.size} rank{'s' * (summary.size > 1)}"
    return f"{ranks} on {hosts} host{'s' * (hosts > 1)}" + (f", {summary.backend}" if summary.backend else "")


def _sentences(summary: Summary, found: list[Finding]) -> list[str]:
    return [text for text in (_end(summary), _step(summary), *machine_notes(summary), _evenness(summary),
                              limit(summary.splits, found), _compiling(summary)) if text]


def _end(summary: Summary) -> str:
    made = f"{summary.steps:,} step{'s' * (summary.steps != 1)} were recorded in {summary.seconds:,.0f} s"
    ends = {rank: summary.end(rank) for rank in range(summary.size)}
    bad = [rank for rank, end in ends.items() if end != WELL]
    if not bad:
        return f"Training ended well on all ranks: {made}."
    if summary.outcome is not None and summary.outcome.cause:
        return f"Training did not end well: {summary.outcome.cause}. {made} before that."
    details = "; ".join(f"{summary.name(rank)}: {ends[rank]}" for rank in bad[:4]) + ("; ..." if len(bad) > 4 else "")
    return f"Not all ranks have ended well ({details}). {made} until then."


def _step(summary: Summary) -> str:
    if not summary.splits:
        no_steps = next((record.no_steps for record in summary.present if record.no_steps), "")
        reason = f", as {no_steps}." if no_steps else (
            ": fewer than two steps of a distributed optimizer or tape were recorded after the first ones.")
        return f"The time breakdown of steps is not known{reason}"
    splits = list(summary.splits.values())
    step = sum(split.step for split in splits) / len(splits)
    shares = {part: sum(getattr(split, part) or 0.0 for split in splits) / len(splits) / step for part in _PARTS}
    text = ", ".join(f"{share:.0%} {_PART_LABELS[part]}"
                     for part, share in sorted(shares.items(), key=lambda each: -each[1]))
    return f"A typical step takes {milliseconds(step)}: {text} (mean of the ranks)."


def _compiling(summary: Summary) -> str:
    longest = max((record.compiling for record in summary.present), default=0.0)
    return f"XLA compiled the optimizer's update in {longest:.1f} s, before the first step." if longest else ""


_PART_LABELS = {"input": "waiting for data", "compute": "computing", "update": "updating the weights",
          "wait": "waiting for other ranks",
          "communication": "communicating"}


def _evenness(summary: Summary) -> str:
    even = len(summary.splits) > 1 and has_enough_steps(summary.splits) and slowest_rank(summary.splits) is None
    return "No rank is slower than the others." if even else ""


def _sections(summary: Summary, found: list[Finding]) -> list[Section]:
    made = [_split_section(summary), _advice_section(found[1:]), _ranks_section(summary), _functions_section(summary),
            _collectives_section(summary), _changes_section(summary)]
    if summary.stalls:
        lines = "".join(f"<li>{escape(text)}</li>\n" for text in summary.stalls[:SHOWN])
        left = len(summary.stalls) - SHOWN
        made.append(Section("Stalls", f"<ul>\n{lines}</ul>", f"{left} more are in {DATA}." if left > 0 else ""))
    made.append(Section("About this report", "<p>" + escape(_about(summary)) + "</p>"))
    return [section for section in made if section is not None]


def _split_section(summary: Summary) -> Section | None:
    splits = dict(list(summary.splits.items())[:BARS])
    if not splits:
        return None
    html, note = "", _SPLIT_NOTE
    several = len({summary.host(rank) for rank in splits}) > 1
    labels = [summary.name(rank) if several else f"rank {rank}" for rank in splits]
    parts = {part: [1000 * (getattr(split, part) or 0.0) for split in splits.values()] for part in _PARTS}
    try:
        html = charts.stacked(labels, parts, "milliseconds of a typical step").svg()
    except ImportError as error:
        note += f" There are {charts.missing() or f'no charts, as matplotlib cannot be imported ({error})'}."
    rows = [[f"rank {rank}", _ms(split.step), *(_ms(getattr(split, part)) for part in _PARTS), _ms(split.hidden),
             f"{split.steps:,}"] for rank, split in summary.splits.items()]
    table = table_html(["ms per step", "step", *_PARTS, "hidden", "steps timed"], rows)
    if any(record.rank in splits and not len(record.inputs) for record in summary.present):
        note += (" If no fetch from a tf.data.Dataset was recorded, such as when Python passes the batches, input is"
                 " part of compute.")
    return Section("Where the time of a step goes", html + table, note)


def _changes_section(summary: Summary) -> Section | None:
    outcome = summary.outcome
    if outcome is None or not outcome.changes:
        return None
    times = [0.0, *(change["time"] - outcome.began for change in outcome.changes)]
    sizes = [outcome.first_size, *(change["size"] for change in outcome.changes)]
    end = max([record.written - outcome.began for record in summary.present] + [times[-1]])
    note = ("The records of ranks, and all other sections, cover the time since the last change. A change begins when"
            " the loss of a rank is detected, or at the commit at which workers join or leave.")
    try:
        html = charts.levels(times, sizes, end, "seconds", "ranks").svg()
    except ImportError as error:
        html = ""
        note += f" There are {charts.missing() or f'no charts, as matplotlib cannot be imported ({error})'}."
    rows = [[f"{when:,.0f}", before, change["size"], f"{change['seconds']:.1f}",
             "?" if change["repeated"] is None else change["repeated"], change["commit"],
             change["why"] or "workers joined or left"]
            for when, before, change in zip(times[1:], sizes, outcome.changes, strict=False)]
    lost = sum(change["seconds"] for change in outcome.changes)
    repeated = sum(change["repeated"] or 0 for change in outcome.changes)
    return Section("Ranks over time", html + table_html(
        ["time (s)", "ranks before", "ranks after", "lost (s)", "steps repeated", "from commit", "reason"], rows),
        f"{lost:.1f} s and {repeated} repeated step{'s' * (repeated != 1)} were lost in all. {note}")


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else milliseconds(seconds).removesuffix(" ms")


def _advice_section(found: list[Finding]) -> Section | None:
    """Return the findings after the first one, which is in the summary."""
    if not found:
        return None
    lines = "".join(f"<li>{escape(each.text)} {escape(each.remedy)}</li>\n" for each in found)
    return Section("Further advice", f"<ul>\n{lines}</ul>")


def _ranks_section(summary: Summary) -> Section:
    rows: list[list[object]] = []
    gpus = any(record.gpu for record in summary.present)
    for rank, record in enumerate(summary.records):
        end = summary.end(rank)
        if record is None:
            rows.append([f"rank {rank}", summary.host(rank) or "?", *["?"] * gpus, "?", "?", "?", "?",
                         _missing(summary, rank)])
            continue
        rows.append([f"rank {rank}", summary.host(rank), *[record.gpu or "none"] * gpus, record.pid,
                     f"{record.first_step + len(record.stamps):,}", _samples(summary, rank),
                     _size(record.peak_memory or None), "ended well" if end == WELL else end])
    heads = ["", "host", *["GPU"] * gpus, "pid", "steps", "samples", "peak memory", "end"]
    return Section("Ranks", table_html(heads, rows), "Samples are the rows that the rank computed in training steps,"
                   " and their share of those of all ranks. Peak memory is the maximum resident memory of the rank's"
                   " process, without GPU memory.")


def _samples(summary: Summary, rank: int) -> str:
    """Return the samples of a rank, with their share of those of all ranks if there are several."""
    own, everyone = summary.samples(rank), [summary.samples(other) for other in range(summary.size)]
    known = [samples for samples in everyone if samples is not None]
    if own is None:
        return "?"
    return f"{own:,}" + (f" ({own / sum(known):.0%})" if summary.size > 1 and len(known) == summary.size else "")


def _missing(summary: Summary, rank: int) -> str:
    end = summary.end(rank)
    details = "" if end in (WELL, "left no record") else f"{end}; "
    return details + ("left no record: it did not reach hvd.init(), or its host does not share the folder"
                      if rank not in summary.unreadable else "its record cannot be read")


def _collectives_section(summary: Summary) -> Section | None:
    if not summary.collectives:
        return None
    rows = [[each.label, f"{each.operation} {each.how}".rstrip(), _size(each.bytes), f"{each.runs:,}",
             _ms(each.seconds), "?" if each.rate is None else f"{each.rate / 1e9:.3g}"]
            for each in summary.collectives[:SHOWN]]
    waits = all(split.wait is not None for split in summary.splits.values())
    note = ("ms: median over the latest runs of the shortest time of any rank, which excludes waiting for late ranks"
            if waits else "ms: median over the latest runs, including waiting for late ranks")
    left = len(summary.collectives) - SHOWN
    return Section("Communication", table_html(["collective", "operation", "size", "runs", "ms", "GB/s"], rows),
                   f"{note}. Size: this rank's tensors; GB/s is size by time."
                   + (f" {left} more are in {DATA}." if left > 0 else ""))


def _functions_section(summary: Summary) -> Section | None:
    """Return what became of functions that the ranks carry out together."""
    if not summary.functions:
        return None
    rows = [[each["name"], f"{1 - each['share']:.0%}", "; ".join(
        f"{place}, {share:.0%} ({why})" for place, share, why in each["places"][:3] if share >= _SHOWN_SHARE),
        each["rounds"], _size(each["bytes"])] for each in summary.functions[:SHOWN]]
    left = len(summary.functions) - SHOWN
    return Section("Divided functions", table_html(["function", "divided", "computed by all ranks", "rounds", "size"],
                                                   rows),
                   "Divided: share of the estimated work of which each rank computes its part. Size: what all rounds of"
                   " communication carry with 256 rows, as far as it is known."
                   + (f" {left} more are in {DATA}." if left > 0 else ""))


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"
    return f"{count} B"


def _about(summary: Summary) -> str:
    known = len(summary.present)
    missing = "" if known == summary.size else (
        f" Only {known} of {summary.size} records were found: all hosts must share the folder.")
    return (f"Created by hvkeras {__version__} from the records in {summary.folder}; hvkeras report recreates it."
            f" docs/report.md explains how each number is measured.{missing}")


def _data(summary: Summary, found: list[Finding], sentences: list[str]) -> dict[str, Any]:
    slowest = slowest_rank(summary.splits)
    return {
        "schema": SCHEMA, "hvkeras": __version__, "backend": summary.backend, "size": summary.size,
        "steps": summary.steps, "seconds": _number(summary.seconds), "sentences": sentences,
        "cause": summary.outcome.cause if summary.outcome is not None else "",
        "ranks": [_rank_data(summary, rank) for rank in range(summary.size)],
        "slowest": None if slowest is None else {
            "rank": slowest.rank, "host": summary.host(slowest.rank), "seconds": slowest.seconds,
            "because": slowest.parts},
        "advice": [dataclasses.asdict(each) for each in found],
        "collectives": [{**dataclasses.asdict(each), "bytes_per_second": each.rate} for each in summary.collectives],
        "functions": summary.functions, "pause_share": _number(summary.pause_share), "stalls": summary.stalls,
        "changes": summary.outcome.changes if summary.outcome is not None else [],
    }


def _rank_data(summary: Summary, rank: int) -> dict[str, Any]:
    record, split = summary.records[rank], summary.splits.get(rank)
    return {
        "rank": rank, "host": summary.host(rank), "pid": None if record is None else record.pid,
        "recorded": record is not None, "ended": summary.end(rank),
        "steps": None if record is None else record.first_step + len(record.stamps),
        "samples": summary.samples(rank), "no_steps": "" if record is None else record.no_steps,
        "compile_seconds": None if record is None else record.compiling,
        "split": None if split is None else dataclasses.asdict(split),
        "peak_memory": None if record is None or not record.peak_memory else record.peak_memory,
        "gpu": "" if record is None else record.gpu,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
