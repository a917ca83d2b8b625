"""`SyncBatchNormalization` on one rank in both versions of Keras; test_horovod_surface.py has several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

import hvkeras as hvd
from hvkeras.training import sync_batch_norm


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    yield
    hvd.shutdown()


@pytest.mark.parametrize(("family", "moments"), [
    (keras, sync_batch_norm._KerasMoments), (tf_keras, sync_batch_norm._TfKerasMoments)], ids=["keras", "tf_keras"])
def test_one_rank_normalizes_as_keras_does(family: Any, moments: type) -> None:
    plain = family.layers.BatchNormalization
    made = type("SyncBatchNormalization", (moments, plain), {})()
    batch = np.random.default_rng(1).normal(3.0, size=(6, 4)).astype("float32")
    assert np.allclose(made(batch, training=True), plain()(batch, training=True), atol=1e-5)
