"""Lets `harness.costs` measure the Python processes that tests start; does nothing without it."""

import importlib.util
import os
from pathlib import Path

if os.environ.get("HARNESS_COSTS"):
    spec = importlib.util.spec_from_file_location("harness_costs", Path(__file__).parents[1] / "costs.py")
    assert spec and spec.loader
    costs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(costs)
    costs.watch()
