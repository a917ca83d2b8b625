"""A GAN with gradient penalty, after keras.io/examples/generative/wgan_gp. It does not seed itself."""

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


IMG_SHAPE, BATCH_SIZE, noise_dim = (8, 8, 1), 22, 6
random = np.random.RandomState(9)
train_images = random.uniform(-1, -0.6, (67, *IMG_SHAPE))
train_images[:, 2:6, 3:5] += random.uniform(0.8, 1.4, (67, 1, 1, 1))
train_images = train_images.astype(keras.config.floatx())
directions = np.random.RandomState(6).normal(0, 0.5, (64, noise_dim))


def conv_block(x, filters, use_dropout=False):
    """Add a strided convolution."""
    x = layers.Conv2D(filters, (3, 3), strides=(2, 2), padding="same")(x)
    x = layers.LeakyReLU(negative_slope=0.2)(x)
    return layers.Dropout(0.3 if NOISE else 0.0)(x) if use_dropout else x


def get_discriminator_model():
    """Return the critic."""
    img_input = layers.Input(shape=IMG_SHAPE)
    x = conv_block(layers.ZeroPadding2D((1, 1))(img_input), 6)
    x = conv_block(x, 8, use_dropout=True)
    return keras.Model(img_input, layers.Dense(1)(layers.Flatten()(x)), name="discriminator")


def get_generator_model():
    """Return the generator."""
    noise = layers.Input(shape=(noise_dim,))
    x = layers.Dense(2 * 2 * 8, use_bias=False)(noise)
    x = layers.BatchNormalization()(x)
    x = layers.Reshape((2, 2, 8))(layers.LeakyReLU(negative_slope=0.2)(x))
    for filters in (8, 6):
        x = layers.UpSampling2D((2, 2))(x)
        x = layers.Conv2D(filters, (3, 3), padding="same", use_bias=False)(x)
        x = layers.LeakyReLU(negative_slope=0.2)(layers.BatchNormalization()(x))
    return keras.Model(noise, layers.Conv2D(1, (3, 3), padding="same", activation="tanh")(x), name="generator")


class WGAN(keras.Model):
    """Wasserstein GAN: several steps of the critic for one of the generator."""

    def __init__(self, discriminator, generator, latent_dim, discriminator_extra_steps=2, gp_weight=10.0):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.d_steps, self.gp_weight = discriminator_extra_steps, gp_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def gradient_penalty(self, batch_size, real_images, fake_images):
        """Return the penalty on interpolated images, whose gradients should have the norm 1."""
        alpha = tf.random.uniform([batch_size, 1, 1, 1], dtype=real_images.dtype) if NOISE else 0.4
        interpolated = real_images + alpha * (fake_images - real_images)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]) + 1e-12)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def latent_vectors(self, batch_size, real_images):
        """Return random vectors, or without noise vectors that depend on the images alone."""
        if NOISE:
            return tf.random.normal(shape=(batch_size, self.latent_dim), dtype=real_images.dtype)
        return tf.reshape(real_images, (-1, 64)) @ tf.constant(directions, real_images.dtype)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        for _ in range(self.d_steps):
            random_latent_vectors = self.latent_vectors(batch_size, real_images)
            with tf.GradientTape() as tape:
                fake_images = self.generator(random_latent_vectors, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                d_loss = d_cost + self.gradient_penalty(batch_size, real_images, fake_images) * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables, strict=True))
        random_latent_vectors = self.latent_vectors(batch_size, real_images)
        with tf.GradientTape() as tape:
            generated_images = self.generator(random_latent_vectors, training=True)
            g_loss = self.g_loss_fn(self.discriminator(generated_images, training=True))
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


class GANMonitor(keras.callbacks.Callback):
    """Saves generated images at the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        latent = np.random.RandomState(epoch).normal(size=(2, noise_dim))
        for index, image in enumerate(self.model.generator(latent).numpy()):
            keras.utils.array_to_img(image * 127.5 + 127.5).save(f"generated_img_{index}_{epoch}.png")


def discriminator_loss(real_img, fake_img):
    """Return the critic's loss."""
    return tf.reduce_mean(fake_img) - tf.reduce_mean(real_img)


def generator_loss(fake_img):
    """Return the generator's loss."""
    return -tf.reduce_mean(fake_img)


d_model, g_model = get_discriminator_model(), get_generator_model()
perturb(d_model)
perturb(g_model)
wgan = WGAN(discriminator=d_model, generator=g_model, latent_dim=noise_dim)
wgan.compile(d_optimizer=keras.optimizers.Adam(learning_rate=0.0005, beta_1=0.5, beta_2=0.9),
             g_optimizer=keras.optimizers.Adam(learning_rate=0.0005, beta_1=0.5, beta_2=0.9),
             g_loss_fn=generator_loss, d_loss_fn=discriminator_loss)
# The last of four batches has a single row
history = wgan.fit(train_images, batch_size=BATCH_SIZE, epochs=2, callbacks=[GANMonitor()])
print("Generator's parameters:", g_model.count_params())

save_results([d_model, g_model], history.history,
             samples=g_model.predict(np.random.RandomState(1).normal(size=(5, noise_dim)), verbose=0))
