"""Several inputs and outputs from generators, after keras.io/guides/functional_api and
keras.io/guides/training_with_built_in_methods."""

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


keras.utils.set_random_seed(3)
num_tags, num_words, num_departments = 5, 50, 3


class Sparsity(layers.Layer):
    """Adds a loss of its input, and passes it on."""

    def call(self, inputs):
        self.add_loss(1e-2 * ops.mean(ops.abs(inputs)))
        return inputs


def tickets(count, seed):
    """Return titles, tags, priorities and departments of tickets."""
    random = np.random.RandomState(seed)
    title, tags = random.randint(1, num_words, (count, 9)), random.randint(0, 2, (count, num_tags))
    priority = (tags[:, :2].mean(axis=1, keepdims=True) * 0.6 + random.uniform(0, 0.4, (count, 1))).astype("float32")
    return title, tags.astype("float32"), priority, keras.utils.to_categorical(title[:, 0] % 3, num_departments)


def generate(data, batch_size, endless=True, weights=False):
    """Yield batches, endlessly or once: the last one of an epoch is smaller."""
    title, tags, priority, department = data
    while True:
        for begin in range(0, len(title), batch_size):
            part = slice(begin, begin + batch_size)
            batch = {"title": title[part], "tags": tags[part]}, {"priority": priority[part],
                                                                 "department": department[part]}
            if weights:
                priority_weight = 0.5 + tags[part, 0]
                yield (*batch, {"priority": priority_weight, "department": np.ones(len(priority_weight))})
            else:
                yield batch
        if not endless:
            return


title_input = keras.Input(shape=(None,), name="title")
tags_input = keras.Input(shape=(num_tags,), name="tags")
title_features = layers.Embedding(num_words, 8)(title_input)
title_features = layers.LSTM(6)(title_features)
tags_features = layers.Dense(6, activation="relu", activity_regularizer=keras.regularizers.L2(1e-2))(tags_input)
x = layers.concatenate([title_features, tags_features])
x = Sparsity()(layers.GaussianNoise(0.1 if NOISE else 0.0)(x))
model = keras.Model(
    inputs={"title": title_input, "tags": tags_input},
    outputs={"priority": layers.Dense(1, name="priority", kernel_regularizer="l2")(x),
             "department": layers.Dense(num_departments, name="department")(x)},
)
perturb(model)
keras.utils.set_random_seed(3)

train_data, validation_data = tickets(81, seed=1), tickets(29, seed=2)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-2, clipnorm=0.5),
    loss={"priority": "mse", "department": keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)},
    loss_weights={"priority": 2.0, "department": 0.4},
    metrics={"priority": ["mae", keras.metrics.RootMeanSquaredError(name="rmse")], "department": ["accuracy"]},
    weighted_metrics={"department": ["categorical_crossentropy"], "priority": ["mse"]},
    steps_per_execution=2,
)
# Batches of 20 rows, and one of a single row at the end of each pass; seven steps end within the second pass. Keras may
# drop batches of a generator between two validations: all of these are the same
history = model.fit(generate(train_data, 20, weights=True), steps_per_epoch=7, epochs=2,
                    validation_data=generate(validation_data, 29), validation_steps=2)
third = model.fit(generate(train_data, 20), steps_per_epoch=5, epochs=4, initial_epoch=3, verbose=2,
                  validation_data=generate(validation_data, 14), validation_steps=4)
evaluated = model.evaluate(generate(validation_data, 14, endless=False), return_dict=True)

# The same model with positional data, an optimizer that clips the norm of all gradients, and one step per execution
model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, global_clipnorm=0.2),
              loss={"priority": keras.losses.Huber(0.3), "department": "categorical_hinge"})
title, tags, priority, department = train_data
second = model.fit({"title": title, "tags": tags}, {"priority": priority, "department": department}, epochs=2,
                   batch_size=32, steps_per_epoch=2, validation_split=0.2, validation_freq=2, verbose=2)
predictions = model.predict({"title": validation_data[0], "tags": validation_data[1]}, batch_size=14)
print({name: value.shape for name, value in sorted(predictions.items())})
try:
    keras.utils.plot_model(model, "multi_input_and_output_model.png", show_shapes=True)
except ImportError as error:
    print("no plot:", type(error).__name__)
model.export("exported", verbose=False)

save_results([model], {**{f"second_{k}": v for k, v in second.history.items()},
                       **{f"third_{k}": v for k, v in third.history.items()}, **history.history},
             evaluated=[evaluated[name] for name in sorted(evaluated)], **predictions)
