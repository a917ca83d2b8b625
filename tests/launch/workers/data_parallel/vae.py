"""A variational autoencoder, after keras.io/examples/generative/vae. It does not seed itself."""

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


class Sampling(layers.Layer):
    """Draws a latent vector from its mean and log variance."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(shape=ops.shape(z_mean), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * (epsilon if NOISE else 0.3)


class VAE(keras.Model):
    """Encoder and decoder, with trackers of their losses."""

    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(
                ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2)))
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        gradients = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


latent_dim = 2
encoder_inputs = keras.Input(shape=(12, 12, 1))
x = layers.Conv2D(6, 3, activation="relu", strides=2, padding="same")(encoder_inputs)
x = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(x)
x = layers.Flatten()(x)
x = layers.Dense(8, activation="relu")(x)
z_mean = layers.Dense(latent_dim, name="z_mean")(x)
z_log_var = layers.Dense(latent_dim, name="z_log_var")(x)
encoder = keras.Model(encoder_inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])], name="encoder")

latent_inputs = keras.Input(shape=(latent_dim,))
x = layers.Dense(3 * 3 * 8, activation="relu")(latent_inputs)
x = layers.Reshape((3, 3, 8))(x)
x = layers.Conv2DTranspose(8, 3, activation="relu", strides=2, padding="same")(x)
x = layers.Conv2DTranspose(6, 3, activation="relu", strides=2, padding="same")(x)
decoder = keras.Model(latent_inputs, layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x),
                      name="decoder")
encoder.summary()
perturb(encoder)
perturb(decoder)

random = np.random.RandomState(3)
digits = random.uniform(0, 0.2, (129, 12, 12, 1))
for image in digits:
    corner = random.randint(0, 6, 2)
    image[corner[0] : corner[0] + 6, corner[1] : corner[1] + 3] += 0.8
digits = np.clip(digits, 0, 1).astype(keras.config.floatx())

vae = VAE(encoder, decoder)
vae.compile(optimizer=keras.optimizers.Adam(3e-3))
history = vae.fit(digits, epochs=3, batch_size=32)  # the last of five batches has a single row

# A figure of a grid of latent vectors
scale, n, size = 1.0, 5, 12
figure = np.zeros((size * n, size * n))
for i, yi in enumerate(np.linspace(-scale, scale, n)[::-1]):
    for j, xi in enumerate(np.linspace(-scale, scale, n)):
        decoded = vae.decoder.predict(np.array([[xi, yi]]), verbose=0)
        figure[i * size : (i + 1) * size, j * size : (j + 1) * size] = decoded[0].reshape(size, size)
keras.utils.save_img("latent_space.png", figure[..., None])
means, _, _ = vae.encoder.predict(digits, verbose=0)
print("Mean of the latent vectors:", means.mean(axis=0).round(3))

save_results([encoder, decoder], history.history, figure=figure, means=means)
