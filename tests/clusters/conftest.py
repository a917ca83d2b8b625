"""Fixtures for tests on real schedulers, each of which runs where its package is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

_NEED = {"test_parquet.py": "pyarrow"}

collect_ignore = [name for name, package in _NEED.items() if find_spec(package) is None]


@pytest.fixture(scope="session", autouse=True)
def long_waits():
    """The imports of several cold ranks on two cores take a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVKERAS_START_TIMEOUT", "120")
        yield
