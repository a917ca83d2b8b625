"""A small convnet on images of digits, after keras.io/examples/vision/mnist_convnet. It does not seed itself."""

import os

import keras
import numpy as np
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


num_classes = 10
input_shape = (14, 14, 1)


def load_data(count, seed):
    """Return images of digits: a bright bar whose place depends on the digit."""
    random = np.random.RandomState(seed)
    digits = random.randint(0, num_classes, count)
    images = random.randint(0, 60, (count, 14, 14))
    for image, digit in zip(images, digits, strict=True):
        image[digit : digit + 4, 3:11] += 150
    return images.astype("uint8"), digits


x_train, y_train = load_data(215, seed=1)
x_test, y_test = load_data(50, seed=2)
x_train = np.expand_dims(x_train.astype("float32") / 255, -1)
x_test = np.expand_dims(x_test.astype("float32") / 255, -1)
print("x_train shape:", x_train.shape)
print(x_test.shape[0], "test samples")

y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(16, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.5 if NOISE else 0.0),
        layers.Dense(num_classes, activation="softmax"),
    ]
)
perturb(model)
model.summary()

model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
# 193 of the 215 samples train: the last of seven batches has a single row
history = model.fit(x_train, y_train, batch_size=32, epochs=3, validation_split=0.1)

score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])

probabilities = model.predict(x_test)
print("Predicted digits:", np.argmax(probabilities[:5], axis=-1))
model.save("mnist_convnet.keras")
restored = keras.models.load_model("mnist_convnet.keras")
np.testing.assert_allclose(restored.predict(x_test, verbose=0), probabilities, rtol=1e-4, atol=1e-5)

save_results([model], history.history, score=score, probabilities=probabilities)
