"""Mistakes that users make, as they are provoked by `test_mistakes` for docs/troubleshooting.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SCRIPT = "train.py"
BEGIN = """
import sys
import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd

x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def model(optimizer, units=1):
    keras.utils.set_random_seed(1 + hvd.rank())
    built = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    built.compile(optimizer, "mse")
    return built


def distributed():
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))


def broadcast():
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]

"""
INIT = BEGIN + "\nhvd.init()\n"


@dataclass(frozen=True)
class Mistake:
    """A mistake, and how it is provoked.

    Attributes:
        what: What the user has done, as in the table.
        script: The text of the script `train.py`.
        command: The words after `hvkeras`; "python" becomes the Python of the tests.
        env: Environment variables of the launcher.
        ends: Whether the job fails; otherwise it only prints the message.
        cold: Whether ranks are new Python processes.
        note: How the check gets its input where the mistake cannot be made here.
        starts_ranks: Whether the launcher starts ranks before it says what is wrong.
    """

    what: str
    script: str = INIT
    command: Sequence[str] = ("run", "-np", "2", "python", SCRIPT)
    env: Mapping[str, str] = field(default_factory=dict)
    ends: bool = True
    cold: bool = False
    note: str = ""
    starts_ranks: bool = True


MISTAKES = (
    # The optimizer and the first weights.
    Mistake("no `DistributedOptimizer`",
            INIT + 'model("sgd").fit(*hvd.shard((x, y)), verbose=0, callbacks=broadcast())'),
    Mistake("no broadcast of the first weights", INIT + "model(distributed()).fit(*hvd.shard((x, y)), verbose=0)"),
    Mistake("`DistributedOptimizer` twice", INIT + "hvd.DistributedOptimizer(distributed())"),
    Mistake("the class of an optimizer instead of an instance",
            INIT + "hvd.DistributedOptimizer(keras.optimizers.Adam)"),
    Mistake("another model on each rank",
            INIT + "model(distributed(), 2 + hvd.rank()).fit(*hvd.shard((x, y)), verbose=0, callbacks=broadcast())"),
    # The data.
    Mistake("arrays that each rank has shuffled by itself",
            INIT + "np.random.default_rng(hvd.rank()).shuffle(x)\nhvd.shard(x)"),
    Mistake("arrays that were split before `hvd.shard`", INIT + "hvd.shard(x[hvd.rank() :: hvd.size()])"),
    Mistake("a dataset of a generator that shuffles by itself", INIT + """
order = np.random.default_rng().permutation(64)
data = tf.data.Dataset.from_generator(lambda: iter(x[order]), output_signature=tf.TensorSpec((4,)))
hvd.shard(data.batch(8))"""),
    Mistake("different batches per rank, with `HVKERAS_UNEVEN=error`", INIT + """
rows = 64 - 32 * hvd.rank()
model(distributed()).fit(x[:rows], y[:rows], batch_size=8, verbose=0, callbacks=broadcast())""",
            env={"HVKERAS_UNEVEN": "error"}),
    # Order of calls.
    Mistake("`hvd.rank()` before `hvd.init()`", BEGIN + "print(hvd.rank())"),
    Mistake("a collective on one rank only", INIT + """
if hvd.rank() == 0:
    hvd.allreduce(x, name="loss")
hvd.barrier()"""),
    Mistake("`evaluate` on one rank only", INIT + """
net = model(distributed())
net.fit(*hvd.shard((x, y)), verbose=0, callbacks=broadcast())
if hvd.rank() == 0:
    net.evaluate(x, y, verbose=0)"""),
    Mistake("different shapes in one collective", INIT + 'hvd.allreduce(x[: 8 + hvd.rank()], name="loss")'),
    Mistake("`sys.exit()` on one rank while others train", INIT + """
if hvd.rank() == 1:
    sys.exit()
hvd.allreduce(x)"""),
    Mistake("TensorFlow was used before the strategy", BEGIN + """
tf.zeros(1)
hvd.strategy("multi_worker_mirrored")"""),
    # Failures.
    Mistake("an exception on one rank", INIT + """
if hvd.rank() == 1:
    raise ValueError("no images in /data")
hvd.allreduce(x)"""),
    Mistake("an exception on all ranks before `hvd.init()`", "import kears"),
    Mistake("a rank that is killed, for example as it uses too much memory", INIT + """
import os, signal
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(x)""", cold=True),
    # The command line.
    Mistake("a misspelt command", command=("rum", "-np", "2", "python", SCRIPT), starts_ranks=False),
    Mistake("no number of processes", command=("run", "python", SCRIPT), starts_ranks=False),
    Mistake("a misspelt script", command=("run", "-np", "2", "python", "trian.py"), starts_ranks=False),
    Mistake("a script without `python`", command=("run", "-np", "2", SCRIPT), starts_ranks=False),
    Mistake("more ranks than the hosts have slots",
            command=("run", "-np", "4", "-H", "localhost:2", "python", SCRIPT), starts_ranks=False),
    Mistake("a host that does not exist", command=("run", "-np", "2", "-H", "localhost:1,no-such-host.invalid:1",
                                                   "python", SCRIPT), starts_ranks=False),
    # Settings.
    Mistake("a backend that does not exist", env={"HVKERAS_BACKEND": "natve"}, starts_ranks=False),
    Mistake("a setting that does not exist", env={"HVKERAS_BUKET_SIZE": "64MB"}, starts_ranks=False),
    Mistake("a setting with an invalid value", env={"HVKERAS_BUCKET_SIZE": "64 megs"}, starts_ranks=False),
    Mistake("Keras with another backend than TensorFlow", env={"KERAS_BACKEND": "jax"}, starts_ranks=False),
    Mistake("a misspelt variable of Horovod", env={"HOROVOD_FUSION_THRESHHOLD": "1"}, ends=False),
    # Other libraries.
    Mistake("a script for Horovod without `--as-horovod`", "import horovod.tensorflow.keras as hvd\nhvd.init()",
            starts_ranks=False),
    Mistake("a script for one process without `--data-parallel`", "import keras", ends=False),
    Mistake("a script for several processes with `--data-parallel`", INIT + "hvd.shard((x, y))",
            command=("run", "--data-parallel", "-np", "2", "python", SCRIPT), cold=True),
    Mistake("`hvd.data_parallel()` with a TensorFlow that is too new for it",
            BEGIN + "from tensorflow.python.eager.polymorphic_function import atomic_function\n"
            'vars(atomic_function).pop("AtomicFunction")\nhvd.data_parallel()',
            note="the test removes a class of TensorFlow"),
    # Machines.
    Mistake("Windows or macOS", 'import asyncio, sys\nsys.platform = "win32"\nimport hvkeras', command=(
        "run", "-np", "1", "python", SCRIPT), cold=True, note="the test sets `sys.platform`"),
    Mistake("a TensorFlow without CUDA on a machine with GPUs",
            BEGIN + 'from hvkeras.host import gpus\ngpus._driver_gpus = lambda: [("id", "H200")]\nhvd.init()',
            ends=False, note="the test makes up the driver's list"),
    Mistake("a function for `hvd.run` that cannot be pickled", """
import threading

import hvkeras as hvd

lock = threading.Lock()


def train():
    with lock:
        hvd.init()


hvd.run(train, np=2)""", command=("run", "-np", "1", "python", SCRIPT)),
)

_NORMAL = re.compile(r"(\[\d+\] )?(hvkeras: (backend |data parallel: |shard: |TF_CONFIG names )|Epoch |\s*\d+/\d+ |"
                     r"[IWE]\d{4} \d\d:|WARNING: All log messages before absl|To enable the following)")
_SLOW = re.compile(r"^hvkeras run: no rank has called hvd.init\(\) in .*\nHINT: .*\n", re.MULTILINE)
_FRAME = re.compile(r"(\[\d+\] )?  ")


@dataclass(frozen=True)
class Told:
    """What a mistake prints.

    Attributes:
        lines: The number of lines besides the frames of the user's script.
        cause: The message.
        cure: The hint; "" if there is none.
    """

    lines: int
    cause: str
    cure: str


def told(output: str) -> Told:
    """Return what the output of a job says about a mistake."""
    lines = [line for line in _SLOW.sub("", output).splitlines() if line.strip() and not _NORMAL.match(line)]
    own = [line for line in lines if not _FRAME.match(line)]
    hint = next((line for line in reversed(own) if "HINT: " in line), "")
    before, _, cure = hint.partition("HINT: ")
    cause = before.strip() or own[own.index(hint) - 1 if hint else -1]
    return Told(len(own), _plain(cause), _plain(cure))


def _plain(text: str) -> str:
    """Return a message as in the table: without prefixes, process IDs, hosts, and what was received."""
    text = re.sub(r"^(\[\d+\] )?(hvkeras( run)?: )?(hvkeras\.[\w.]+\.)?", "", text.strip())
    text = text.partition(" Received: ")[0]
    text = re.sub(r" \(pid \d+\)", "", text)
    text = re.sub(r"(rank \d+) on \S+", r"\1", text)
    return text.rstrip(".")
