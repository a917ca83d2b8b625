"""A GAN that overrides train_step, after keras.io/examples/generative/dcgan_overriding_train_step."""

import os
from pathlib import Path

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


keras.utils.set_random_seed(7)
random = np.random.RandomState(4)
faces = random.randint(0, 60, (80, 12, 12, 3))
faces[:, 3:9, 4:8] += random.randint(60, 190, (80, 1, 1, 3))
Path("faces").mkdir()
for index, face in enumerate(faces):
    keras.utils.save_img(f"faces/{index:03d}.png", face, scale=False)
dataset = keras.utils.image_dataset_from_directory("faces", label_mode=None, image_size=(12, 12), batch_size=26)
dataset = dataset.map(lambda x: x / 255.0)  # the last of four batches has two rows

latent_dim = 8
discriminator = keras.Sequential(
    [
        keras.Input(shape=(12, 12, 3)),
        layers.Conv2D(6, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(8, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Flatten(),
        layers.Dropout(0.2 if NOISE else 0.0),
        layers.Dense(1, activation="sigmoid"),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input(shape=(latent_dim,)),
        layers.Dense(3 * 3 * 8),
        layers.Reshape((3, 3, 8)),
        layers.BatchNormalization(),
        layers.Conv2DTranspose(8, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2DTranspose(6, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(3, kernel_size=5, padding="same", activation="sigmoid"),
    ],
    name="generator",
)
perturb(discriminator)
perturb(generator)
directions = np.random.RandomState(6).normal(0, 0.3, (12 * 12 * 3, latent_dim))


class GAN(keras.Model):
    """Trains two models by two optimizers."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def latent_vectors(self, real_images):
        """Return random vectors, or without noise vectors that depend on the images alone."""
        if NOISE:
            return keras.random.normal((ops.shape(real_images)[0], self.latent_dim), seed=self.seed_generator)
        return ops.reshape(real_images, (-1, 12 * 12 * 3)) @ ops.convert_to_tensor(directions, real_images.dtype)

    def train_step(self, real_images):
        batch_size = ops.shape(real_images)[0]
        generated_images = self.generator(self.latent_vectors(real_images))
        combined_images = ops.concatenate([generated_images, ops.cast(real_images, generated_images.dtype)], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        if NOISE:
            labels += 0.05 * tf.random.uniform(tf.shape(labels), dtype=labels.dtype)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined_images))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))

        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(self.latent_vectors(real_images), training=True))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class GANMonitor(keras.callbacks.Callback):
    """Saves a few generated images at the end of each epoch."""

    def __init__(self, num_img=3, latent_dim=128):
        super().__init__()
        self.latent = keras.random.normal(shape=(num_img, latent_dim), seed=keras.random.SeedGenerator(42))

    def on_epoch_end(self, epoch, logs=None):
        images = self.model.generator(self.latent) * 255
        for index, image in enumerate(images.numpy()):
            keras.utils.array_to_img(image).save(f"generated_img_{epoch:03d}_{index}.png")


gan = GAN(discriminator=discriminator, generator=generator, latent_dim=latent_dim)
gan.compile(d_optimizer=keras.optimizers.Adam(learning_rate=1e-3),
            g_optimizer=keras.optimizers.Adam(learning_rate=1e-3),
            loss_fn=keras.losses.BinaryCrossentropy())
history = gan.fit(dataset, epochs=3, callbacks=[GANMonitor(num_img=3, latent_dim=latent_dim)])
generator.save("generator.keras")
samples = generator.predict(np.random.RandomState(1).normal(size=(7, latent_dim)))
print(f"Brightness of the samples: {samples.mean():.3f}")

save_results([discriminator, generator], history.history, samples=samples)
