"""pytest plug-in that adds the options of the contract tests to command lines that run them."""

from __future__ import annotations

from typing import Any

CONTRACT = "hvkeras.backends.contract"


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Register the options: pytest parses its command line before it reads the conftest.py of a `--pyargs` package."""
    if any(argument.startswith(CONTRACT) for argument in args):
        early_config.pluginmanager.import_plugin(f"{CONTRACT}.options")
