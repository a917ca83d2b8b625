"""A Horovod script that trains in a session, with tf_keras and without eager execution."""

import json

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object, broadcast_object

tf.compat.v1.disable_eager_execution()
keras = tf.keras
hvd.init()
data = np.load("data.npz")
x, y = data["x"][hvd.rank() :: hvd.size()], data["y"][hvd.rank() :: hvd.size()]
model = keras.Sequential([keras.layers.Dense(1, input_shape=(4,), kernel_initializer=keras.initializers.Constant(
    hvd.rank()))])
model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.1, momentum=0.9)),
              experimental_run_tf_function=False)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
             hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch, momentum_correction=True)]
history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, callbacks=callbacks, verbose=0).history
print("GRAPH " + json.dumps({"weights": np.concatenate([value.ravel() for value in model.get_weights()]).tolist(), **{
    name: list(map(float, values)) for name, values in history.items()},
    "objects": [broadcast_object(hvd.rank() + 1, 0), allgather_object(hvd.rank())]}))
hvd.shutdown()
