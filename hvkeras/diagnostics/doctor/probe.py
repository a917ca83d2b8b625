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


def _data_parallel() -> dict[str, Any]:
    """Divide a step with a mean and a variance over the rows between two ranks, as `--data-parallel` does."""
    import tensorflow as tf

    from hvkeras.compat import patches  # noqa: PLC0415 - the same
    from hvkeras.partition.collectives import Simulated  # noqa: PLC0415 - the same
    from hvkeras.partition.partitioning import Partitioned  # noqa: PLC0415 - the same
    from hvkeras.partition.rules import RULES  # noqa: PLC0415 - the same

    weights = tf.Variable(tf.ones([8, 4]))

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def step(rows: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            mean, variance = tf.nn.moments(outputs := tf.nn.relu(rows @ weights), 0)
            loss = tf.reduce_mean(tf.nn.softmax((outputs - mean) * tf.math.rsqrt(variance + 1)) ** 2)
        return tape.gradient(loss, weights)

    partitioned = Partitioned(step.get_concrete_function().graph, {"rows": [0]}, RULES)

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])  # type: ignore[untyped-decorator]  # the same
    def divided(rows: tf.Tensor) -> tf.Tensor:
        given = [[rows, rows], [weights.handle, weights.handle]]
        return partitioned.create(given, ranks=[0, 1], size=2, collectives=Simulated())[0][1]

    rows = tf.random.stateless_normal([5, 8], seed=[1, 2])
    wrong, report = tf.reduce_max(tf.abs(divided(rows) - step(rows))), partitioned.report
    return {"lacks": patches.hidden(patches.GLOBAL_BATCH), "differs": bool(wrong > 1e-5),
            "divided": 1 - report.work_by_all / report.work, "rounds": len(report.rounds)}


def _mpi() -> dict[str, Any]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {"library": MPI.Get_library_version()}


def _horovod() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    return {"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built())}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensorflow": _tensorflow, "keras": _keras, "native": _native, "data parallel": _data_parallel, "mpi": _mpi,
    "horovod": _horovod,
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
