"""The report of `hvkeras compare`, in a real browser."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.browser import dom, screenshot
from hvkeras.comparison import report
from hvkeras.comparison.functions import ComparisonResult
from hvkeras.comparison.result import ONE_PROCESS, SHARED, Number, Result
from hvkeras.comparison.rows import Comparison, rows_of
from hvkeras.comparison.table import sentences
from hvkeras.diagnostics.time_split import TimeSplit

TITLES = {"All backends", "Step times", "Where the time of a step goes", "Scaling", "Loss against time",
          "How this was measured"}
CHARTS = ["loss.png", "scaling.png", "step_times.png", "time_split.png"]


def comparison(folder: Path) -> Comparison:
    """Two runs of two backends on 2 and on 4 processes and of one process; another backend fails on 4."""
    random, runs = np.random.default_rng(0), []
    for number in (1, 2):
        for name, size, milliseconds in (("native", 2, 12), ("native", 4, 14), ("horovod", 2, 30), ("tfdist", 2, 16),
                                         ("tfdist", 4, 19), (ONE_PROCESS, 1, 10)):
            step = (milliseconds + number / 10) / 1000
            part = TimeSplit(step, 0.001, 0.009, 0.3 * (step - 0.010), 0.7 * (step - 0.010), 0.002, 300)
            runs.append(Result(
                name, size, "", tuple(step * (0.9 + 0.1 * random.gamma(2, size=300))), 32.0 * size,
                Number(0.97, "evaluate()"), Number(0.11, "evaluate()"), 1e-7 if name == "tfdist" else None,
                round=number, seconds=12.0, metrics={"accuracy": 0.97}, splits=dict.fromkeys(range(size), part),
                bytes_in_step=4e6, peak_memory=7 * 10**8,
                losses=[(second * step, 2.3 * 0.9**second) for second in range(50)]))
    runs.append(Result("horovod", 4, "rank 1 on <node> failed with ValueError: x & y", error_tail="ValueError: x & y"))
    return Comparison("python train.py --name '<b>'", (2, 4), 2, rows_of(runs), "on 1 of 4 cores, as each rank", folder,
                      1.7e9, 100.0, {"cpu": "a processor"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the report and its charts."""
    made = tmp_path_factory.mktemp("report")
    report.write(comparison(made), made)
    return made


def words(html: str) -> str:
    """What there is to read."""
    return " ".join(unescape(re.sub(r"<style.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)).split())


@pytest.mark.slow
def test_a_browser_shows_the_sentences_the_table_and_the_charts(folder: Path) -> None:
    shown = dom(folder / report.NAME)
    read = words(shown)
    said = sentences(comparison(folder))
    assert [sentence.split()[0] for sentence in said] == ["native", "The", "With"]
    first = [words(found) for found in re.findall(r"<p>(.*?)</p>", shown)[:3]]
    assert first == said
    assert set(re.findall(r"<h2>(.*?)</h2>", shown)) == TITLES
    assert len(re.findall(r"<svg role=\"img\"", shown)) == len(CHARTS)
    for text in ("failed (1)", "(1) rank 1 on <node> failed with ValueError: x & y", "python train.py --name '<b>'",
                 "700", "compute", "communication", "ideal", "seconds since training began"):
        assert text in read


def test_the_report_fetches_nothing(folder: Path) -> None:
    text = (folder / report.NAME).read_text()
    assert not re.search(r"https?:|//\w|<script|<link|<img|<iframe|@import|\bsrc=", text)
    assert set(re.findall(r"(?:href=|url\()[\"']?(.)", text)) == {"#"}


@pytest.mark.slow
def test_the_report_is_drawn_in_light_and_dark(folder: Path, tmp_path: Path) -> None:
    colours = {}
    for dark in (False, True):
        screenshot(folder / report.NAME, tmp_path / "page.png", dark)
        with Image.open(tmp_path / "page.png") as image:
            assert image.size == (1000, 3000)
            picture = np.asarray(image.convert("RGB")).astype(int)
        colours[dark] = picture[5, 5].mean()
        drawn = abs(picture - picture[5, 5]).max(axis=2) > 60
        assert 0.02 < drawn.mean() < 0.6
        assert all(part.any() for part in np.array_split(drawn[:2400], 12))  # something to see all the way down
        for engine in ((0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)):
            assert (abs(picture - engine).max(axis=2) < 8).sum() > 200
    assert colours[False] > 240 and colours[True] < 40


# Writes by how many pixels each table of a page is wider than its place.
MEASURE = """<script>for (const each of document.querySelectorAll(".wide"))
  each.dataset.hidden = each.scrollWidth - each.clientWidth</script>"""


@pytest.mark.slow
def test_no_column_is_cut_off_in_a_window_of_1000_pixels(folder: Path, tmp_path: Path) -> None:
    runs = [replace(run, name=name, peak_memory=1_234_000_000, bytes_in_step=12e6)
            for row in comparison(folder).rows for run in row.runs for name in (run.name, f"{run.name}{SHARED}")
            if run.name != ONE_PROCESS or name == ONE_PROCESS]
    report.write(replace(comparison(folder), rows=rows_of(runs)), tmp_path)
    page = tmp_path / report.NAME
    page.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    shown = dom(page, 1000)
    assert "peak<br>memory,<br>MB" in shown
    assert re.findall(r'data-hidden="(\d+)"', shown) == ["0"] * shown.count('class="wide"')


@pytest.mark.slow
def test_the_report_is_readable_on_a_phone(folder: Path, tmp_path: Path) -> None:
    screenshot(folder / report.NAME, tmp_path / "page.png", size=(500, 1500))
    with Image.open(tmp_path / "page.png") as image:
        picture = np.asarray(image.convert("L")).astype(int)
    assert (abs(picture[:, -8:] - picture[5, 5]) < 30).all()  # nothing is cut off at the right


def test_the_charts_are_files_too(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [*CHARTS[:1], "report.html", *CHARTS[1:]]
    for name in CHARTS:
        with Image.open(folder / name) as image:
            assert image.format == "PNG" and image.width == 1200


def test_without_matplotlib_all_is_there_but_the_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = comparison(tmp_path)
    (tmp_path / "loss.png").touch()  # of an earlier comparison
    report.write(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    text = (tmp_path / "report.html").read_text()
    assert "<svg" not in text and "Where the time of a step goes" in text and sentences(made)[0] in unescape(text)
    assert "no charts, as matplotlib cannot be imported" in ComparisonResult(made).table()
    assert "<svg" not in ComparisonResult(made)._repr_html_()


def test_a_comparison_of_nothing_is_a_page_as_well(tmp_path: Path) -> None:
    made = Comparison("train.py", (2,), 1, rows_of([Result("native", 2, "no")]), "", tmp_path, 1.7e9, 1.0)
    report.write(made, tmp_path)
    assert "No backend ran on 2 processes: the table gives the reason." in (tmp_path / "report.html").read_text()


def test_a_notebook_shows_the_report_and_a_terminal_the_table(folder: Path) -> None:
    made = ComparisonResult(comparison(folder))
    html = made._repr_html_()
    assert html.startswith("<div class=\"hvkeras part\">") and html.count("<svg role=\"img\"") == len(CHARTS)
    assert all(sentence in unescape(html) for sentence in made.sentences)
    assert repr(made) == made.table() and made.table().endswith(f"report: {folder / 'report.html'}")
    assert [(row["backend"], row["processes"]) for row in made.rows] == [
        ("native", 2), ("native", 4), ("horovod", 2), ("tfdist", 2), ("tfdist", 4), (ONE_PROCESS, 1), ("horovod", 4)]
    assert all(list(row) == list(made.rows[0]) for row in made.rows)  # the columns of a data frame
    assert len(made.runs) == 13
