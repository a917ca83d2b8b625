"""Charts drawn with matplotlib: as SVG in the colours of a page, and as PNG files.

matplotlib comes with the extra `report` and is imported only when a chart is drawn; `missing()` reports its absence.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

INSTALL = "pip install 'hvkeras[report]'"

# PNG files use these colours; in a page, the page's colours replace them.
INK, PAPER, LINE = "#1d2127", "#ffffff", "#d9dde3"
_PAGE_COLOURS = {INK: "currentColor", PAPER: "var(--paper, #ffffff)", LINE: "var(--line, #d9dde3)"}
# Okabe and Ito's palette is safe for colour-blind readers; hatches also distinguish the parts in greyscale.
PARTS = {"compute": ("#0072b2", ""), "update": ("#009e73", "\\\\\\"), "input": ("#e69f00", "xxx"),
         "wait": ("#56b4e9", "///"), "communication": ("#d55e00", "..."), "hidden": ("#cc79a7", "---")}
# The colours of engines in all charts: benchmarks, comparisons and reports.
_ENGINES = {"native": "#0072b2", "horovod": "#e69f00", "tfdist": "#009e73", "one process": "#8a919c",
            "local only": "#c3c9d1"}
IDEAL = "ideal"  # name of the ideal line, drawn in `INK`
_OTHERS = ("#cc79a7", "#56b4e9", "#d55e00", "#009e73", "#e69f00", "#0072b2")
_HATCHES = ("\\\\\\", "++", "oo")
_MARKERS, _DASHES = "osD^vPX*", ("-", "--", "-.", ":")

_STYLE = {"font.family": "DejaVu Sans", "font.size": 10, "text.parse_math": False, "text.color": INK,
          "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
          "axes.facecolor": "none", "grid.color": LINE, "axes.spines.top": False, "axes.spines.right": False,
          "axes.axisbelow": True, "legend.frameon": False, "hatch.linewidth": 0.7,
          "svg.fonttype": "none", "svg.hashsalt": "hvkeras"}


def missing() -> str:
    """Return why there are no charts, with the fix; "" if matplotlib can be imported."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        return f"no charts, as matplotlib cannot be imported ({error}): {INSTALL}"
    return ""


class Chart:
    """Chart that is drawn on demand.

    Args:
        draw: Function that draws into a matplotlib `Axes`.
        width: Width in inches.
        height: Height in inches.
        description: Text alternative for screen readers.
    """

    def __init__(self, draw: Callable[[Any], None], width: float, height: float, description: str) -> None:
        self._draw, self._size, self._description = draw, (width, height), description

    def svg(self) -> str:
        """Return the chart as an SVG element, with text and axes in the page's colours."""
        file = io.StringIO()
        self._save(file, format="svg", transparent=True,
                   metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
        return _for_page(file.getvalue(), self._description)

    def png(self, path: Path) -> None:
        """Write the chart to a PNG file, on a white background."""
        self._save(path, format="png", dpi=150, facecolor=PAPER)

    def _save(self, target: Any, **options: Any) -> None:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=self._size, layout="constrained")
            FigureCanvasAgg(figure)
            self._draw(figure.subplots())
            figure.savefig(target, **options)


def _for_page(svg: str, description: str) -> str:
    """Extract the SVG element, with the page's colours and with IDs that are unique in the page."""
    svg = svg[svg.index("<svg"):].strip()
    svg = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", svg)  # not needed in HTML; pages have no external references
    for colour, name in _PAGE_COLOURS.items():
        svg = svg.replace(colour, name)
    prefix = "c" + hashlib.sha256(svg.encode()).hexdigest()[:8]
    svg = re.sub(r"(\bid=\"|url\(#|href=\"#)", rf"\g<1>{prefix}-", svg)
    label = escape(description, quote=True)
    return svg.replace("<svg", f"<svg role=\"img\" aria-label=\"{label}\"", 1)


def stacked(labels: Sequence[str], parts: Mapping[str, Sequence[float]], x_label: str) -> Chart:
    """Draw a horizontal stacked bar for each label.

    Args:
        labels: Labels of the bars, from top to bottom.
        parts: Lengths by part, one for each label; nan counts as 0. `PARTS` have fixed colours.
        x_label: Label of the x axis.
    """
    styles = zip(itertools.cycle(_OTHERS), itertools.cycle(_HATCHES))
    others = dict(zip((name for name in parts if name not in PARTS), styles, strict=False))

    def draw(axes: Any) -> None:
        begins = np.zeros(len(labels))
        widest = max(np.nansum([list(values) for values in parts.values()], axis=0), default=0.0)
        for name, values in parts.items():
            colour, hatch = PARTS.get(name) or others[name]
            lengths = np.nan_to_num(np.array(values, float))
            bars = axes.barh(range(len(labels)), lengths, 0.6, left=begins, label=name, color=colour, hatch=hatch,
                             edgecolor=PAPER, linewidth=0.8)
            for bar, length in zip(bars, lengths, strict=True):
                if length > 0.08 * widest:
                    axes.text(bar.get_x() + length / 2, bar.get_y() + bar.get_height() / 2, f"{length:.3g}",
                              ha="center", va="center", color=INK, fontsize=9,
                              bbox={"facecolor": PAPER, "edgecolor": "none", "boxstyle": "round,pad=0.2"})
            begins += lengths
        _rows(axes, labels, x_label)
        axes.set_xlim(0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=max(1, len(parts)), borderaxespad=0.2)

    return Chart(draw, 8, 1.35 + 0.5 * len(labels), f"{x_label}, in parts: {', '.join(parts)}")


def distribution(groups: Mapping[str, Sequence[float]], x_label: str) -> Chart:
    """Draw a box plot for each group: quartiles as a box, 5th to 95th percentile as whiskers, values as points below.

    Args:
        groups: Values by name, from top to bottom. At most 200 points are drawn. Outliers are drawn at the end of
            the axis, so that they do not compress the others.
        x_label: Label of the x axis.
    """
    known = {name: np.array(values, float) for name, values in groups.items()}
    end = 1.25 * max((float(np.percentile(values, 95)) for values in known.values() if len(values)), default=0.8)

    def draw(axes: Any) -> None:
        colours = colours_of(groups)
        random = np.random.default_rng(0)
        for index, (name, values) in enumerate(known.items()):
            if not len(values):
                continue
            low, first, median, third, high = np.percentile(values, (5, 25, 50, 75, 95))
            axes.plot([low, high], [index - 0.12] * 2, "|-", color=INK, linewidth=1.2, markersize=8)
            axes.barh(index - 0.12, third - first, 0.36, left=first, color=colours[name], edgecolor=INK)
            axes.plot([median] * 2, [index - 0.3, index + 0.06], "-", color=PAPER, linewidth=2.5)
            shown = values[np.linspace(0, len(values) - 1, min(len(values), 200)).astype(int)]
            heights = index + 0.26 + random.uniform(-0.07, 0.07, len(shown))
            for chosen, marker in ((shown <= end, "."), (shown > end, ">")):
                axes.plot(np.minimum(shown, end)[chosen], heights[chosen], marker, markersize=3, color=colours[name],
                          alpha=0.7, clip_on=False, linestyle="none")
        _rows(axes, list(groups), x_label)
        axes.set_xlim(0, end)

    return Chart(draw, 8, 1.0 + 0.65 * len(groups), f"{x_label}: {', '.join(groups)}")


def _rows(axes: Any, labels: Sequence[str], x_label: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.set_xlabel(x_label)


@dataclass(frozen=True)
class Line:
    """Line of a chart.

    Attributes:
        low: Lower end of the spread of each point, or empty.
        high: Upper end of the spread of each point, or empty.
        dashed: Whether it is an ideal rather than a measurement.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


def scaling(lines: Sequence[Line], y_label: str, x_label: str = "processes") -> Chart:
    """Draw a quantity against the number of processes, with log axes for a wide range.

    Args:
        lines: Lines; `dashed` ones are thin.
        y_label: Label of the y axis.
        x_label: Label of the x axis.
    """
    def draw(axes: Any) -> None:
        _lines(axes, lines, points=True)
        sizes = sorted({x for line in lines for x in line.x})
        if sizes and sizes[-1] > 8 * sizes[0]:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
        else:
            axes.set(xlim=(0, None), ylim=(0, None))
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:.3g}")
        axes.minorticks_off()
        axes.set(xlabel=x_label, ylabel=y_label)

    return Chart(draw, 8, 4.2, f"{y_label} against {x_label}: {', '.join(line.name for line in lines)}")


def curves(lines: Sequence[Line], x_label: str, y_label: str) -> Chart:
    """Draw lines with many points, such as loss against time.

    Args:
        lines: Lines of the chart.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
    """
    def draw(axes: Any) -> None:
        _lines(axes, lines, points=False)
        axes.set_xlim(left=0)
        known = [value for line in lines for value in line.y if math.isfinite(value)]
        if known and min(known) > 0 and max(known) > 20 * min(known):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axes.set(xlabel=x_label, ylabel=y_label)

    return Chart(draw, 8, 4.2, f"{y_label} against {x_label}: {', '.join(line.name for line in lines)}")


def levels(x: Sequence[float], y: Sequence[int], end: float, x_label: str, y_label: str) -> Chart:
    """Draw an integer that changes over time, as a step plot.

    Args:
        x: Start time of each value; the first is 0.
        y: Values.
        end: End time of the last value.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
    """
    def draw(axes: Any) -> None:
        colour = _OTHERS[-1]
        axes.step([*x, end], [*y, y[-1]], where="post", color=colour, linewidth=2)
        axes.fill_between([*x, end], [*y, y[-1]], step="post", color=colour, alpha=0.15, linewidth=0)
        axes.set(xlim=(0, max(end, 1e-9)), ylim=(0, max(y) + 0.5), yticks=range(max(y) + 1), xlabel=x_label,
                 ylabel=y_label)
        axes.grid(axis="y")

    return Chart(draw, 8, 2.6, f"{y_label} against {x_label}: {', '.join(map(str, y))}")


def _lines(axes: Any, lines: Sequence[Line], points: bool) -> None:
    colours = colours_of(line.name for line in lines)
    for index, line in enumerate(lines):
        style = ":" if line.dashed else _DASHES[index % len(_DASHES)]
        colour = INK if line.name == IDEAL else colours[line.name]
        axes.plot(line.x, line.y, style, color=colour, label=line.name, linewidth=1.2 if line.dashed else 2,
                  marker=_MARKERS[index % len(_MARKERS)] if points and not line.dashed else "",
                  markersize=6, markeredgecolor=PAPER)
        if len(line.low) and len(line.high):
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    axes.grid()
    if lines:
        axes.legend()


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name; a backend has the same colour in all charts."""
    names = list(dict.fromkeys(names))
    taken = {_ENGINES.get(name) for name in names}
    free = itertools.cycle([colour for colour in _OTHERS if colour not in taken])
    return {name: _ENGINES.get(name) or next(free) for name in names}
