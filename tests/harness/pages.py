"""Code in README and docs/: `<!-- file: NAME -->` gives the name of the script in the block below, and
`<!-- lines: NAME -->` that of lines which a test runs among its own.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
LINES = re.compile(r"<!-- lines: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
# For tests that only `make test-trackers` runs, in an environment with these packages.
WITH_TRACKERS = (pytest.mark.nightly, pytest.mark.skipif(
    any(find_spec(name) is None for name in ("keras_tuner", "mlflow", "optuna", "wandb")),
    reason="not run: needs MLflow, W&B, Keras Tuner and Optuna. HINT: make test-trackers"))


def scripts(page: Path) -> dict[str, str]:
    """Return the scripts on a page, by name."""
    return dict(FILE.findall(page.read_text()))


def lines(page: Path) -> dict[str, str]:
    """Return the named lines on a page, by name."""
    return dict(LINES.findall(page.read_text()))
