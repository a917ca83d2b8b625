"""List the source files that run for a gradient, a start, a killed rank or an elastic change.

    python tools/ways.py            all four paths; or only those named: gradient start killed elastic

For each path, a job of two or three ranks runs with the native engine. Listed are the files of hvkeras in which a
function was called on one rank, in the order of their first call:

- gradient: from the optimizer's `apply` in the first step of `fit` until the engine has been called
- start: `hvd.init()` of rank 0
- killed: rank 0, whose main thread sleeps, from the cause of the job's end until its last line
- elastic: rank 0, from the exception in the elastic function until the function runs again

Facts about the machine, settings and loading (`HELPERS`) are counted separately. So are, for an elastic change, the
files that a start or a broadcast needs anyway.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

PATHS = ("gradient", "start", "killed", "elastic")
PARTS = {"elastic": ("start", "broadcast")}  # paths that are part of another
HELPERS = ("__init__.py", "cpp_library.py", "host/", "errors.py", "settings.py")


class Tracer:
    """Profiler that writes the name of each file of hvkeras when one of its functions is first called.

    Args:
        path: The file to write to.
    """

    def __init__(self, path: str) -> None:
        self._path, self._seen, self._is_on = path, set[str](), False

    def begin(self) -> None:
        """Start to write."""
        self._is_on = True
        sys.setprofile(self._profile)

    def end(self) -> None:
        """Stop writing."""
        self._is_on = False

    def watch(self) -> None:
        """Install the profiler in this thread and in those that start later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG002 - sys.setprofile's
        if not self._is_on or event != "call":
            return
        name = frame.f_code.co_filename
        _, found, inside = name.rpartition("/hvkeras/")
        if found and inside not in self._seen and not _is_import(frame):
            self._seen.add(inside)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{inside}\n")


def _is_import(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to the import of a module."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def gradient(tracer: Tracer) -> None:
    """Trace the first step of `fit`."""
    import keras
    import numpy as np

    import hvkeras as hvd  # noqa: PLC0415 - only the ranks of this path need it
    from hvkeras.backends.native import NativeBackend  # noqa: PLC0415 - as above

    hvd.init()
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    plain, call = type(model.optimizer).apply, NativeBackend.allreduce

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer.begin()
        return plain(self, *args, **kwargs)

    def allreduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        finally:
            tracer.end()

    type(model.optimizer).apply, NativeBackend.allreduce = apply, allreduce  # type: ignore[method-assign]
    tracer.watch()
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)


def start(tracer: Tracer) -> None:
    """Trace the start of a rank."""
    import hvkeras as hvd  # noqa: PLC0415 - only the ranks of this path need it

    tracer.begin()
    tracer.watch()
    hvd.init()
    tracer.end()


def killed(tracer: Tracer) -> None:
    """Trace the failure of another rank."""
    import tensorflow as tf

    import hvkeras as hvd  # noqa: PLC0415 - only the ranks of this path need it

    tracer.watch()
    hvd.init()
    hvd.allreduce(tf.ones(4), name="first")
    if hvd.rank() == 1:
        raise RuntimeError("one rank fails")
    tracer.begin()
    time.sleep(60)


def elastic(tracer: Tracer) -> None:
    """Trace the loss of a rank in an elastic job."""
    import tensorflow as tf

    import hvkeras as hvd  # noqa: PLC0415 - only the ranks of this path need it

    hvd.init()
    state = hvd.elastic.TensorFlowState([tf.Variable(0.0)])

    @hvd.elastic.run
    def train(state: Any) -> None:
        tracer.end()
        hvd.allreduce(tf.ones(4), name="before")
        state.commit()
        if hvd.size() == 3:
            if hvd.rank() == 2:
                os._exit(1)
            tracer.watch()
            try:
                hvd.allreduce(tf.ones(4), name="after")
            except Exception:
                tracer.begin()
                raise

    train(state)


def broadcast(tracer: Tracer) -> None:
    """Trace the broadcast of a variable and of an object."""
    import tensorflow as tf

    import hvkeras as hvd  # noqa: PLC0415 - only the ranks of this path need it

    hvd.init()
    tracer.begin()
    tracer.watch()
    hvd.broadcast_variables([tf.Variable(0.0)], root_rank=0)
    hvd.broadcast_object(0)
    tracer.end()


def traced(name: str) -> list[str]:
    """Trace a path in a separate job, and return its files in order."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HVWAYS_FILE": f"{folder}/files", "TF_CPP_MIN_LOG_LEVEL": "3"}
        options = ["--min-np", "2", "-np", "3"] if name == "elastic" else ["-np", "2"]
        command = [sys.executable, "-m", "hvkeras", "run", *options, "--backend", "native", sys.executable, "-I",
                   str(Path(__file__).resolve()), name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        files = sorted(Path(folder).glob("files.*"), key=lambda path: -len(path.read_text().splitlines()))
        if not files:
            sys.exit(done.stdout + done.stderr)
        return files[0].read_text().splitlines()


def main() -> None:
    """Run the jobs, and list the files."""
    if os.environ.get("HVWAYS_FILE"):
        rank = os.environ.get("HVKERAS_RUN_WORKER") or os.environ.get("HVKERAS_RUN_RANK", "0")
        globals()[sys.argv[1]](Tracer(os.environ["HVWAYS_FILE"] + f".{os.getpid()}.{rank}"))
        return
    for name in sys.argv[1:] or PATHS:
        shared = {file for part in PARTS.get(name, ()) for file in traced(part)}
        files = traced(name)
        main_files = [file for file in files if file not in shared and not file.startswith(HELPERS)]
        print(f"{name}: {len(main_files)} files", *main_files, sep="\n  ")
        for title, others in (("shared", [file for file in files if file in shared and not file.startswith(HELPERS)]),
                              ("helpers", [file for file in files if file.startswith(HELPERS)])):
            if others:
                print(f"  {title}, {len(others)}: {', '.join(others)}")


if __name__ == "__main__":
    main()
