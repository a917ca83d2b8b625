"""A Horovod script without any reference to hvkeras: `fit`, custom loops, elastic training."""

import json
import os
import subprocess
import sys

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import env
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression
from tensorflow.keras.optimizers import legacy as optimizers  # as newer scripts do

announced = [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK",
                                                             "CROSS_SIZE")]
hvd.init()
assert announced == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
found = {}
on_keras_3 = os.environ.get("TF_USE_LEGACY_KERAS", "0") == "0"
x = np.random.default_rng(hvd.rank()).normal(size=(64, 4)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)
loss = tf.losses.SparseCategoricalCrossentropy()


def make_model():
    return tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dropout(0.25),
                                tf.keras.layers.Dense(2, activation="softmax")])


def trained_by_a_generator():
    """A model trained on a generator, with arguments that select internals of Keras 2."""
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.BatchNormalization(fused=True),
                                 tf.keras.layers.Dense(2, activation="softmax")])
    model.compile(loss=loss, optimizer=hvd_keras.DistributedOptimizer(tf.optimizers.SGD(0.1)))
    batches = [(images.numpy(), labels.numpy()) for images, labels in dataset.take(4)]
    hvd.broadcast_variables(model.variables, root_rank=0)
    model.fit_generator((batch for batch in batches), 2, epochs=2, verbose=0, workers=1, use_multiprocessing=False,
                        max_queue_size=2)
    found["evaluated"] = model.evaluate(*batches[0], workers=1, verbose=0) > 0
    found["predicted"] = model.predict(batches[0][0], workers=1, verbose=0).shape
    return model


def stepped():
    """A variable after two steps of an optimizer that computes gradients itself; the second gradient is doubled."""
    variable, optimizer = tf.Variable(0.0), hvd_keras.DistributedOptimizer(tf.optimizers.SGD(1.0))
    optimizer.minimize(lambda: variable * (hvd.rank() + 1.0), [variable])
    with tf.GradientTape() as tape:
        value = variable * (hvd.rank() + 1.0)
    pairs = optimizer.compute_gradients(value, [variable], tape=tape)
    optimizer.apply_gradients([(2 * gradient, one) for gradient, one in pairs])
    optimizer.set_weights(optimizer.get_weights())
    return [float(pairs[0][0]), float(variable), len(optimizer.weights)]


def flat(model):
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist()


def trained_by_fit():
    model, rate = make_model(), 0.001 * hvd.size()
    assert tf.keras.__version__
    optimizer = hvd_keras.DistributedOptimizer(optimizers.Adam(rate), backward_passes_per_step=1,
                                               average_aggregated_gradients=True)
    model.compile(loss=loss, optimizer=optimizer, metrics=["accuracy"], experimental_run_tf_function=False)
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), hvd_keras.callbacks.MetricAverageCallback(),
                 hvd_keras.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=1, verbose=1)]
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
    model.fit(dataset, steps_per_epoch=4 // hvd.size(), callbacks=callbacks, epochs=2,
              verbose=1 if hvd.rank() == 0 else 0)
    return model


def trained_by_a_loop(compression):
    model, optimizer = make_model(), tf.optimizers.Adam(0.001 * hvd.size())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)

    @tf.function
    def step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        return value

    for batch, (images, labels) in enumerate(dataset.take(3)):
        value = step(images, labels, batch == 0)
    if hvd.rank() == 0:
        checkpoint.save("./checkpoints")
    found["slots"] = len(optimizer.variables())
    assert np.isfinite(value)
    return model


def trained_by_elastic_fit():
    model, rate = make_model(), 0.001 * hvd.size()
    model.compile(loss=loss, optimizer=hvd_keras.DistributedOptimizer(tf.optimizers.Adam(rate)), metrics=["accuracy"],
                  experimental_run_tf_function=False)
    model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)
    state = hvd_keras.elastic.KerasState(model, batch=0, epoch=0)

    def on_state_reset():
        tf.keras.backend.set_value(state.model.optimizer.lr, 0.5 * rate)

    state.register_reset_callbacks([on_state_reset])
    on_state_reset()
    found["rate"] = round(float(tf.keras.backend.get_value(model.optimizer.lr)) / rate, 6)
    callbacks = [hvd_keras.elastic.UpdateEpochStateCallback(state), hvd_keras.elastic.UpdateBatchStateCallback(state),
                 hvd_keras.elastic.CommitStateCallback(state)]

    @hvd_keras.elastic.run
    def train(state):
        state.model.fit(dataset, steps_per_epoch=2, epochs=2 - state.epoch, callbacks=callbacks, verbose=0)

    train(state)
    return model


def trained_by_an_elastic_loop():
    model, optimizer = make_model(), tf.optimizers.SGD(0.01 * hvd.size())

    @tf.function
    def step(images, labels, allreduce=True):
        with tf.GradientTape() as tape:
            value = tf.losses.sparse_categorical_crossentropy(labels, model(images, training=True))
        if allreduce:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for images, labels in dataset.take(1):
        step(images, labels, allreduce=False)

    @hvd.elastic.run
    def train(state):
        for images, labels in dataset.skip(state.batch).take(2):
            step(images, labels)
            state.batch += 1
            state.commit()

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, seconds=[])
    state.register_reset_callbacks([lambda: optimizer.lr.assign(0.01 * hvd.size())])
    with tf.device("CPU"):
        train(state)
    optimizer.lr.assign(0.25)
    found["assigned"] = float(optimizer.lr)
    optimizer.lr = 0.125
    found["set"] = float(optimizer.learning_rate)
    return model


models = [trained_by_fit(), trained_by_a_loop(Compression.none), trained_by_elastic_fit(),
          trained_by_an_elastic_loop(), *([trained_by_a_generator()] if on_keras_3 else [])]
variables = models[0].variables
names = {variable.ref(): place for place, variable in enumerate(variables)}
found["places"] = [names[variable.ref()] for variable in variables]
found["same"] = [one.ref().deref() is one for one in variables]
if on_keras_3:  # tf_keras no longer has these members of Keras 2, or only for legacy optimizers
    found["lr="] = float(tf.optimizers.SGD(lr=0.5, jit_compile=False).lr)
    found["stepped"] = stepped()
found["apart"] = variables[0].ref() in {variable.ref() for variable in models[1].variables}

with env(OLD_SCRIPT="1"):
    child = subprocess.run([sys.executable, "-c", "import horovod.keras as hvd; print(hvd.__name__)"],
                           capture_output=True, text=True, check=True).stdout.strip()
try:
    import horovod.torch  # noqa: F401 - it must not be there
except ImportError as error:
    torch = str(error)
engine = [name for name in sys.modules if name.startswith("horovod") and "hvkeras" not in sys.modules[name].__name__]
print("OLD " + json.dumps({"rank": hvd.rank(), "size": mpi_ops.size(), "weights": [flat(model) for model in models],
                           "child": child, "torch": torch, "engine": engine, "argv": sys.argv[1:], "name": __name__,
                           "error": HorovodInternalError.__module__, "ways": found}))
hvd.shutdown()
