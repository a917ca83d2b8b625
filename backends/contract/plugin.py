"""pytest's entry point: adds the options of the contract tests where a command line runs these tests."""

from __future__ import annotations

from typing import Any

CONTRACT = "hvkeras.backends.contract"


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Registers the options, since pytest reads no conftest.py of a package that `--pyargs` names before it parses."""
    if any(argument.startswith(CONTRACT) for argument in args):
        early_config.pluginmanager.import_plugin(f"{CONTRACT}.options")
