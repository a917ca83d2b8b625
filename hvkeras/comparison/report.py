"""HTML report (`report.html`) and charts of a comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

from hvkeras.comparison.result import WARM_UP
from hvkeras.comparison.rows import Comparison, Row
from hvkeras.comparison.table import (
    NOT_APPLICABLE,
    cells,
    explanations,
    milliseconds,
    scaling_cells,
    sentences,
    warnings,
)
from hvkeras.diagnostics.charts import IDEAL, Chart, Line, curves, distribution, missing, scaling, stacked
from hvkeras.diagnostics.html_page import Section, page, table_html
from hvkeras.host.files import write_durably

NAME = "report.html"
CHARTS = ("step_times", "time_split", "scaling", "loss")
PARTS = ("compute", "update", "input", "wait", "communication")


def write(comparison: Comparison, folder: Path) -> None:
    """Write the report and the charts into a folder."""
    drawn = {} if missing() else charts(comparison)
    title = f"{comparison.command}, on {comparison.processes} processes"
    write_durably(folder / NAME, page(title, summary(comparison), sections(comparison, drawn)))
    for name in CHARTS:
        if name in drawn:
            drawn[name].png(folder / f"{name}.png")
        else:  # a chart of an earlier comparison
            (folder / f"{name}.png").unlink(missing_ok=True)


def summary(comparison: Comparison) -> list[str]:
    """Return the paragraphs of the summary: warnings about the machine, and the three sentences."""
    return [*warnings(comparison), *sentences(comparison)]


def charts(comparison: Comparison) -> dict[str, Chart]:
    """Return the charts for which there is data, by file name without extension."""
    drawn: dict[str, Chart] = {}
    timed = [row for row in comparison.shown if row.step is not None]
    if timed:
        drawn["step_times"] = distribution(
            {row.name: [1000 * seconds for run in row.good for seconds in run.step_times] for row in timed},
            "step time, ms")
    splits = {row.name: row.split for row in comparison.shown if row.split is not None}
    if splits:
        drawn["time_split"] = stacked(
            list(splits), {part: [1000 * (getattr(split, part) or 0.0) for split in splits.values()] for part in PARTS},
            "ms of a typical step, mean over ranks")
    lines = list(_scaling_lines(comparison))
    if lines:
        drawn["scaling"] = scaling(lines, "samples per s")
    losses = [Line(row.name, [x for x, _ in row.good[0].losses], [y for _, y in row.good[0].losses])
              for row in comparison.shown if row.good and len(row.good[0].losses) > 1]
    if losses:
        drawn["loss"] = curves(losses, "seconds since training began", "loss")
    return drawn


def _scaling_lines(comparison: Comparison) -> Iterator[Line]:
    """Yield the rates of each backend with at least two numbers of processes, then the ideal line."""
    single = comparison.single
    names = dict.fromkeys(row.name for row in comparison.rows if row is not single)
    rates: dict[int, float] = {}
    for name in names:
        own = sorted((row for row in [*([single] if single else []), *comparison.rows]
                      if (row is single or row.name == name) and row.samples), key=lambda row: row.processes)
        points = list({row.processes: row for row in own}.values())
        if len(points) > 1:
            ends = [row.samples_range or (row.samples or 0.0,) * 2 for row in points]
            drawn = Line(name, [row.processes for row in points], [row.samples or 0.0 for row in points],
                         [low for low, _ in ends], [high for _, high in ends])
            rates.setdefault(int(drawn.x[0]), drawn.y[0])
            yield drawn
    if rates:
        first = min(rates)
        sizes = [first, *(size for size in comparison.sizes if size > first)]
        yield Line(IDEAL, sizes, [rates[first] * size / first for size in sizes], dashed=True)


def sections(comparison: Comparison, drawn: dict[str, Chart]) -> list[Section]:
    """Return the sections of the report after its summary."""
    headers, rows, notes = cells(comparison)
    result = [Section("All backends", _with_remarks(table_html(headers, rows), [*notes, *explanations(comparison)]))]

    def add(name: str, title: str, note: str, html: str = "") -> None:
        if name in drawn or html:
            result.append(Section(title, (drawn[name].svg() if name in drawn else "") + html, note))

    add("step_times", "Step times", f"A box contains half of the steps on rank 0, its whiskers nine tenths, without"
        f" the first {WARM_UP} of each run. The line in the box is the median. A narrow box means steps of equal"
        " length. Steps beyond the end of the axis are drawn at its end: validation, checkpoints, or other programs'"
        " work.")
    add("time_split", "Where the time of a step goes", "Wait is the time in collectives until the last rank"
        " arrives, communication the rest of the time in collectives in which the rank does nothing else. Communication"
        " that runs concurrently with computing costs nothing, and is not in the bars. A part that is the same on all"
        " backends comes from the script.",
        _split_table(comparison))
    several = len(comparison.sizes) > 1
    bands = " Bands are from the slowest to the fastest run." if comparison.repeat > 1 else ""
    tables = table_html(*scaling_cells(comparison)) if several else ""
    add("scaling", "Scaling", "Samples of all ranks per second. The ideal line is the first point's rate, multiplied by"
        f" the number of processes.{bands}", tables)
    add("loss", "Loss against time", "fit's loss in the first run, against the time since training began. The faster"
        " backend is ahead, and curves of the same shape show the same training.")
    result.append(Section("How this was measured", _method_html(comparison)))
    return result


def _with_remarks(html: str, remarks: list[str]) -> str:
    return html + "\n<p class=\"note\">" + "<br>\n".join(map(escape, remarks)) + "</p>"


def _split_table(comparison: Comparison) -> str:
    """Return an HTML table of the parts of a step, with bytes and memory; "" if all are unknown."""
    headers = ["backend", *(f"{part},\nms" for part in PARTS), "concurrent with\ncomputing, ms",
               "MB per step\nand rank", "peak memory\nper rank, MB"]
    rows = [[row.name, *_numbers(row)] for row in comparison.shown if not row.reason]
    known = any(cell != NOT_APPLICABLE for row in rows for cell in row[1:])
    return table_html(headers, rows) if known else ""


def _numbers(row: Row) -> list[str]:
    split = row.split
    parts = [None if split is None else getattr(split, part) for part in (*PARTS, "hidden")]
    amounts = [row.bytes_in_step, row.peak_memory]
    return [*(NOT_APPLICABLE if part is None else milliseconds(part) for part in parts),
            *(NOT_APPLICABLE if amount is None else f"{amount / 1e6:,.3g}" if amount < 1e8 else f"{amount / 1e6:,.0f}"
              for amount in amounts)]


def _method_html(comparison: Comparison) -> str:
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(comparison.began))
    times = f"{comparison.repeat} times, in rounds" if comparison.repeat > 1 else "once"
    minutes = max(1, math.ceil(comparison.seconds / 60))
    lines = (f"Each job ran {times}, one after the other, from {began} on, for {minutes} minute{'s' * (minutes > 1)}.",
             f"The output of all ranks is in {comparison.folder}.", "All numbers are in results.json beside this page.")
    return f"<pre>{escape(comparison.command)}</pre>" + "".join(f"<p>{escape(line)}</p>" for line in lines)
