"""Segmentation of images by a U-Net, after keras.io/examples/vision/oxford_pets_image_segmentation."""

import math
import os
from pathlib import Path

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


keras.utils.set_random_seed(1337)
img_size, num_classes, batch_size = (16, 16), 3, 10


def draw(count):
    """Write images of a box before a background, and masks: inside, outside, border."""
    random = np.random.RandomState(12)
    Path("images").mkdir()
    Path("masks").mkdir()
    for index in range(count):
        image, mask = random.randint(0, 100, (20, 20, 3)), np.full((20, 20, 1), 2)
        top, left, side = random.randint(0, 8), random.randint(0, 8), random.randint(6, 11)
        mask[top : top + side, left : left + side] = 3
        mask[top + 1 : top + side - 1, left + 1 : left + side - 1] = 1
        image[mask[..., 0] == 1] += 140
        keras.utils.save_img(f"images/{index:03d}.png", image, scale=False)
        keras.utils.save_img(f"masks/{index:03d}.png", mask, scale=False)


draw(49)
input_img_paths = sorted(Path("images").glob("*.png"))
target_img_paths = sorted(Path("masks").glob("*.png"))
print("Number of samples:", len(input_img_paths))


class OxfordPets(keras.utils.PyDataset):
    """Reads batches of images and masks from files; the last batch may be smaller."""

    def __init__(self, input_paths, target_paths, **kwargs):
        super().__init__(**kwargs)
        self.input_paths, self.target_paths = input_paths, target_paths

    def __len__(self):
        return math.ceil(len(self.input_paths) / batch_size)

    def __getitem__(self, idx):
        part = slice(idx * batch_size, (idx + 1) * batch_size)
        x = [keras.utils.img_to_array(keras.utils.load_img(path, target_size=img_size))
             for path in self.input_paths[part]]
        y = [keras.utils.img_to_array(keras.utils.load_img(path, target_size=img_size, color_mode="grayscale"))
             for path in self.target_paths[part]]
        return np.array(x, "float32") / 255, np.array(y, "uint8") - 1


def get_model():
    """Return the U-Net."""
    inputs = keras.Input(shape=(*img_size, 3))
    x = layers.Conv2D(6, 3, strides=2, padding="same")(inputs)
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    previous = x
    for filters in (8, 12):
        for _ in range(2):
            x = layers.Activation("relu")(x)
            x = layers.SeparableConv2D(filters, 3, padding="same")(x)
            x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(filters, 1, strides=2, padding="same")(previous)
        x = previous = layers.add([x, residual])
    for filters in (12, 8, 6):
        x = layers.Activation("relu")(x)
        x = layers.Conv2DTranspose(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.UpSampling2D(2)(x)
        residual = layers.Conv2D(filters, 1, padding="same")(layers.UpSampling2D(2)(previous))
        x = previous = layers.add([x, residual])
    return keras.Model(inputs, layers.Conv2D(num_classes, 3, activation="softmax", padding="same")(x))


def dice(y_true, y_pred):
    """Return the overlap of the predicted and the true inside, per image."""
    inside = ops.cast(ops.equal(ops.squeeze(y_true, -1), 0), y_pred.dtype)
    overlap = ops.sum(inside * y_pred[..., 0], axis=(1, 2))
    return (2 * overlap + 1) / (ops.sum(inside, axis=(1, 2)) + ops.sum(y_pred[..., 0], axis=(1, 2)) + 1)


val_samples = 17  # batches of 10 and 7; those of the training have 10, 10, 10 and 2 rows
train_gen = OxfordPets(input_img_paths[:-val_samples], target_img_paths[:-val_samples], workers=2, max_queue_size=4)
val_gen = OxfordPets(input_img_paths[-val_samples:], target_img_paths[-val_samples:])

model = get_model()
perturb(model)
model.compile(optimizer="rmsprop", loss="sparse_categorical_crossentropy",
              metrics=["accuracy", dice, keras.metrics.MeanIoU(num_classes, sparse_y_pred=False, name="iou")])
callbacks = [keras.callbacks.ModelCheckpoint("oxford_segmentation.keras", save_best_only=True)]
history = model.fit(train_gen, epochs=3, validation_data=val_gen, callbacks=callbacks, verbose=2)

val_preds = model.predict(val_gen)
mask = np.argmax(val_preds[0], axis=-1)[..., None]
keras.utils.save_img("mask.png", mask * 127, scale=False)
best = keras.models.load_model("oxford_segmentation.keras", custom_objects={"dice": dice})
score = best.evaluate(val_gen, return_dict=True)
print({name: round(value, 4) for name, value in score.items()})

save_results([model, best], history.history, val_preds=val_preds, score=list(score.values()))
