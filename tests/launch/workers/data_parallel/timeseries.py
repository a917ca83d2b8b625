"""Forecasting of a series, after keras.io/examples/timeseries/timeseries_weather_forecasting and
tensorflow.org/tutorials/structured_data/time_series."""

import os

import keras
import matplotlib.pyplot as plt
import numpy as np

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


keras.utils.set_random_seed(0)
step, past, future, batch_size = 3, 24, 6, 32
learning_rate, epochs = 0.01, 3

random = np.random.RandomState(2)
hours = np.arange(420)
temperature = 10 * np.sin(hours / 24 * 2 * np.pi) + random.normal(0, 1, len(hours))
pressure, wind = 990 + np.cumsum(random.normal(0, 0.5, len(hours))), random.gamma(2.0, 1.0, len(hours))
features = np.stack([temperature, pressure, wind], axis=1)
train_split = 300
mean, std = features[:train_split].mean(axis=0), features[:train_split].std(axis=0)
features = (features - mean) / std
start = past + future
dataset_train = keras.utils.timeseries_dataset_from_array(
    features[:train_split], features[start : start + train_split, 0], sequence_length=past // step,
    sampling_rate=step, batch_size=batch_size)
dataset_val = keras.utils.timeseries_dataset_from_array(
    features[train_split:-start], features[train_split + start :, 0], sequence_length=past // step,
    sampling_rate=step, batch_size=17)
for batch in dataset_train.take(1):
    inputs, targets = batch
print("Input shape:", inputs.numpy().shape)
print("Target shape:", targets.numpy().shape)

inputs = keras.layers.Input(shape=(inputs.shape[1], inputs.shape[2]))
lstm_out = keras.layers.LSTM(8)(inputs)
outputs = keras.layers.Dense(1)(lstm_out)
model = keras.Model(inputs=inputs, outputs=outputs)
perturb(model)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=learning_rate), loss="mse",
              metrics=[keras.metrics.MeanAbsoluteError(), keras.metrics.R2Score()])
model.summary()

path_checkpoint = "model_checkpoint.weights.h5"
es_callback = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=5)
modelckpt_callback = keras.callbacks.ModelCheckpoint(monitor="val_loss", filepath=path_checkpoint, verbose=1,
                                                     save_weights_only=True, save_best_only=True)
history = model.fit(dataset_train, epochs=epochs, validation_data=dataset_val,
                    callbacks=[es_callback, modelckpt_callback], verbose=2)

plt.plot(history.history["loss"], "b", label="Training loss")
plt.plot(history.history["val_loss"], "r", label="Validation loss")
plt.legend()
plt.savefig("loss.png")

forecasts = []
for x, y in dataset_val.take(2):
    forecasts.append(model.predict(x)[:, 0])
    print(f"True future: {y[0]:.2f}, model prediction: {forecasts[-1][0]:.2f}")
linear = keras.Sequential([keras.layers.Input(inputs.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(1)])
linear.compile(loss="mse", optimizer=keras.optimizers.SGD(0.01, momentum=0.9))
baseline = linear.fit(dataset_train.unbatch().batch(50).repeat(), steps_per_epoch=4, epochs=2, verbose=0)
print(f"Baseline: {baseline.history['loss'][-1]:.3f}")

save_results([model, linear], {**history.history, "linear": baseline.history["loss"]},
             forecasts=np.concatenate(forecasts), evaluated=model.evaluate(dataset_val, verbose=2))
