"""Small image datasets: handwritten digits in this folder, or MNIST and Fashion-MNIST, which Keras downloads.

The digits are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, license CC BY 4.0: 1797 images of 8 x 8 pixels, 17 levels
of grey.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvkeras as hvd

DATASETS = ("digits", "mnist", "fashion_mnist")
DIGITS = Path(__file__).parent / "digits.npz"


def load(name: str) -> tuple[Any, Any, Any, Any]:
    """Load a dataset on every rank. If any rank cannot download it, all ranks load the digits instead.

    Args:
        name: One of `DATASETS`.

    Returns:
        `(x_train, y_train, x_test, y_test)`. Images are float32 in [0, 1], of shape `[N, height, width, 1]`.
    """
    if name != "digits" and not all(hvd.allgather_object(_download(name))):
        if hvd.rank() == 0:
            print(f"{name} cannot be downloaded: training on the digits in examples/digits.npz instead", flush=True)
        name = "digits"
    return digits() if name == "digits" else _keras_dataset(name)


def _download(name: str) -> bool:
    """Download a dataset once per host, on local rank 0, and return whether that succeeded."""
    if hvd.local_rank() != 0:
        return True
    default_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)
    try:
        _keras_dataset(name)
    except Exception:  # noqa: BLE001 - the digits are the fallback for any error
        return False
    finally:
        socket.setdefaulttimeout(default_timeout)
    return True


def _keras_dataset(name: str) -> tuple[Any, Any, Any, Any]:
    (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    return _scaled(x_train, 255), y_train, _scaled(x_test, 255), y_test


def digits() -> tuple[Any, Any, Any, Any]:
    """Load the digits in this folder. The result has the format of `load`."""
    with np.load(DIGITS) as file:
        images, labels = file["images"], file["labels"].astype("int64")
    order = np.random.default_rng(seed=0).permutation(len(labels))  # the same on every rank
    images, labels = _scaled(images[order], 16), labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def _scaled(images: Any, white: int) -> Any:
    return (images[..., np.newaxis] / white).astype("float32")
