"""The plot of a benchmark, as a PNG file."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras.bench.figures import bus_bandwidth, efficiency, quartiles
from hvkeras.bench.row import APART, ONE_PROCESS, PEER, Row, title_of
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
    figure.savefig(path, format="png", dpi=120)


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
    names = _in_families([row for row in rows if row.name != ONE_PROCESS])
    colours = {name: "0.75" if name.startswith(APART) else f"C{place}"
               for place, name in enumerate(name for name in names if name not in map(title_of, names))}
    width = 0.84 / max(1, len(names))
    for place, (name, kind) in enumerate(names.items()):
        own = [(row.work, share) for row in rows if row.name == name and (share := efficiency(row, rows)) is not None]
        if not own:
            continue
        where = [models.index(work) + (place - (len(names) - 1) / 2) * width for work, _ in own]
        family = next((each for each in names if title_of(each) == name), name)
        bars = axes.bar(where, [100 * share for _, share in own], width, label=name, edgecolor="black", linewidth=0.5,
                        color=colours.get(family, "C9"), hatch="///" if kind == PEER else None,
                        alpha=0.6 if kind == PEER else None)
        axes.bar_label(bars, fmt="%.0f", fontsize="small")
    axes.axhline(100, color="black", linewidth=0.8, label=ONE_PROCESS)
    axes.set_xticks(range(len(models)), models)
    axes.set(ylabel=f"speed, % of {ranks} x one process")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4, fontsize="small", frameon=False)


def _in_families(rows: Sequence[Row]) -> dict[str, str]:
    """The kinds of the rows by name, with a library's own row next to that of the backend that uses the library."""
    kinds = {row.name: row.kind for row in rows}
    names: dict[str, str] = {}
    for name, kind in kinds.items():
        if name not in map(title_of, kinds):
            peer = title_of(name)
            names |= {name: kind} | ({peer: kinds[peer]} if peer in kinds else {})
    return names
