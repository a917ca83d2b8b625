"""Knowledge distillation, after keras.io/examples/vision/knowledge_distillation."""

import os

import keras
import numpy as np
import tensorflow as tf
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


keras.utils.set_random_seed(99)


class Distiller(keras.Model):
    """Trains a student on the labels and on the teacher's predictions."""

    def __init__(self, student, teacher):
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x, training=None):
        return self.student(x, training=training)


class OlderDistiller(Distiller):
    """The same in a train_step and a test_step of its own, as in an older version of the page."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self.student(x, training=True)
            loss = self.compute_loss(x, y, predictions)
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables, strict=True))
        for metric in self.metrics:
            metric.update_state(y, predictions) if metric.name != "loss" else metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics} | {"step_loss": loss}

    def test_step(self, data):
        x, y = data
        predictions = self.student(x, training=False)
        student_loss = self.student_loss_fn(y, predictions)
        self.compute_metrics(x, y, predictions)
        return {metric.name: metric.result() for metric in self.metrics} | {"student_loss": student_loss}


def network(name, filters):
    """Return a convnet."""
    return keras.Sequential(
        [
            keras.Input(shape=(10, 10, 1)),
            layers.Conv2D(filters, (3, 3), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D(pool_size=(2, 2), strides=(1, 1), padding="same"),
            layers.Conv2D(2 * filters, (3, 3), strides=(2, 2), padding="same"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(4),
        ],
        name=name,
    )


random = np.random.RandomState(14)
y_train, y_test = random.randint(0, 4, 124), random.randint(0, 4, 37)
x_train, x_test = (random.uniform(0, 0.3, (len(y), 10, 10, 1)).astype("float32") for y in (y_train, y_test))
for images, labels in ((x_train, y_train), (x_test, y_test)):
    for image, label in zip(images, labels, strict=True):
        image[5 * (label // 2) : 5 * (label // 2) + 5, 5 * (label % 2) : 5 * (label % 2) + 5] += 0.5

teacher, student = network("teacher", 8), network("student", 4)
perturb(teacher)
perturb(student)
student_scratch = keras.models.clone_model(student)
student_scratch.set_weights(student.get_weights())
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

teacher.compile(optimizer=keras.optimizers.Adam(3e-3), loss=cross_entropy,
                metrics=[keras.metrics.SparseCategoricalAccuracy()])
batch_size = 41  # of the student's four batches, the last has a single row
teacher_history = teacher.fit(x_train[:83], y_train[:83], epochs=3, batch_size=batch_size)
teacher.evaluate(x_test, y_test)
teacher.trainable = False

shared = {"metrics": [keras.metrics.SparseCategoricalAccuracy()], "student_loss_fn": cross_entropy,
          "distillation_loss_fn": keras.losses.KLDivergence(), "alpha": 0.1, "temperature": 10}
distiller = Distiller(student=student, teacher=teacher)
distiller.compile(optimizer=keras.optimizers.Adam(2e-3), **shared)
history = distiller.fit(x_train, y_train, epochs=2, batch_size=batch_size)
score = distiller.evaluate(x_test, y_test)

older = OlderDistiller(student=student_scratch, teacher=teacher)
older.compile(optimizer=keras.optimizers.Adam(2e-3),
              **{**shared, "metrics": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]})
older_history = older.fit(x_train, y_train, epochs=2, batch_size=batch_size, validation_data=(x_test, y_test),
                          verbose=2)
older_score = older.evaluate(x_test, y_test, batch_size=36, return_dict=True)
print("distilled:", np.round(score, 4), sorted(older_score))
student.save("student.keras")

save_results([teacher, student, student_scratch], {**{f"older_{k}": v for k, v in older_history.history.items()},
                                                   **history.history, "teacher": teacher_history.history["loss"]},
             score=score, older_score=list(older_score.values()), predictions=distiller.predict(x_test, batch_size=12))
