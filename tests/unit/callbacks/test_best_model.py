"""`BestModelCheckpoint` in one process: what it keeps, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvkeras as hvd
from hvkeras.callbacks import BestModelCheckpoint
from hvkeras.keras import callbacks as twins


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    yield
    hvd.shutdown()


def compiled() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def data() -> tuple[Any, Any]:
    return np.random.default_rng(1).normal(size=(4, 3)).astype("float32"), np.ones((4, 1), "float32")


class Score(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["score"] = [1.0, 3.0, 2.0][epoch]


@pytest.mark.parametrize(("weights_only", "name"),
                         [(False, "best.keras"), (False, "best.h5"), (True, "best.weights.h5")])
def test_the_best_model_is_kept(weights_only: bool, name: str, tmp_path: Path) -> None:
    model, seen = compiled(), []
    best = BestModelCheckpoint("score", mode="max", save_weights_only=weights_only)
    best.filepath = tmp_path / "made on the way" / name
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of HDF5
        model.fit(*data(), verbose=0, epochs=3, callbacks=[Score(), keep, best])
        again = compiled()
        (again.load_weights if weights_only else lambda path: again.set_weights(
            keras.models.load_model(path, compile=False).get_weights()))(str(best.filepath))
    assert [path.name for path in (tmp_path / "made on the way").iterdir()] == [name]
    for one, other in zip(again.get_weights(), seen[1], strict=True):
        assert np.array_equal(one, other)
    assert "save" not in vars(model)


def test_a_save_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    class Unsaveable(keras.Sequential):  # type: ignore[misc]
        def save_weights(self, filepath: Any, **options: Any) -> None:
            Path(filepath).write_text("half")
            raise OSError("no space left")

    path = tmp_path / "best.weights.h5"
    model = Unsaveable([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    path.write_text("former")
    with pytest.raises(OSError, match="no space left"):
        model.fit(*data(), verbose=0, callbacks=[BestModelCheckpoint("loss", save_weights_only=True, filepath=path)])
    assert [each.name for each in tmp_path.iterdir()] == ["best.weights.h5"]
    assert path.read_text() == "former"


@pytest.mark.parametrize(("path", "weights_only", "message"), [
    (None, False, "needs a filepath.*pass filepath="),
    ("", False, "needs a filepath"),
    ("best", False, "must end in .keras or .h5 for a whole model"),
    ("best.keras", True, "must end in .weights.h5 for weights"),
])
def test_wrong_paths_of_the_best_model(path: Any, weights_only: bool, message: str) -> None:
    callback = BestModelCheckpoint("loss", save_weights_only=weights_only, filepath=path)
    with pytest.raises(hvd.UsageError, match=message):
        compiled().fit(*data(), verbose=0, callbacks=[callback])


def test_the_alias_takes_its_parameters_in_the_order_of_horovod_keras() -> None:
    callback = twins.BestModelCheckpoint("loss", 1, "max", 5)
    assert (callback.monitor, callback.verbose, callback.save_freq) == ("loss", 1, 5)
    assert isinstance(callback, keras.callbacks.ModelCheckpoint)


def test_every_so_many_batches(tmp_path: Path) -> None:
    checkpoint = BestModelCheckpoint("loss", mode="min", save_freq=2, filepath=tmp_path / "{epoch}-{batch}.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of Keras
        compiled().fit(*data(), batch_size=1, verbose=0, callbacks=[checkpoint])
    assert "1-2.keras" in {path.name for path in tmp_path.iterdir()} <= {"1-2.keras", "1-4.keras"}
