"""Columns of a table, after keras.io/examples/structured_data/structured_data_classification_from_scratch and
tensorflow.org/tutorials/structured_data/preprocessing_layers."""

import csv
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


keras.utils.set_random_seed(42)
NUMERIC = ["age", "trestbps", "oldpeak"]
CATEGORICAL = ["thal", "sex"]


def write_table(name, count):
    """Write the table that published scripts download."""
    random = np.random.RandomState(8)
    with open(name, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*NUMERIC, *CATEGORICAL, "target"])
        for _ in range(count):
            age, pressure, peak = random.randint(30, 75), random.randint(90, 180), round(random.gamma(1.0), 1)
            thal, sex = random.choice(["normal", "fixed", "reversible"]), random.randint(2)
            risk = (age - 50) / 12 + peak + 2 * (thal == "reversible") - 2.2 + random.normal(0, 0.5)
            writer.writerow([age, pressure, peak, thal, sex, int(risk > 0)])


write_table("heart.csv", 171)
with open("heart.csv", newline="") as file:
    rows = list(csv.DictReader(file))
columns = {name: np.array([float(row[name]) for row in rows])[:, None] for name in NUMERIC}
columns["thal"] = np.array([row["thal"] for row in rows])[:, None]
columns["sex"] = np.array([int(row["sex"]) for row in rows])[:, None]
target = np.array([int(row["target"]) for row in rows])
split = 131
train, test = ({name: column[part] for name, column in columns.items()} for part in (slice(split), slice(split, None)))
y_train, y_test = target[:split], target[split:]


def to_dataset(features, labels, shuffle=True, batch_size=26):
    """Return batches of the columns: six of the 131 samples that train, the last of a single row."""
    dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    if shuffle:
        dataset = dataset.shuffle(buffer_size=len(labels))
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)


train_ds, test_ds = to_dataset(train, y_train), to_dataset(test, y_test, shuffle=False)

all_inputs, encoded = {}, []
for name in NUMERIC:
    normalizer = layers.Normalization(axis=None)
    normalizer.adapt(train_ds.map(lambda features, _, name=name: features[name]))
    all_inputs[name] = keras.Input(shape=(1,), name=name)
    encoded.append(normalizer(all_inputs[name]))
for name, dtype, lookup in (("thal", "string", layers.StringLookup(output_mode="multi_hot")),
                            ("sex", "int64", layers.IntegerLookup(output_mode="multi_hot"))):
    lookup.adapt(train_ds.map(lambda features, _, name=name: features[name]))
    all_inputs[name] = keras.Input(shape=(1,), name=name, dtype=dtype)
    encoded.append(lookup(all_inputs[name]))
x = layers.concatenate(encoded)
x = layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3))(x)
x = layers.Dropout(0.5 if NOISE else 0.0)(x)
model = keras.Model(all_inputs, layers.Dense(1, activation="sigmoid")(x))
perturb(model)

metrics = [keras.metrics.MeanSquaredError(name="Brier score"), keras.metrics.TruePositives(name="tp"),
           keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall"),
           keras.metrics.AUC(name="auc"), keras.metrics.AUC(name="prc", curve="PR")]
model.compile(keras.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=metrics)
positives = y_train.sum()
class_weight = {0: len(y_train) / (2.0 * (len(y_train) - positives)), 1: len(y_train) / (2.0 * positives)}
callbacks = [
    keras.callbacks.EarlyStopping(monitor="val_prc", mode="max", patience=2, restore_best_weights=True, verbose=1),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.5, verbose=1),
    keras.callbacks.ModelCheckpoint("best.weights.h5", monitor="val_loss", save_best_only=True, save_weights_only=True),
    keras.callbacks.CSVLogger("training.csv"),
]
weighted = model.fit(train_ds, epochs=4, validation_data=test_ds, class_weight=class_weight, callbacks=callbacks,
                     verbose=2)
model.load_weights("best.weights.h5")
after_first = model.evaluate(to_dataset(test, y_test, shuffle=False, batch_size=16), return_dict=True, verbose=2)

train, test = ({name: tf.convert_to_tensor(column) for name, column in part.items()} for part in (train, test))
sample_weight = np.where(columns["age"][:split, 0] > 60, 2.0, 0.5)
model.compile("sgd", loss="binary_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy", "mse"])
history = model.fit(train, y_train, sample_weight=sample_weight, batch_size=30, epochs=2, validation_split=0.25,
                    verbose=2)
score = model.evaluate(test, y_test, sample_weight=np.linspace(0.5, 1.5, len(y_test)), verbose=2)
model.save("heart_classifier.keras")
reloaded = keras.models.load_model("heart_classifier.keras")
sample = {"age": 60, "trestbps": 145, "oldpeak": 2.3, "thal": "fixed", "sex": 1}
answer = reloaded.predict({name: tf.convert_to_tensor([[value]]) for name, value in sample.items()}, verbose=0)
print(f"This patient had a {100 * answer[0, 0]:.1f} percent probability of having a heart disease.")

save_results([model], {**{f"first_{name}": values for name, values in weighted.history.items()}, **history.history},
             after_first=list(after_first.values()), score=score, answer=answer,
             predictions=model.predict(test, batch_size=39, verbose=0))
