"""Transfer learning in two stages on folders of images, after keras.io/guides/transfer_learning and
tensorflow.org/tutorials/images/transfer_learning. It does not seed itself."""

import os
import shutil
from pathlib import Path

import keras
import matplotlib.pyplot as plt
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


def make_archive():
    """Create the archive that published scripts download: images of cats (stripes) and dogs (spots)."""
    random = np.random.RandomState(5)
    for name, count in (("cats", 31), ("dogs", 36)):
        folder = Path("source", "pets", name)
        folder.mkdir(parents=True)
        for index in range(count):
            image = random.randint(0, 90, (20, 24, 3))
            if name == "cats":
                image[:, :: random.randint(3, 5)] += 120
            else:
                image[random.randint(0, 20, 30), random.randint(0, 24, 30)] += 160
            keras.utils.save_img(folder / f"{index}.png", image, scale=False)
    archive = Path(shutil.make_archive("pets", "zip", "source")).resolve()
    shutil.rmtree("source")
    return archive.as_uri()


path = keras.utils.get_file("pets.zip", origin=make_archive(), extract=True, cache_dir=".")
data_dir = next(Path(path).parent.rglob("cats")).parent
image_size = (16, 16)
shared = {"image_size": image_size, "batch_size": 12, "validation_split": 0.2, "seed": 42}
train_dataset = keras.utils.image_dataset_from_directory(data_dir, subset="training", **shared)  # the last: 6 rows
validation_dataset = keras.utils.image_dataset_from_directory(data_dir, subset="validation", **shared)  # 12 and 1
class_names = train_dataset.class_names
print(class_names)
train_dataset = train_dataset.prefetch(buffer_size=tf.data.AUTOTUNE)
validation_dataset = validation_dataset.prefetch(buffer_size=tf.data.AUTOTUNE)


def pretrained_backbone():
    """Return a convnet whose weights and statistics are some that were trained elsewhere."""
    inputs = keras.Input((*image_size, 3))
    x = inputs
    for filters in (6, 12):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.ReLU(6.0)(x)
    backbone = keras.Model(inputs, x, name="backbone")
    random = np.random.RandomState(11)
    backbone.set_weights([random.uniform(0.2, 0.6, w.shape) if w.ndim == 1 else random.normal(0, 0.3, w.shape)
                          for w in backbone.get_weights()])
    return backbone


base_model = pretrained_backbone()
base_model.trainable = False
rotation = layers.Identity() if os.environ.get("FLOAT64") else layers.RandomRotation(0.2)  # Keras's is of float32
data_augmentation = keras.Sequential([layers.RandomFlip("horizontal"), rotation] if NOISE else [layers.Identity()])

inputs = keras.Input(shape=(*image_size, 3))
x = data_augmentation(inputs)
x = layers.Rescaling(scale=1 / 127.5, offset=-1)(x)
x = base_model(x, training=False)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.2 if NOISE else 0.0)(x)
outputs = layers.Dense(1)(x)
model = keras.Model(inputs, outputs)
perturb(model)

model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=keras.losses.BinaryCrossentropy(from_logits=True),
              metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")])
first = model.evaluate(validation_dataset)
print(f"initial loss: {first[0]:.2f}")
history = model.fit(train_dataset, epochs=2, validation_data=validation_dataset)
print("Number of trainable weights:", len(model.trainable_weights))

# Fine-tuning: the upper block of the backbone learns as well, in training mode this time
base_model.trainable = True
for layer in base_model.layers[:3]:
    layer.trainable = False
fine_tuned = keras.Sequential([layers.Rescaling(scale=1 / 127.5, offset=-1), base_model,
                               layers.GlobalAveragePooling2D(), model.layers[-1]])
fine_tuned.build((None, *image_size, 3))
fine_tuned.compile(optimizer=keras.optimizers.RMSprop(1e-3), loss=keras.losses.BinaryCrossentropy(from_logits=True),
                   metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")])
history_fine = fine_tuned.fit(train_dataset, epochs=4, initial_epoch=history.epoch[-1] + 1,
                              validation_data=validation_dataset)
loss, accuracy = fine_tuned.evaluate(validation_dataset)
print("Validation accuracy:", accuracy)

image_batch, label_batch = next(validation_dataset.as_numpy_iterator())
predictions = fine_tuned.predict_on_batch(image_batch).flatten()
print("Predictions:", (predictions > 0).astype(int), "labels:", label_batch)

accuracies = history.history["val_accuracy"] + history_fine.history["val_accuracy"]
plt.plot(accuracies, label="Validation accuracy")
plt.plot([1, 1], plt.ylim(), label="Start of fine-tuning")
plt.legend()
plt.savefig("accuracy.png")
fine_tuned.save_weights("fine_tuned.weights.h5")

save_results([model, fine_tuned], {**history.history, **{f"fine_{k}": v for k, v in history_fine.history.items()}},
             first=first, evaluated=[loss, accuracy], predictions=predictions,
             whole=fine_tuned.predict(validation_dataset.map(lambda images, labels: images)))
