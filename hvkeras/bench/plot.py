"""The plot of a benchmark, as a PNG file."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras.bench.figures import bus_bandwidth, efficiency, quartiles
from hvkeras.bench.row import ONE_PROCESS, Row
from hvkeras.errors import MachineError, explain


def require_matplotlib() -> None:
    """Raises MachineError if matplotlib is not installed; called before anything runs."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MachineError(explain("--plot needs matplotlib", "pip install 'hvkeras[bench]'"))


def draw(kind: str, rows: Sequence[Row], ranks: int, title: str, path: Path) -> None:
    """Draws times and bandwidths by size, or scaling efficiencies by model.

    Args:
        kind: `allreduce` or `step`.
        rows: The rows; those without results are left out.
        ranks: The number of ranks.
        title: The title of the plot.
        path: The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5) if kind == "allreduce" else (8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    known = [row for row in rows if row.blocks]
    if kind == "allreduce":
        _allreduce(figure, known, ranks)
    else:
        _step(figure.subplots(), known, ranks)
    figure.suptitle(textwrap.fill(title, 110 if kind == "allreduce" else 80), fontsize="small")
    figure.savefig(path, format="png", dpi=150)


def _allreduce(figure: Any, rows: Sequence[Row], ranks: int) -> None:
    times, buses = figure.subplots(1, 2)
    for name in dict.fromkeys(row.name for row in rows):
        own = sorted((row for row in rows if row.name == name), key=lambda row: row.bytes)
        sizes = [row.bytes for row in own]
        parts = np.array([quartiles(row.blocks) for row in own])
        middle = parts[:, 1]
        around = np.stack([middle - parts[:, 0], parts[:, 2] - middle]) * 1e6
        times.errorbar(sizes, middle * 1e6, yerr=around, marker="o", capsize=3, label=name)
        carried = [bus_bandwidth(row.bytes, seconds, ranks) / 1e9 for row, seconds in zip(own, middle, strict=True)]
        buses.plot(sizes, carried, marker="o", label=name)
    labels = {row.bytes: row.work for row in rows}
    for axes, what in ((times, "time per allreduce, us (median and quartiles)"), (buses, "bus bandwidth, GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="bytes of the tensor", ylabel=what)
        axes.set_xticks(list(labels), list(labels.values()))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    if rows:
        times.legend()


def _step(axes: Any, rows: Sequence[Row], ranks: int) -> None:
    models = list(dict.fromkeys(row.work for row in rows))
    names = list(dict.fromkeys(row.name for row in rows if row.name != ONE_PROCESS))
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        for row in rows:
            share = efficiency(row, rows) if row.name == name else None
            if share is None:
                continue
            where = models.index(row.work) + (place - (len(names) - 1) / 2) * width
            first = next(each for each in rows if each.name == name) is row
            bars = axes.bar(where, 100 * share, width, color=f"C{place}", label=name if first else None)
            axes.bar_label(bars, fmt="%.0f", fontsize="small")
    axes.axhline(100, color="black", linewidth=0.8, label=ONE_PROCESS)
    axes.set_xticks(range(len(models)), models)
    axes.set(xlabel="model", ylabel=f"share of {ranks} x one process, %")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
