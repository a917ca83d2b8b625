"""Fixtures for tests on real schedulers."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def long_waits():
    """The imports of several cold ranks on two cores take a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVKERAS_START_TIMEOUT", "120")
        yield
