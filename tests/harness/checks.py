"""The worker's side of one launch with many checks; see the package's docstring."""

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
WANTED = "HARNESS_CHECKS"  # the variable that names the checks that tests will ask for; all, if it is not set
Check = TypeVar("Check", bound=Callable[[], Any])
_checks: list[Callable[[], Any]] = []


def check(function: Check) -> Check:
    """Registers a function without parameters; its return value becomes its result."""
    _checks.append(function)
    return function


def names_of_checks(script: Path) -> list[str]:
    """Lists a worker script's checks without running it, for `pytest.mark.parametrize`."""
    return [
        node.name
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "check" for mark in node.decorator_list)
    ]


def run_checks(before: Callable[[], Any] | None = None, after: Callable[[], Any] | None = None,
               chosen: Collection[str] = ()) -> None:
    """Runs the registered checks, writing each result as soon as it is there.

    Args:
        before: Called first, `hvd.init` as a rule.
        after: Called last, `hvd.shutdown` as a rule.
        chosen: Their names; all checks if empty. Of these, those run whose results the session's tests read.

    Raises:
        Exception: Whatever a check raised, after noting it: the job ends with it.
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
    """Turns tensors, arrays and tuples into what JSON holds."""
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
