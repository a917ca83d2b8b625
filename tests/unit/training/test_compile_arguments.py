"""The arguments of `compile` that ranks compare."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from hvkeras.training.model_description import arguments_of


@pytest.mark.filterwarnings("ignore:__array__ implementation", "ignore:You are saving your model as an HDF5 file")
def test_a_model_that_was_saved_is_compiled_as_before(tmp_path: Path) -> None:
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.5, beta_1=0.8), "mse")
    before = arguments_of(model)
    assert ("optimizer['beta_1']", "0.8") in before
    model.save(tmp_path / "model.h5")  # which takes the optimizer out of what Keras 3 keeps of compile
    assert arguments_of(model) == before
