"""Supervised contrastive learning, after keras.io/examples/vision/supervised-contrastive-learning: the loss of each
sample depends on the other samples of its batch. It does not seed itself."""

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


num_classes, dimensions, temperature = 4, 16, 0.5
random = np.random.RandomState(31)
centers = random.normal(0, 1.0, (num_classes, dimensions))


def load_data(count):
    """Return vectors around their classes' centers, and the classes."""
    labels = random.randint(0, num_classes, count)
    return (centers[labels] + random.normal(0, 0.8, (count, dimensions))).astype("float32"), labels[:, None]


(x_train, y_train), (x_test, y_test) = load_data(97), load_data(40)


def create_encoder():
    """Return the encoder."""
    inputs = keras.Input(shape=(dimensions,))
    normalization = layers.Normalization()
    normalization.adapt(x_train)
    x = layers.Dense(16, activation="relu")(normalization(inputs))
    return keras.Model(inputs, layers.Dense(12, activation="relu")(x), name="encoder")


class SupervisedContrastiveLoss(keras.losses.Loss):
    """Draws samples of one class together, and the others of the batch apart."""

    def __init__(self, temperature=1, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels, feature_vectors, sample_weight=None):
        normalized = ops.normalize(feature_vectors, axis=1, order=2)
        logits = ops.matmul(normalized, ops.transpose(normalized)) / self.temperature
        labels = ops.reshape(labels, (-1, 1))
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
        targets = same / ops.sum(same, axis=1, keepdims=True)
        return ops.mean(ops.categorical_crossentropy(targets, logits, from_logits=True))


encoder = create_encoder()
inputs = keras.Input(shape=(dimensions,))
projection = layers.Dense(8, activation="relu")(encoder(inputs))
encoder_with_projection_head = keras.Model(inputs, projection, name="encoder_with_projection_head")
perturb(encoder_with_projection_head)
encoder_with_projection_head.compile(optimizer=keras.optimizers.Adam(1e-2),
                                     loss=SupervisedContrastiveLoss(temperature))
first = encoder_with_projection_head.fit(x=x_train, y=y_train, batch_size=24, epochs=3)  # the last batch has one row

encoder.trainable = False
features = layers.Dropout(0.2 if NOISE else 0.0)(encoder(inputs))
features = layers.Dense(12, activation="relu")(features)
classifier = keras.Model(inputs, layers.Dense(num_classes, activation="softmax")(features), name="classifier")
classifier.compile(optimizer=keras.optimizers.Adam(1e-2), loss=keras.losses.SparseCategoricalCrossentropy(),
                   metrics=[keras.metrics.SparseCategoricalAccuracy()])
history = classifier.fit(x=x_train, y=y_train, batch_size=24, epochs=2)
score = classifier.evaluate(x_test, y_test)
print(f"Test accuracy: {score[1] * 100:.1f}%")
classifier.save("classifier.keras")

save_results([encoder_with_projection_head, classifier], {"contrastive": first.history["loss"], **history.history},
             score=score, predictions=classifier.predict(x_test, verbose=0))
