"""Which files somebody reads who follows a gradient, a start, a killed rank or an elastic change through hvkeras.

    python tools/ways.py            all four ways; with names, those: gradient start killed elastic

Each way is taken by a real job of two or three ranks of the native engine. What is listed are the files of hvkeras with
a frame that ran on the way, in the order of their first one, on one rank:

- gradient: from the optimizer's `apply` in the first step of `fit` until the engine has been called
- start: `hvd.init()` of rank 0
- killed: rank 0, whose main thread sleeps, from the cause of the job's end until its last line
- elastic: rank 0, from the exception in the elastic function until the function runs again

Facts about the machine, settings and loading (`HELPERS`) are answers to questions, and not stations: they are counted
apart. An elastic change starts the next session and broadcasts the state; what `init()` and a broadcast need anyway is
counted apart there as well.
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

WAYS = ("gradient", "start", "killed", "elastic")
PARTS = {"elastic": ("start", "broadcast")}  # ways that are known already to who reads one
HELPERS = ("__init__.py", "cpp_library.py", "host/", "errors.py", "settings.py")


class Way:
    """Writes the name of each file of the package once a frame of it runs.

    Args:
        path: The file to write to; None to write to standard output.
    """

    def __init__(self, path: str) -> None:
        self._path, self._known, self._is_on = path, set[str](), False

    def begin(self) -> None:
        """Starts to write."""
        self._is_on = True
        sys.setprofile(self._profile)

    def end(self) -> None:
        """Stops it."""
        self._is_on = False

    def watch(self) -> None:
        """Makes this thread, and those that start from now on, take part."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG002 - sys.setprofile's
        if not self._is_on or event != "call":
            return
        name = frame.f_code.co_filename
        _, found, inside = name.rpartition("/hvkeras/")
        if found and inside not in self._known and not _is_import(frame):
            self._known.add(inside)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{inside}\n")


def _is_import(frame: FrameType | None) -> bool:
    """Whether a frame belongs to the import of a module."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def gradient(way: Way) -> None:
    """The first step of `fit`."""
    import keras
    import numpy as np

    import hvkeras as hvd  # noqa: PLC0415 - a rank of each way imports what it needs
    from hvkeras.backends.native import NativeBackend  # noqa: PLC0415 - as above

    hvd.init()
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    plain, call = type(model.optimizer).apply, NativeBackend.allreduce

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        way.begin()
        return plain(self, *args, **kwargs)

    def allreduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        finally:
            way.end()

    type(model.optimizer).apply, NativeBackend.allreduce = apply, allreduce  # type: ignore[method-assign]
    way.watch()
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)


def start(way: Way) -> None:
    """The start of a rank."""
    import hvkeras as hvd  # noqa: PLC0415 - a rank of each way imports what it needs

    way.begin()
    way.watch()
    hvd.init()
    way.end()


def killed(way: Way) -> None:
    """The failure of another rank."""
    import tensorflow as tf

    import hvkeras as hvd  # noqa: PLC0415 - a rank of each way imports what it needs

    way.watch()
    hvd.init()
    hvd.allreduce(tf.ones(4), name="first")
    if hvd.rank() == 1:
        raise RuntimeError("one rank fails")
    way.begin()
    time.sleep(60)


def elastic(way: Way) -> None:
    """The loss of a rank in an elastic job."""
    import tensorflow as tf

    import hvkeras as hvd  # noqa: PLC0415 - a rank of each way imports what it needs

    hvd.init()
    state = hvd.elastic.TensorFlowState([tf.Variable(0.0)])

    @hvd.elastic.run
    def train(state: Any) -> None:
        way.end()
        hvd.allreduce(tf.ones(4), name="before")
        state.commit()
        if hvd.size() == 3:
            if hvd.rank() == 2:
                os._exit(1)
            way.watch()
            try:
                hvd.allreduce(tf.ones(4), name="after")
            except Exception:
                way.begin()
                raise

    train(state)


def broadcast(way: Way) -> None:
    """The broadcast of a variable and of an object."""
    import tensorflow as tf

    import hvkeras as hvd  # noqa: PLC0415 - a rank of each way imports what it needs

    hvd.init()
    way.begin()
    way.watch()
    hvd.broadcast_variables([tf.Variable(0.0)], root_rank=0)
    hvd.broadcast_object(0)
    way.end()


def taken(name: str) -> list[str]:
    """Takes a way in a job of its own, and returns its files in order."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HVWAYS_FILE": f"{folder}/way", "TF_CPP_MIN_LOG_LEVEL": "3"}
        options = ["--min-np", "2", "-np", "3"] if name == "elastic" else ["-np", "2"]
        command = [sys.executable, "-m", "hvkeras", "run", *options, "--backend", "native", sys.executable, "-I",
                   str(Path(__file__).resolve()), name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        files = sorted(Path(folder).glob("way.*"), key=lambda path: -len(path.read_text().splitlines()))
        if not files:
            sys.exit(done.stdout + done.stderr)
        return files[0].read_text().splitlines()


def main() -> None:
    """Runs the jobs, and lists the files."""
    if os.environ.get("HVWAYS_FILE"):
        rank = os.environ.get("HVKERAS_RUN_WORKER") or os.environ.get("HVKERAS_RUN_RANK", "0")
        globals()[sys.argv[1]](Way(os.environ["HVWAYS_FILE"] + f".{os.getpid()}.{rank}"))
        return
    for name in sys.argv[1:] or WAYS:
        known = {file for part in PARTS.get(name, ()) for file in taken(part)}
        files = taken(name)
        stations = [file for file in files if file not in known and not file.startswith(HELPERS)]
        print(f"{name}: {len(stations)} files", *stations, sep="\n  ")
        for title, apart in (("known", [file for file in files if file in known and not file.startswith(HELPERS)]),
                             ("helpers", [file for file in files if file.startswith(HELPERS)])):
            if apart:
                print(f"  {title}, {len(apart)}: {', '.join(apart)}")


if __name__ == "__main__":
    main()
