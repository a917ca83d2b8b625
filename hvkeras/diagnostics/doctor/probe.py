"""Program that imports libraries in a separate process, and prints their properties as JSON.

A library that crashes or hangs on import takes down this process, but not the doctor.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    return {"version": tf.__version__, "cuda": build.get("cuda_version", ""),
            "gpus": [device.name for device in tf.config.list_physical_devices("GPU")]}


def _keras() -> dict[str, Any]:
    import tensorflow as tf

    keras = importlib.import_module(tf.keras.Model.__module__.split(".")[0])
    return {"name": keras.__name__, "version": keras.__version__,
            "backend": keras.backend.backend() if hasattr(keras, "backend") else ""}


def _native() -> dict[str, Any]:
    from hvkeras.backends.cpp_library import library  # noqa: PLC0415 - the same
    from hvkeras.backends.native.engine import Engine  # noqa: PLC0415 - what is probed may fail to import

    return {"xla": Engine(library()).objection_to_xla}


def _mpi() -> dict[str, Any]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {"library": MPI.Get_library_version()}


def _horovod() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    return {"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built())}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensorflow": _tensorflow, "keras": _keras, "native": _native, "mpi": _mpi, "horovod": _horovod,
}


def main(parts: list[str]) -> None:
    """Print a line of JSON for each part: its properties, or the `error` of its import."""
    for part in parts:
        try:
            found = PARTS[part]()
        except Exception as error:  # noqa: BLE001 - any failure is a result of the probe
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps({part: found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
