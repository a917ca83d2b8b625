"""The comparison of two runs of a script: it must see small differences, or the tests that use it mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from harness import results

FOUND: dict[str, Any] = {"weight.000": np.linspace(-1, 1, 50), "weight.001": np.zeros(3),
                         "history.loss": np.array([0.5])}


def changed(name: str, by: float) -> dict[str, Any]:
    return {**FOUND, name: FOUND[name] + by}


@pytest.mark.parametrize("name", list(FOUND))
def test_a_small_difference_is_named(name: str) -> None:
    assert not results.differences(FOUND, FOUND, 0.0)
    assert not results.differences(changed(name, 1e-10), FOUND, 1e-8)
    (line,) = results.differences(changed(name, 1e-5), FOUND, 1e-8)
    assert line.startswith(f"{name}: apart by 1e-05")


def test_missing_arrays_other_shapes_and_infinities_are_differences() -> None:
    fewer = {name: value for name, value in FOUND.items() if name != "weight.001"}
    assert results.differences(fewer, FOUND, 1.0) == ["weight.001: only in the expected results"]
    assert results.differences(FOUND, fewer, 1.0) == ["weight.001: only in the found results"]
    assert len(results.differences({**FOUND, "weight.001": np.zeros(4)}, FOUND, 1.0)) == 1
    assert len(results.differences(changed("weight.001", np.nan), FOUND, 1.0)) == 1
    assert results.differences({"names": np.array(["a"])}, {"names": np.array(["b"])}, 1.0) == ["names: other values"]


def test_the_root_mean_square_is_that_of_all_values() -> None:
    assert results.root_mean_square({"a": [3.0, 3.0], "b": [0.0, 0.0]}) == pytest.approx(3 / np.sqrt(2))
    assert results.root_mean_square(changed("weight.001", 1e-3), FOUND) == pytest.approx(1e-3 * np.sqrt(3 / 54))
    assert list(results.weights(FOUND)) == ["weight.000", "weight.001"]


def write(folder: Path, value: float) -> Path:
    (folder / "sub").mkdir(parents=True)
    np.savez(folder / results.RESULT, value=value)
    (folder / "log.csv").write_text(f"epoch,loss\n0,{value}\n")
    (folder / "sub" / "events.out.tfevents.1795.host.12").write_bytes(b"")
    with h5py.File(folder / "model.weights.h5", "w") as file:
        file.create_dataset("layer/kernel", data=[value])
    Image.fromarray(np.full((2, 2), int(255 * value), "uint8")).save(folder / "image.png")
    return folder


def test_files_are_compared_by_their_numbers(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", 0.5), write(tmp_path / "other", 0.5)
    assert "sub/events.out.tfevents" in results.files(one)
    assert not results.different_files(one, other, 0.0)
    third = write(tmp_path / "third", 0.75)
    lines = results.different_files(third, one, 1e-3)
    assert [line.split(":")[0] for line in lines] == ["image.png", "log.csv", "model.weights.h5", "result.npz"]
    (third / "more.txt").touch()
    assert "more.txt: only found" in results.different_files(third, one, 1.0)


def test_lines_are_counted_without_numbers_and_redrawn_bars() -> None:
    bar = ("\r\x1b[1m1/7\x1b[0m ━━━ 3s 633ms/step - accuracy: 0.03\b\b\b"
           "\r\x1b[1m7/7\x1b[0m ━━━━ 0s 5ms/step - accuracy: 0.1 - loss: 2\n")
    assert results.lines_of(f"Epoch 1/2\n{bar}\nTest loss: 0.5\n") == {
        "Epoch #/#": 1, "7/7 ['accuracy', 'loss']": 1, "Test loss: #": 1}
    assert results.lines_of(f"Epoch 1/2\n{bar}".replace("\r", "\n")) == results.lines_of(f"Epoch 1/2\n{bar}")
    assert results.lines_of("7/7 - 1s - 250ms/step - loss: 0.5\n") == {"7/7 ['loss']": 1}
    assert results.lines_of("[0] Test loss: 0.25\n[1] Test loss: 1e-3\n") == {"Test loss: #": 2}
