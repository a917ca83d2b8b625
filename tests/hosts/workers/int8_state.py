"""The rounding errors of gradients in 8 bits are in commits and backups."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import hvkeras as hvd
from hvkeras.elastic.encoding import decode, encode
from hvkeras.gradients.rounding_errors import RestoredErrors, rounding_errors
from hvkeras.job.session import this_process

hvd.init("native")
folder = f"backup{hvd.rank()}"
samples = np.random.default_rng(hvd.rank()).standard_normal((64, 96)).astype(np.float32)
leads_its_host = hvd.local_rank() == 0


def model() -> Any:
    """Return a compiled model with one compressed kernel."""
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((96,)), keras.layers.Dense(128, "tanh"), keras.layers.Dense(8)])
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.int8), "mse")
    return net


def train(net: Any, epochs: int, callbacks: Sequence[Any] = ()) -> None:
    """Train, one step per epoch."""
    net.fit(samples, samples[:, :8], batch_size=64, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)


def errors_of(net: Any) -> list[Any]:
    """Return this rank's errors."""
    errors = rounding_errors()
    assert errors is not None
    return errors.of(net.trainable_variables)


def require(holds: bool, what: str) -> None:
    """Exit unless a condition holds."""
    if not holds:
        sys.exit(what)


net = model()
train(net, 3)
state = hvd.elastic.KerasState(net)
state.save()
before = errors_of(net)
require([one is not None for one in before] == [leads_its_host, False, False, False], f"errors of {before}")
if leads_its_host:
    require(0 < np.abs(before[0]).max() < 0.01, f"errors of {np.abs(before[0]).max()}")
train(net, 1)
if leads_its_host:
    require(not np.array_equal(errors_of(net)[0], before[0]), "errors that do not change")
state.restore()
if leads_its_host:
    require(np.array_equal(errors_of(net)[0], before[0]), "errors that a commit does not restore")
state.take(decode(b"".join(encode(state.saved()))))
state.restore()
if leads_its_host:
    require(np.array_equal(errors_of(net)[0], before[0]), "errors that do not survive a file")

# A backup holds the sum of all hosts' errors. The chief adds it to its next gradients.
class Stop(keras.callbacks.Callback):
    """Interrupts the training."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 4:
            raise KeyboardInterrupt


net = model()
try:
    train(net, 5, [hvd.callbacks.BackupAndRestore(folder), Stop()])
    sys.exit("not interrupted")
except KeyboardInterrupt:
    pass
errors = rounding_errors()
assert errors is not None
saved = errors.total(net.trainable_variables, hvd.global_process_set)
resumed = model()
seen: list[Any] = []


class Look(keras.callbacks.Callback):
    """Looks at the errors when training has resumed."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        seen.extend(this_process().part(RestoredErrors).values())


train(resumed, 5, [hvd.callbacks.BackupAndRestore(folder), Look()])
if hvd.rank() == 0:
    require(len(seen) == 1, f"{len(seen)} errors were restored")
    require(np.array_equal(seen[0], saved[0]), "the errors of a backup")
    require(not os.path.exists(folder), "the backup is left")
else:
    require(not seen, "errors of rank 0 elsewhere")
hvd.shutdown()
