"""A script as Horovod's users have them; it knows nothing of hvkeras."""

import json
import subprocess
import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import env
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression

hvd.init()
x = np.random.default_rng(hvd.rank()).normal(size=(32, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size()), compression=Compression.none)
model.compile(optimizer=optimizer, loss="mse")
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_epochs=1, verbose=0),
]
model.fit(x, y, batch_size=8, steps_per_epoch=1, verbose=0)  # before any broadcast, as Horovod's elastic examples do
state = hvd.elastic.KerasState(model, epoch=0)
callbacks += [hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state, None)]


@hvd.elastic.run
def train(state):
    model.fit(x, y, batch_size=8, epochs=2 - state.epoch, callbacks=callbacks, verbose=0)


train(state)
assert (state.epoch, mpi_ops.size()) == (2, hvd.size())

with env(OLD_SCRIPT="1"):
    child = subprocess.run([sys.executable, "-c", "import horovod.keras as hvd; print(hvd.__name__)"],
                           capture_output=True, text=True, check=True).stdout.strip()
weights = model.get_weights()[0].ravel().tolist()
try:
    import horovod.torch  # noqa: F401 - it must not be there
except ImportError as error:
    torch = str(error)
engine = [name for name in sys.modules if name.startswith("horovod") and "hvkeras" not in sys.modules[name].__name__]
print("OLD " + json.dumps({"rank": hvd.rank(), "size": hvd.size(), "weights": weights, "child": child, "torch": torch,
                           "engine": engine, "argv": sys.argv[1:], "name": __name__,
                           "error": HorovodInternalError.__module__}))
hvd.shutdown()
