"""Callbacks, metrics and losses of its own, after keras.io/guides/writing_your_own_callbacks,
keras.io/api/metrics and tensorflow.org/guide/keras/train_and_evaluate. It does not seed itself."""

import importlib.util
import os

import keras
import numpy as np
from keras import layers, ops

NOISE = os.environ.get("NOISE") != "off"
if os.environ.get("FLOAT64"):
    keras.config.set_floatx("float64")


def perturb(model):
    """Change the initial weights by PERTURB, relatively."""
    signs = np.random.RandomState(7)
    for variable in model.trainable_variables:
        weights = variable.numpy().astype("float64")
        variable.assign(weights * (1 + float(os.environ.get("PERTURB", "0")) * signs.choice((-1, 1), weights.shape)))


def save_results(models, history, **results):
    """Write all weights and results."""
    variables = [variable for model in models for variable in model.weights]
    results.update({f"weight.{index:03d}": np.asarray(value) for index, value in enumerate(variables)})
    np.savez("result.npz", **results, **{f"history.{name}": np.asarray(value) for name, value in history.items()})


class BinaryTruePositives(keras.metrics.Metric):
    """Counts true positives."""

    def __init__(self, name="binary_true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_weight(shape=(), initializer="zeros", name="tp")

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = ops.logical_and(ops.equal(y_true, 1), ops.greater(y_pred, 0.5))
        values = ops.cast(values, self.dtype)
        if sample_weight is not None:
            values = values * ops.reshape(ops.cast(sample_weight, self.dtype), (-1, 1))
        self.true_positives.assign_add(ops.sum(values))

    def result(self):
        return self.true_positives


class LargestError(keras.metrics.Metric):
    """Keeps the largest error, and the number of batches."""

    def __init__(self, name="largest_error", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_variable(shape=(), initializer="zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.max(ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred))
        self.largest.assign(ops.maximum(self.largest, ops.cast(error, self.dtype)))

    def result(self):
        return self.largest


def custom_loss(y_true, y_pred):
    """Punish false negatives twice."""
    squared = ops.square(y_true - y_pred)
    return ops.mean(ops.where(y_true > 0.5, 2 * squared, squared), axis=-1)


class LossAndErrorPrinting(keras.callbacks.Callback):
    """Follows the batches, and prints a line for each epoch."""

    def __init__(self):
        super().__init__()
        self.batch_losses, self.events = [], []

    def on_train_begin(self, logs=None):
        self.events.append("begin")

    def on_train_batch_end(self, batch, logs=None):
        self.batch_losses.append(logs["loss"])

    def on_test_batch_end(self, batch, logs=None):
        self.events.append(f"test batch {batch}")

    def on_epoch_end(self, epoch, logs=None):
        print(f"\nThe average loss for epoch {epoch} is {logs['loss']:7.4f}, largest {logs['largest_error']:.4f}.")


class StopAtLoss(keras.callbacks.Callback):
    """Stops the training at a loss, or after the fourth epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if logs["loss"] < 0.01 or epoch == 3:
            print("Stopped at epoch", epoch)
            self.model.stop_training = True


random = np.random.RandomState(41)
x = random.normal(0, 1, (118, 6)).astype("float32")
y = (x[:, :1] * x[:, 1:2] + x[:, 2:3] > 0.3).astype("float32")
inputs = keras.Input(shape=(6,))
hidden = layers.Dense(12, activation="tanh")(inputs)
hidden = layers.AlphaDropout(0.1 if NOISE else 0.0)(hidden)
model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
perturb(model)
model.compile(optimizer=keras.optimizers.Nadam(0.02), loss=custom_loss,
              metrics=[BinaryTruePositives(), LargestError(), "accuracy"], weighted_metrics=[BinaryTruePositives("w")])

printing, epoch_losses = LossAndErrorPrinting(), []
callbacks = [
    printing,
    StopAtLoss(),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (1.0 if epoch < 2 else 0.5)),
    keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch_losses.append(logs["val_loss"])),
    keras.callbacks.TerminateOnNaN(),
    keras.callbacks.BackupAndRestore("backup"),
    keras.callbacks.ModelCheckpoint("model_{epoch}.keras"),
]
if importlib.util.find_spec("tensorboard"):
    callbacks.append(keras.callbacks.TensorBoard("logs", histogram_freq=1, update_freq="epoch"))
# Batches of 29, 29, 29 and one row, and of 29 and one
history = model.fit(x[:88], y[:88], batch_size=29, epochs=6, validation_data=(x[88:], y[88:]), validation_batch_size=29,
                    callbacks=callbacks, verbose=0)
print("Epochs:", history.epoch, "test batches:", len(printing.events) - 1)

# Batch by batch
manual = {"train": [], "test": []}
for begin in range(0, 88, 29):
    part = slice(begin, begin + 29)
    manual["train"].append(model.train_on_batch(x[part], y[part], sample_weight=np.full(len(x[part]), 0.7)))
manual["test"].append(model.test_on_batch(x[88:], y[88:]))
last = model.train_on_batch(x[:7], y[:7], return_dict=True)
print("On batches:", sorted(last))
predictions = model.predict_on_batch(x[88:])
called = np.asarray(model(x[88:93], training=False))
model.load_weights("model_2.keras")

save_results([model], history.history, batch_losses=printing.batch_losses, epoch_losses=epoch_losses,
             manual_train=np.array(manual["train"], "float64"), manual_test=np.array(manual["test"], "float64"),
             last=[float(last[name]) for name in sorted(last)], predictions=predictions, called=called,
             evaluated=model.evaluate(x, y, batch_size=117, verbose=0))
