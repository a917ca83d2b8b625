"""Progress display of a comparison: a terminal line that is redrawn, or one output of a notebook cell."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from hvkeras.host.console import in_notebook


class ProgressDisplay:
    """A terminal; on a console that is not one, only messages are printed, and no progress.

    Args:
        console: The console to print to; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console: Console = console or Console(stderr=True, highlight=False, force_jupyter=False)
        self._status: Status | None = None

    def update(self, title: str, detail: str) -> None:
        """Shows the progress, in place of what the last call showed.

        Args:
            title: What runs, and for how long.
            detail: What it has printed last; it is cut to fit the line.
        """
        if not self.console.is_terminal:
            return
        room = max(0, self.console.width - 6 - len(title))
        text = f"{escape(title)}  [dim]{escape(detail[:room])}[/dim]"
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def finish(self, title: str) -> None:
        """Replaces the moving line with a final one."""
        if self._status is not None:
            self._status.stop()
            self._status = None
            self.say(title)

    def say(self, line: str) -> None:
        """Prints a line."""
        self.console.print(line, markup=False)


class NotebookDisplay(ProgressDisplay):
    """A notebook cell: one output, which changes about once a second; the notebook keeps only its last state."""

    WIDTH = 99

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []  # lines that stay
        self._shown = ""
        self._display: Any = None

    def update(self, title: str, detail: str) -> None:
        """Shows the progress and the last output, once for each second that the title counts."""
        if title != self._shown:
            self._shown = title
            self._show(f"{title}  {detail}"[:self.WIDTH])

    def finish(self, title: str) -> None:
        """Replaces the moving line with a final one."""
        self._lines.append(title)
        self._show()

    def say(self, line: str) -> None:
        """Prints a line."""
        print(line, flush=True)

    def _show(self, *moving: str) -> None:
        from IPython.display import display

        content = {"text/plain": "\n".join([*self._lines, *moving])}
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)


def progress_display() -> ProgressDisplay:
    """Returns what shows progress where this process prints."""
    return NotebookDisplay() if in_notebook() else ProgressDisplay()
