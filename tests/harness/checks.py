"""Worker side of one launch with many checks; see the package's docstring."""

from __future__ import annotations

import ast
import json
import os
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from harness.launchers import announced_rank

RESULTS = "HARNESS_RESULTS"
WANTED = "HARNESS_CHECKS"  # environment variable: names of the checks to run; all if unset
Check = TypeVar("Check", bound=Callable[[], Any])
_checks: list[Callable[[], Any]] = []


def check(function: Check) -> Check:
    """Register a function without parameters, whose return value becomes its result."""
    _checks.append(function)
    return function


def names_of_checks(script: Path) -> list[str]:
    """Return the names of a worker script's checks without running it, for `pytest.mark.parametrize`."""
    return [
        node.name
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "check" for mark in node.decorator_list)
    ]


def run_checks(before: Callable[[], Any] | None = None, after: Callable[[], Any] | None = None,
               chosen: Collection[str] = ()) -> None:
    """Run the registered checks, and write each result immediately.

    Args:
        before: Called first, usually `hvd.init`.
        after: Called last, usually `hvd.shutdown`.
        chosen: Names of checks; all if empty. Only those run whose results the session's tests read.

    Raises:
        Exception: The error of a check, after it is recorded. It ends the job.
    """
    results: dict[str, dict[str, Any]] = {}
    path = Path(os.environ[RESULTS]) / f"rank.{announced_rank(os.environ) or 0}.json"
    if before is not None:
        before()
    wanted = os.environ[WANTED].split() if WANTED in os.environ else [each.__name__ for each in _checks]
    for function in [each for each in _checks if each.__name__ in wanted and (not chosen or each.__name__ in chosen)]:
        began = time.monotonic()
        try:
            results[function.__name__] = {"value": _plain(function())}
        except BaseException:
            results[function.__name__] = {"error": traceback.format_exc()}
            raise
        finally:
            results[function.__name__]["seconds"] = round(time.monotonic() - began, 1)
            path.write_text(json.dumps(results))
    if after is not None:
        after()


def _plain(value: Any) -> Any:
    """Convert tensors, arrays and tuples to types that JSON supports."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    return value
