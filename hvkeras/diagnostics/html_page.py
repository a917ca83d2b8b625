"""Reports as self-contained HTML pages, with light and dark colours, for screen and print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Charts use `color`, --paper and --line; see hvkeras.diagnostics.charts.
STYLE = """
.hvkeras { color-scheme: light dark; --paper: #ffffff; --ink: #1d2127; --quiet: #5a6270; --line: #d9dde3;
  --raised: #f5f7f9; --accent: #0072b2;
  color: var(--ink); background: var(--paper);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { .hvkeras { --paper: #14171b; --ink: #e6e9ed; --quiet: #a3acb8; --line: #353b44;
  --raised: #1d2127; --accent: #56b4e9; } }
body.hvkeras { margin: 0; }
.hvkeras.part { padding: .75rem 1rem; border-radius: 6px; max-width: 60rem; }
.hvkeras main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
.hvkeras h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1.25rem; overflow-wrap: anywhere; }
.hvkeras h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
.hvkeras .summary { margin: 0; padding: 1rem 1.25rem; background: var(--raised); border-left: 4px solid var(--accent);
  border-radius: 0 6px 6px 0; max-width: 47.5rem; }
.hvkeras .summary p { margin: .4rem 0; max-width: none; }
.hvkeras p { max-width: 46rem; }
.hvkeras .note { color: var(--quiet); font-size: .875rem; margin: .5rem 0; overflow-wrap: anywhere; }
.hvkeras .wide { overflow-x: auto; }
.hvkeras table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .5rem 0;
  color: inherit; background: none; }
.hvkeras th, .hvkeras td { padding: .35rem .55rem; text-align: right; vertical-align: top; color: inherit;
  background: none; border: 0; border-bottom: 1px solid var(--line); }
.hvkeras td { white-space: nowrap; }
.hvkeras th { vertical-align: bottom; font-weight: 600; color: var(--quiet); border-bottom-width: 2px; }
.hvkeras th:first-child, .hvkeras td:first-child { text-align: left; padding-left: 0; }
.hvkeras td:first-child { white-space: normal; min-width: 6rem; }
.hvkeras td.words { text-align: left; white-space: normal; }
.hvkeras svg { display: block; max-width: min(100%, 50rem); height: auto; margin: .75rem 0; }
.hvkeras pre { background: var(--raised); color: inherit; padding: .75rem 1rem; border-radius: 6px; overflow-x: auto;
  font-size: .85rem; }
.hvkeras ul { padding-left: 1.25rem; max-width: 46rem; }
@media print { .hvkeras { --paper: #ffffff; --ink: #000000; --quiet: #444444; --line: #bbbbbb; --raised: #ffffff;
  color-scheme: light; font-size: 11pt; } .hvkeras main { max-width: none; padding: 0; }
  .hvkeras section { break-inside: avoid; } .hvkeras .wide { overflow: visible; } }
"""


@dataclass(frozen=True)
class Section:
    """Section of a page.

    Attributes:
        title: Heading, as plain text.
        html: Content, as HTML.
        note: Note in small print below the content, as plain text, or "".
    """

    title: str
    html: str
    note: str = ""


def page(title: str, sentences: Sequence[str], sections: Sequence[Section]) -> str:
    """Render a page.

    Args:
        title: Heading, as plain text.
        sentences: Paragraphs of the summary at the top, as plain text.
        sections: Sections below the summary.

    Returns:
        HTML document without external references.
    """
    return ("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
            "<meta name=\"color-scheme\" content=\"light dark\">\n"
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body class=\"hvkeras\">\n<main>\n"
            f"<h1>{escape(title)}</h1>\n{_body(sentences, sections)}</main>\n</body>\n</html>\n")


def fragment(sentences: Sequence[str], sections: Sequence[Section]) -> str:
    """Render a page without a title, for embedding in another one, such as the output of a notebook cell."""
    return f"<div class=\"hvkeras part\">\n<style>{STYLE}</style>\n{_body(sentences, sections)}</div>\n"


def _body(sentences: Sequence[str], sections: Sequence[Section]) -> str:
    summary = "".join(f"<p>{escape(sentence)}</p>\n" for sentence in sentences)
    return ((f"<div class=\"summary\">\n{summary}</div>\n" if summary else "")
            + "".join(_section(section) for section in sections))


def _section(section: Section) -> str:
    note = f"<p class=\"note\">{escape(section.note)}</p>\n" if section.note else ""
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{section.html}\n{note}</section>\n"


def table_html(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Render a table; numbers are right-aligned, longer text is left-aligned.

    Args:
        headers: Header row.
        rows: Other rows; the last cell of a shorter row spans the remaining columns.

    Returns:
        HTML, with the cells' text escaped.
    """
    head = "".join(f"<th scope=\"col\">{_lines(header)}</th>" for header in headers)
    body = "".join(f"<tr>{_row(row, len(headers))}</tr>\n" for row in rows)
    return (f"<div class=\"wide\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>")


def _row(row: Sequence[object], columns: int) -> str:
    cells = []
    for index, cell in enumerate(row):
        width = columns - len(row) + 1 if index == len(row) - 1 else 1
        words = " class=\"words\"" if index and (width > 1 or len(str(cell)) > 24) else ""
        span = f" colspan=\"{width}\"" if width > 1 else ""
        cells.append(f"<td{words}{span}>{_lines(cell)}</td>")
    return "".join(cells)


def _lines(text: object) -> str:
    return escape(str(text)).replace("\n", "<br>")
