"""An elastic script from Horovod's documentation: model, optimizer, step and state are module-level objects.

Arguments: `loop` or `keras`, the number of epochs, and events in epochs: `1:slots=3` changes the output of the host
discovery script, `2:kill` kills rank 1, and `2:raise` makes it raise. Each rank prints its completed epochs. The weight
is a sum over all ranks, so that it shows whether each epoch was trained once, on the printed numbers of ranks. An epoch
lasts longer than its event: rank 0 waits for new workers, and for replacements of lost ones.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.horovod import as_horovod

as_horovod.install()
import horovod.tensorflow.keras as hvd  # noqa: E402 - it is hvkeras from now on
from horovod.tensorflow import DistributedGradientTape  # noqa: E402

keras: Any = tf.keras
KIND, EPOCHS = sys.argv[1], int(sys.argv[2])
EVENTS = {int(epoch): what for epoch, what in (each.split(":") for each in sys.argv[3:])}
STEPS = 6
LOOKS_WITHIN = 2.0  # seconds until the launcher has run the discovery script, and has registered a ready worker

slots, workers = 2, 2
WORKERS = {}  # number of workers that must have been started by the end of an epoch
for epoch, what in sorted(EVENTS.items()):
    wanted = int(what.partition("=")[2] or slots)
    workers += 1 if wanted == slots else max(0, wanted - slots)
    WORKERS[epoch], slots = workers, wanted

hvd.init()
features, labels = np.ones((STEPS, 1), np.float32), np.full((STEPS, 1), hvd.rank() + 1.0, np.float32)
dataset = tf.data.Dataset.from_tensor_slices((features, labels)).repeat().batch(1)


def loss(labels: Any, outputs: Any) -> Any:
    """Return a loss whose gradient is the label: the rank + 1 at the time of the step."""
    return -tf.reduce_mean(outputs * tf.reshape(tf.cast(hvd.rank() + 1, tf.float32) + 0.0 * labels, tf.shape(outputs)))


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
optimizer = keras.optimizers.SGD(1.0)


@tf.function
def training_step(inputs: Any, targets: Any, allreduce: bool = True) -> Any:
    with tf.GradientTape() as tape:
        value = loss(targets, model(inputs, training=True))
    if allreduce:
        tape = DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return value


def happens(epoch: int, step: int) -> None:
    what, _, slots = EVENTS.get(epoch, "").partition("=")
    marker = Path(f"happened.{epoch}")
    if what and step == 2 and hvd.rank() == (0 if slots else 1) and not marker.exists():
        marker.touch()
        if slots:
            Path("hosts.new").write_text(f"localhost:{slots}\n")
            Path("hosts.new").rename("hosts")  # it may be read at any time
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise ArithmeticError("stumbles")
    if what and step == STEPS - 1 and hvd.rank() == 0:
        while len(list(Path().glob("ready.*"))) < WORKERS[epoch]:
            time.sleep(0.05)
        time.sleep(LOOKS_WITHIN)


def completed(epoch: int) -> None:
    print(f"epoch {epoch} on {hvd.size()}", flush=True)


class Happens(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        happens(state.epoch, batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        completed(state.epoch)


if KIND == "loop":
    for inputs, targets in dataset.take(1):
        training_step(inputs, targets, allreduce=False)
    state = hvd.elastic.KerasState(model, optimizer, epoch=0)
else:
    model.compile(hvd.DistributedOptimizer(optimizer), loss, jit_compile=False)
    model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)
    state = hvd.elastic.KerasState(model, epoch=0)
    callbacks = [Happens(), hvd.elastic.UpdateEpochStateCallback(state),
                 hvd.elastic.CommitStateCallback(state, batches_per_commit=STEPS)]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))
model.set_weights([np.zeros((1, 1))])


def on_state_reset() -> None:
    optimizer.lr.assign(1.0)
    if KIND == "keras":  # "to join with possible new ranks", from Horovod's example
        weights = model.get_weights()
        model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)
        model.set_weights(weights)


state.register_reset_callbacks([on_state_reset])


@hvd.elastic.run
def train(state: Any) -> None:
    if KIND == "keras":
        model.fit(dataset, steps_per_epoch=STEPS, epochs=EPOCHS - state.epoch, callbacks=callbacks, verbose=0)
    while state.epoch < EPOCHS:
        for step, (inputs, targets) in enumerate(dataset.take(STEPS)):
            training_step(inputs, targets)
            happens(state.epoch, step)
        completed(state.epoch)
        state.epoch += 1
        state.commit()


Path(f"ready.{os.environ['HVKERAS_RUN_WORKER']}").touch()
train(state)
print(f"trained {float(np.sum(model.get_weights()[0])) / STEPS:g}", flush=True)
