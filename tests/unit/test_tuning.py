"""`hvd.DistributedTuner` in one process; `make test-trackers` runs it on two ranks with Keras Tuner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hvkeras as hvd


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_what_is_no_tuner_is_refused() -> None:
    with pytest.raises(hvd.UsageError, match=r"takes a tuner of Keras Tuner\. Received: tuner='object'"):
        hvd.DistributedTuner(object())
