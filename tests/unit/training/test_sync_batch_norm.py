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


@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_one_rank_normalizes_as_keras_does(family: Any) -> None:
    plain, made = family.layers.BatchNormalization(), sync_batch_norm.class_for(family)()
    batch = np.random.default_rng(1).normal(1000.0, size=(64, 4)).astype("float32")
    assert np.allclose(made(batch, training=True), plain(batch, training=True), atol=1e-3)
    assert np.allclose(made.get_weights(), plain.get_weights(), atol=1e-5)


@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_layer_of_an_older_file_is_synchronized(family: Any) -> None:
    cls = sync_batch_norm.class_for(family)
    assert cls.from_config({**cls(momentum=0.5).get_config(), "synchronized": False}).synchronized
