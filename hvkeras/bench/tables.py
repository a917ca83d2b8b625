"""Table of a benchmark with explanations, and a plot as a PNG file."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from hvkeras.bench.plan import AT
from hvkeras.bench.row import (
    FORWARD_BACKWARD,
    LOCAL_ONLY,
    ONE_PROCESS,
    PEER,
    TCP_ALONE,
    UPDATE,
    BenchmarkRow,
    bandwidth,
    bus_bandwidth,
    efficiency,
    exposed,
    part,
    quartiles,
    rate,
    share_of_bound,
    speed_up,
    title_of,
)
from hvkeras.diagnostics.charts import INK, PAPER, Chart, colours_of
from hvkeras.errors import MachineError, explain

UNKNOWN = "-"
NOTABLE_ROUNDING = 1e-3  # fraction of the moved distance; larger effects of rounding are noted


def table(kind: str, rows: Sequence[BenchmarkRow], ranks: int) -> tuple[Table, list[str]]:
    """Build the table of the rows.

    Args:
        kind: `allreduce` or `step`.
    """
    names = _compared(kind, rows)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    figures = ["GB/s", "bus\nGB/s"] if kind == "allreduce" else [
        "forward,\nbackward", "update", "not\nhidden", "first\nstep", "samples\nper s",
        f"share of\n{ranks} x one\nprocess", "off by"]
    work = ["size", "engine", "allreduce\n(quartiles)"] if kind == "allreduce" else [
        "model", "engine", "step\n(quartiles)"]
    if any(row.least for row in rows):
        figures.append("share of\nthe bound")
    if any(AT in row.work for row in rows):
        figures.append("CPU of\nall ranks")
    headers = [*work, *figures, "memory\nMB", *("times\n" + name.replace(", ", ",\n") for name in names)]
    for index, header in enumerate(headers):
        made.add_column(header, justify="right" if index > 1 else "left", no_wrap=True, vertical="bottom")
    reasons: dict[str, int] = {}
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].work != row.work
        first = index == 0 or rows[index - 1].work != row.work
        cells = [row.work if first else "", row.name]
        if row.blocks:
            cells += _cells(kind, row, rows, ranks)
            cells += [_ratio(row, name, rows) for name in names]
        else:
            word = "wrong" if row.wrong else "failed"
            cells.append(f"{word} ({reasons.setdefault(row.reason or 'it has no figures', len(reasons) + 1)})")
        made.add_row(*cells, end_section=last)
    return made, [f"({number}) {reason}" for reason, number in reasons.items()]


def _compared(kind: str, rows: Sequence[BenchmarkRow]) -> list[str]:
    names = list(dict.fromkeys(row.name for row in rows if row.blocks))
    if kind == "step":
        names = [name for name in names if not name.startswith((ONE_PROCESS, LOCAL_ONLY))]
        names = [*(name for name in (LOCAL_ONLY,) if any(row.name == name and row.blocks for row in rows)), *names]
    return names if len({row.name for row in rows if row.blocks}) > 1 else []


def _cells(kind: str, row: BenchmarkRow, rows: Sequence[BenchmarkRow], ranks: int) -> list[str]:
    lower, median, upper = quartiles(row.blocks)
    cells = [f"{duration(median)} ({_number(lower, median)}-{_number(upper, median)})"]
    if kind == "allreduce":
        cells += [f"{bandwidth(row.bytes, median) / 1e9:.3g}", f"{bus_bandwidth(row.bytes, median, ranks) / 1e9:.3g}"]
    else:
        share, samples = efficiency(row, rows), rate(row)
        cells += [UNKNOWN if seconds is None else duration(seconds)
                  for seconds in (part(row, FORWARD_BACKWARD), part(row, UPDATE), exposed(row), row.first)]
        cells += [UNKNOWN if samples is None else f"{samples:,.0f}" if samples >= 100 else f"{samples:.3g}",
                  UNKNOWN if share is None else f"{share:.0%}",
                  UNKNOWN if row.difference is None else f"{row.difference:.0e}" if row.difference else "0"]
    if any(each.least for each in rows):
        bound = share_of_bound(row)
        cells.append(UNKNOWN if bound is None else f"{bound:.2f}")
    if any(AT in each.work for each in rows):
        cells.append(duration(quartiles(row.busy)[1]) if row.busy else UNKNOWN)
    return [*cells, UNKNOWN if row.memory is None else f"{row.memory / 1e6:,.0f}"]


def _ratio(row: BenchmarkRow, name: str, rows: Sequence[BenchmarkRow]) -> str:
    other = next((each for each in rows if each.work == row.work and each.name == name), None)
    ratio = None if other is None or other is row else speed_up(row, other)
    return UNKNOWN if ratio is None else f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def duration(seconds: float) -> str:
    """Format a time: `12.3 us`, `1,309 us`, `14.9 ms`, `2.5 s`."""
    return f"{_number(seconds, seconds)} {_unit(seconds)[0]}"


def _number(seconds: float, like: float) -> str:
    value = seconds * _unit(like)[1]
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _unit(seconds: float) -> tuple[str, float]:
    return ("us", 1e6) if seconds < 0.01 else ("ms", 1e3) if seconds < 10 else ("s", 1.0)


def explanations(kind: str, rows: Sequence[BenchmarkRow], ranks: int) -> list[str]:
    """Return explanations of the columns, and of the verification.

    Args:
        kind: `allreduce` or `step`.
    """
    engines = {row.name: row.engine for row in rows if row.engine and row.blocks}
    lines = [f"{name}: {engine}" for name, engine in engines.items()]
    if kind == "allreduce":
        links = {row.work: row.links for row in rows if row.blocks and row.name != TCP_ALONE}
        lines.append("allreduce: float32, one in a chain of "
                     + ", ".join(f"{count} at {work}" for work, count in links.items())
                     + " that depend on each other, in one tf.function")
        lines.append(f"GB/s: bytes of the tensor over the time; bus: that times 2 ({ranks} - 1) / {ranks}")
        lines.append("every result was compared with NumPy's, all elements of each block's last chain")
    else:
        lines.append(f"times {LOCAL_ONLY}: speedup over {ranks} processes that do not communicate")
        lines.append(f"share: the step time of one process alone over that of {ranks} that reduce their gradients;"
                     f" that of {LOCAL_ONLY} is the limit of the machine for {ranks} simultaneous processes")
        lines.append("forward, backward; update: these parts of a step in isolation; not hidden: the rest of the"
                     " step, communication that does not overlap with computation")
        lines.append("first step: including tracing, and compilation of the update")
        lines.append("off by: distance of the weights, after 3 steps, from those of one process on all ranks' batches,"
                     " as a share of the distance that they moved")
        roundings = {row.work: row.rounding for row in rows if row.rounding and row.rounding > NOTABLE_ROUNDING}
        for work, rounding in roundings.items():
            lines.append(f"off by, on {work}: changing only the last bits of the initial weights moves the result by"
                         f" {rounding:.0e} of the distance")
        lines.append("the weights of all ranks were bitwise equal at the end")
    if any(row.least for row in rows):
        lines.append("share of the bound: the minimum time of an allreduce at the bandwidth of the hosts' links,"
                     " over its measured time")
    if any(AT in row.work for row in rows):
        lines.append("CPU of all ranks: CPU time for the same, summed over all hosts, which share the cores of this"
                     " machine")
    lines.append("memory: increase of a rank's peak memory by the engine's start, tracing, and first run")
    return [*lines, "times: speedup over the column's engine, median of the rounds' ratios"]


def require_matplotlib() -> None:
    """Raise MachineError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MachineError(explain("--plot needs matplotlib", "pip install 'hvkeras[bench]'"))


def draw(kind: str, rows: Sequence[BenchmarkRow], ranks: int, title: str, path: Path) -> None:
    """Draw times and bandwidths by size, or scaling efficiencies by model.

    Args:
        kind: `allreduce` or `step`.
        rows: The rows; those without results are omitted.
        title: The command and the machine: title of the plot of allreduces, note below that of steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = [row for row in rows if row.blocks]
    if kind == "step":
        _steps(known, ranks, title).png(path)
        return
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    _allreduce(figure, known, ranks)
    figure.suptitle(textwrap.fill(title, 110), fontsize="small")
    figure.savefig(path, format="png", dpi=120)


def _allreduce(figure: Any, rows: Sequence[BenchmarkRow], ranks: int) -> None:
    times, buses = figure.subplots(1, 2)
    for name, colour in colours_of(row.name for row in rows).items():
        own = sorted((row for row in rows if row.name == name), key=lambda row: row.bytes)
        sizes = [row.bytes for row in own]
        parts = np.array([quartiles(row.blocks) for row in own])
        middle = parts[:, 1]
        around = np.stack([middle - parts[:, 0], parts[:, 2] - middle]) * 1e6
        times.errorbar(sizes, middle * 1e6, yerr=around, marker="o", capsize=3, color=colour, label=name)
        carried = [bus_bandwidth(row.bytes, seconds, ranks) / 1e9 for row, seconds in zip(own, middle, strict=True)]
        buses.plot(sizes, carried, marker="o", color=colour, label=name)
    labels = {row.bytes: row.work for row in rows}
    for axes, what in ((times, "time per allreduce, us (median and quartiles)"), (buses, "bus bandwidth, GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="bytes of the tensor", ylabel=what)
        axes.set_xticks(list(labels), list(labels.values()))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    if rows:
        times.legend()


def _steps(rows: Sequence[BenchmarkRow], ranks: int, note: str) -> Chart:
    models = list(dict.fromkeys(row.work for row in rows))
    names = _grouped([row for row in rows if row.name != ONE_PROCESS])
    families = {name: next((each for each in names if title_of(each) == name), name) for name in names}
    colours = colours_of(LOCAL_ONLY if family.startswith(LOCAL_ONLY) else family for family in families.values())
    width = 0.84 / max(1, len(names))

    def draw(axes: Any) -> None:
        for index, (name, kind) in enumerate(names.items()):
            own = [(models.index(row.work), 100 * share) for row in rows
                   if row.name == name and (share := efficiency(row, rows)) is not None]
            if not own:
                continue
            where = [model + (index - (len(names) - 1) / 2) * width for model, _ in own]
            family = LOCAL_ONLY if name.startswith(LOCAL_ONLY) else families[name]
            bars = axes.bar(where, [share for _, share in own], 0.92 * width, label=_label(name, kind),
                            color=colours[family], edgecolor=PAPER, linewidth=0, hatch="///" if kind == PEER else None)
            axes.bar_label(bars, fmt="%.0f", fontsize=9, padding=1,
                           bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.4})
        axes.axhline(100, color=INK, linewidth=1, linestyle="--")
        axes.annotate(f"{ranks} times the speed of one process", (0, 100), (4, 3), fontsize=9,
                      xycoords=("axes fraction", "data"), textcoords="offset points")
        axes.set_xticks(range(len(models)), models)
        axes.tick_params(axis="x", length=0)
        axes.yaxis.set_major_formatter("{x:.0f} %")
        axes.set_ylim(0, max(110, axes.get_ylim()[1]))
        axes.grid(axis="y")
        if names:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, fontsize=9,
                        columnspacing=1.2)
        axes.figure.suptitle(f"Training speed of {ranks} processes, in % of {ranks} times one process"
                             " (higher is better)", x=0.01, ha="left", fontsize=12, fontweight="bold")
        axes.figure.supxlabel(textwrap.fill(note, 110), x=0.01, ha="left", fontsize=8)

    return Chart(draw, 8, 4.8, f"speed of training steps on {ranks} processes: {', '.join(names)}")


def _label(name: str, kind: str) -> str:
    if name.startswith(LOCAL_ONLY):
        return f"{name} (no communication)"
    return name.replace(" alone", ", without hvkeras") if kind == PEER else name


def _grouped(rows: Sequence[BenchmarkRow]) -> dict[str, str]:
    """Return the kinds of the rows by name, with a library's row next to that of the backend that uses it."""
    kinds = {row.name: row.kind for row in rows}
    names: dict[str, str] = {}
    for name, kind in kinds.items():
        if name not in map(title_of, kinds):
            peer = title_of(name)
            names |= {name: kind} | ({peer: kinds[peer]} if peer in kinds else {})
    return names
