"""Pages and charts of reports, in a real browser where it matters what they look like."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvkeras.diagnostics import charts
from hvkeras.diagnostics.html_page import Section, fragment, page, table_html

MAKERS: dict[str, Callable[[], charts.Chart]] = {
    "stacked": lambda: charts.stacked(["native", "tf<dist>"], {"compute": [12.0, 11.0], "wait": [3.0, np.nan],
                                                              "callbacks": [1.0, 2.0]}, "ms"),
    "distribution": lambda: charts.distribution({"native": [1.0, 2.0, 9.0] * 200, "$x_1$": [2.0], "empty": []}, "ms"),
    "scaling": lambda: charts.scaling([charts.Line("native", [1, 2], [9.0, 17.0], [8.0, 15.0], [10.0, 19.0]),
                                       charts.Line(charts.IDEAL, [1, 2], [9.0, 18.0], dashed=True)], "samples per s"),
    "curves": lambda: charts.curves([charts.Line("one process", [0.0, 1.0, 2.0], [2.0, np.nan, 0.01]),
                                    charts.Line("native", [0.0, 1.0], [np.inf, 2.0])], "s", "loss"),
    "nothing": lambda: charts.curves([], "s", "loss"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_chart_is_an_element_that_follows_the_page_and_a_file(name: str, tmp_path: Path) -> None:
    svg = MAKERS[name]().svg()
    assert svg.startswith("<svg role=\"img\" aria-label=") and svg.endswith("</svg>")
    assert "currentColor" in svg and charts.INK not in svg and charts.PAPER not in svg.replace(", #ffffff", "")
    assert not re.search(r"https?:|<metadata|<!DOCTYPE|<\?xml", svg)
    assert svg == MAKERS[name]().svg()  # the same data are the same bytes
    MAKERS[name]().png(tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as image:
        assert image.width == 1200 and len(set(image.convert("L").resize((64, 32)).tobytes())) > 10


def test_what_a_chart_shows_can_be_read() -> None:
    svg = MAKERS["stacked"]().svg()
    for text in ("native", "tf&lt;dist&gt;", "compute", "wait", "callbacks", "12"):
        assert f">{text}</text>" in svg
    assert ">$x_1$</text>" in MAKERS["distribution"]().svg()


def test_charts_of_one_page_share_no_identifiers() -> None:
    identifiers = [found for make in MAKERS.values() for found in re.findall(r"\bid=\"([^\"]+)\"", make().svg())]
    assert len(identifiers) == len(set(identifiers)) > len(MAKERS)
    svg = MAKERS["stacked"]().svg()
    assert set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", svg)) <= set(re.findall(r"\bid=\"([^\"]+)\"", svg))


def test_parts_are_distinguished_without_any_colour() -> None:
    assert len({hatch for _, hatch in charts.PARTS.values()}) == len(charts.PARTS)


def test_an_engine_keeps_its_colour() -> None:
    names = ["native", "horovod", "tfdist", "one process", "rank 0", "rank 1", "plug-in"]
    together = charts.colours_of(names)
    assert len(set(together.values())) == len(names)
    assert charts.colours_of(["tfdist"])["tfdist"] == together["tfdist"]
    assert len(charts.colours_of(f"rank {rank}" for rank in range(64))) == 64


def test_without_matplotlib_a_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert charts.missing() == ""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert charts.missing().startswith("no charts, as matplotlib cannot be imported (")
    assert charts.missing().endswith("): pip install 'hvkeras[report]'")


def test_a_page_escapes_what_it_is_given() -> None:
    made = page("a <b>", ["1 < 2 & 3"], [Section("x > y", table_html(["<i>", "two\nlines"], [["<u>", 3]]), "<note>")])
    for escaped in ("<h1>a &lt;b&gt;</h1>", "<p>1 &lt; 2 &amp; 3</p>", "<h2>x &gt; y</h2>", "two<br>lines",
                    "<td>3</td>", "<td>&lt;u&gt;</td>", "&lt;i&gt;", "&lt;note&gt;"):
        assert escaped in made
    assert not re.search(r"https?:|src=|@import|<link", made)


def test_a_short_row_gives_its_last_cell_the_rest_of_the_line() -> None:
    made = table_html(["name", "step", "loss"], [["native", "failed"]])
    assert "<td class=\"words\" colspan=\"2\">failed</td>" in made


def test_a_fragment_goes_into_the_page_of_a_notebook() -> None:
    made = fragment(["One."], [Section("Two", "<b>three</b>")])
    assert made.startswith("<div class=\"hvkeras part\">") and "<p>One.</p>" in made and "<html" not in made
