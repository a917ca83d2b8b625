"""picture.py PAGE.html PICTURE.png: screenshot of the top of a page, for docs/compare.md; needs chromium and Pillow."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness.browser import screenshot

WIDTH, HEIGHT = 860, 1600
COLORS = 128  # for a small file

page, picture = (Path(argument).absolute() for argument in sys.argv[1:])
screenshot(page, picture, size=(WIDTH, HEIGHT))
with Image.open(picture) as image:
    image.convert("RGB").quantize(COLORS).save(picture, optimize=True)
