"""Start `harness.costs` in the Python processes of tests if HARNESS_COSTS is set."""

import importlib.util
import os
from pathlib import Path

if os.environ.get("HARNESS_COSTS"):
    spec = importlib.util.spec_from_file_location("harness_costs", Path(__file__).parents[1] / "costs.py")
    assert spec and spec.loader
    costs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(costs)
    costs.watch()
