"""Runs an example, and notes what came of it on this rank. Arguments: the example, and its own arguments."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np

from harness.checks import check, run_checks


@check
def trained() -> dict[str, Any]:
    """The sums of the model's weights, and the words that its texts may have; both are equal on all ranks of a job."""
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    found = runpy.run_path(sys.argv[0], run_name="__main__")
    vocabulary = found["vectorize"].get_vocabulary() if "vectorize" in found else []
    return {"weights": [np.asarray(weight, "float64").sum() for weight in found["model"].get_weights()],
            "vocabulary": vocabulary}


if __name__ == "__main__":
    run_checks()
