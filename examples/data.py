"""Small images to train on: the handwritten digits beside this file, or MNIST and its like from the internet.

The digits are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0: 1797 images of 8 x 8 in 17 greys.
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
    """Loads a dataset on every rank; one that cannot be downloaded gives way to the digits, on all ranks alike.

    Args:
        name: One of `DATASETS`.

    Returns:
        Training images and labels, test images and labels; images are float32 in [0, 1], [number, height, width, 1].
    """
    if name != "digits" and not all(hvd.allgather_object(_download(name))):
        if hvd.rank() == 0:
            print(f"{name} cannot be downloaded here: training on the digits beside the examples instead", flush=True)
        name = "digits"
    return digits() if name == "digits" else _keras_dataset(name)


def _download(name: str) -> bool:
    """Brings a dataset to this host, once: the other ranks will find the file that local rank 0 leaves."""
    if hvd.local_rank() != 0:
        return True
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)
    try:
        _keras_dataset(name)
    except Exception:  # noqa: BLE001 - whatever went wrong, the digits are there
        return False
    finally:
        socket.setdefaulttimeout(patience)
    return True


def _keras_dataset(name: str) -> tuple[Any, Any, Any, Any]:
    (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    return _scaled(x_train, 255), y_train, _scaled(x_test, 255), y_test


def digits() -> tuple[Any, Any, Any, Any]:
    """Loads the digits beside this file, as `load` does."""
    with np.load(DIGITS) as file:
        images, labels = file["images"], file["labels"].astype("int64")
    order = np.random.default_rng(seed=0).permutation(len(labels))  # the same on every rank
    images, labels = _scaled(images[order], 16), labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def _scaled(images: Any, white: int) -> Any:
    return (images[..., np.newaxis] / white).astype("float32")
