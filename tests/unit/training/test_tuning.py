"""`hvd.DistributedTuner` in one process; `make test-trackers` runs it on two ranks with Keras Tuner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hvkeras as hvd


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init()
    yield
    hvd.shutdown()


def test_what_is_no_tuner_is_refused() -> None:
    with pytest.raises(hvd.UsageError, match=r"takes a tuner of Keras Tuner\. Received: tuner='object'"):
        hvd.DistributedTuner(object())
