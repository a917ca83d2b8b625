"""A headless browser that renders HTML pages."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
          "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars")
_DEADLINE = 120.0  # seconds; usually two or three
_DARK = "--blink-settings=preferredColorScheme=0"


def dom(page: Path, width: int = 1000) -> str:
    """Return the rendered DOM of a page, as HTML, in a window of that many pixels."""
    return _run([f"--window-size={width},3000", "--dump-dom", page.as_uri()])


def screenshot(page: Path, picture: Path, dark: bool = False, size: tuple[int, int] = (1000, 3000)) -> None:
    """Write a screenshot of a page.

    Args:
        page: The HTML file.
        picture: The PNG file to write.
        dark: Whether the user prefers a dark color scheme.
        size: Width and height of the window in pixels.
    """
    _run([*([_DARK] if dark else []), f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}", page.as_uri()])


def _run(arguments: list[str]) -> str:
    browser = shutil.which("chromium")
    if not browser:
        pytest.skip("not run: needs a browser. HINT: tools/system_packages.sh chromium")
    with tempfile.TemporaryDirectory(prefix="hvkeras-browser-") as profile:
        environment = {"HOME": profile, "PATH": "/usr/bin:/bin", "TMPDIR": profile}
        done = subprocess.run([browser, *_FLAGS, f"--user-data-dir={profile}/data", *arguments], capture_output=True,
                              text=True, timeout=_DEADLINE, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
