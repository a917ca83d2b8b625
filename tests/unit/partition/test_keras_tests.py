"""Keras's own tests: what two simulated ranks make of each function that they call, beside what TensorFlow computes.

What becomes of Keras's tests does not count: they go on with what TensorFlow computes (see `keras_tests.py`). Some
files need packages that `make test-soak` installs; without these, they are left out.

What was found is in `.pytest_cache/d/keras_tests`: above all, what was gathered, most often first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("keras_tests.py")
# What Keras's tests import, apart from the environment's own: see the Makefile.
PACKAGES = Path(sys.prefix) / "keras_suite"
MOST = 0.02  # of operations with divided operands that may be gathered

SAMPLE = (
    "losses/loss_test.py",
    "layers/core/dense_test.py",
    "layers/normalization/batch_normalization_test.py",
    "layers/attention/attention_test.py",
    "layers/rnn/simple_rnn_test.py",
)
OF_BATCHES = {
    "core layers": ("layers/core",),
    "convolutional layers": ("layers/convolutional", "layers/pooling"),
    "attention": ("layers/attention",),
    "recurrent layers": ("layers/rnn",),
    "further layers": (
        "layers/activations",
        "layers/merging",
        "layers/normalization",
        "layers/regularization",
        "layers/reshaping",
    ),
    "preprocessing layers": ("layers/preprocessing",),
    "losses and metrics": ("losses", "metrics"),
    "optimizers": ("optimizers",),
}
OF_ARRAYS = {
    "numpy": ("ops/numpy_test.py",),
    "operations": ("ops/core_test.py", "ops/linalg_test.py", "ops/math_test.py"),
    "operations of networks": ("ops/image_test.py", "ops/nn_test.py"),
}


def found_in(files: Sequence[str], path: Path, deadline: float) -> dict[str, Any]:
    """Return what was found in files of tests.

    Args:
        files: The files, or folders, of Keras.
        path: Where to write it.
        deadline: Timeout in seconds.
    """
    done = subprocess.run(
        [sys.executable, WORKER, path, PACKAGES, *files],
        env={**os.environ, "PYTHONPATH": str(WORKER.parents[2])},  # for `unit`
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=deadline,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(path.read_text())


def assert_right(found: dict[str, Any]) -> None:
    """Fail if a result or a variable differs."""
    assert not found["failures"], "\n\n".join(found["failures"])
    assert found["functions"].get("compared")


def assert_divided(found: dict[str, Any]) -> None:
    """Fail if too much is gathered, also where rows meet rows."""
    assert sum(each["gathered"] for each in found["gathered"]) <= MOST * found["divided"], found["gathered"]


@pytest.mark.slow
def test_a_sample(tmp_path: Path):
    found = found_in(SAMPLE, tmp_path / "sample.json", 600)
    assert_right(found)
    assert_divided(found)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("group", OF_BATCHES)
def test_rows_stay_divided(group: str, cache: pytest.Cache):
    found = found_in(OF_BATCHES[group], cache.mkdir("keras_tests") / f"{group}.json", 7000)
    assert_right(found)
    assert_divided(found)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("group", OF_ARRAYS)
def test_operations_along_any_axis(group: str, cache: pytest.Cache):
    assert_right(found_in(OF_ARRAYS[group], cache.mkdir("keras_tests") / f"{group}.json", 7000))
