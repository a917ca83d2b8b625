"""A training loop of its own, after keras.io/guides/writing_a_custom_training_loop_in_tensorflow."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

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


keras.utils.set_random_seed(11)
random = np.random.RandomState(17)
x_train = random.uniform(0, 1, (105, 20)).astype(keras.config.floatx())
y_train = (x_train[:, :5].sum(axis=1) > x_train[:, 5:10].sum(axis=1)).astype("int64")
x_val, y_val = x_train[-26:], y_train[-26:]
x_train, y_train = x_train[:-26], y_train[:-26]
batch_size = 26
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(buffer_size=128).batch(batch_size)
val_dataset = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(batch_size)

inputs = keras.Input(shape=(20,), name="digits")
x = layers.Dense(16, activation="relu", name="dense_1")(inputs)
x = layers.Dropout(0.2 if NOISE else 0.0)(x)
outputs = layers.Dense(2, name="predictions")(x)
model = keras.Model(inputs=inputs, outputs=outputs)
perturb(model)

optimizer = keras.optimizers.Adam(learning_rate=1e-2)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_acc_metric = keras.metrics.SparseCategoricalAccuracy()
val_acc_metric = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(x, y):
    """Take one step."""
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss_value = loss_fn(y, logits)
    grads = tape.gradient(loss_value, model.trainable_weights)
    optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
    train_acc_metric.update_state(y, logits)
    return loss_value


@tf.function
def test_step(x, y):
    """Evaluate one batch."""
    val_acc_metric.update_state(y, model(x, training=False))


history = {"loss": [], "accuracy": [], "val_accuracy": []}
for epoch in range(3):
    print(f"Start of epoch {epoch}")
    for step, (x_batch_train, y_batch_train) in enumerate(train_dataset):
        loss_value = train_step(x_batch_train, y_batch_train)
        if step % 2 == 0:
            print(f"Training loss (for 1 batch) at step {step}: {float(loss_value):.4f}")
    for x_batch_val, y_batch_val in val_dataset:
        test_step(x_batch_val, y_batch_val)
    history["loss"].append(float(loss_value))
    history["accuracy"].append(float(train_acc_metric.result()))
    history["val_accuracy"].append(float(val_acc_metric.result()))
    train_acc_metric.reset_state()
    val_acc_metric.reset_state()
    print(f"Validation acc: {history['val_accuracy'][-1]:.4f}")
model.save_weights("loop.weights.h5")

save_results([model], history, predictions=model.predict(x_val, verbose=0))
