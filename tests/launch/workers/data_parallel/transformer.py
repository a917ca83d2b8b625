"""A transformer as classifier, after keras.io/examples/nlp/text_classification_with_transformer and
tensorflow.org/text/tutorials/transformer. It does not seed itself."""

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


@keras.saving.register_keras_serializable(package="examples")
class TransformerBlock(layers.Layer):
    """Attention and a feed-forward network, each with residual and normalization."""

    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "ff_dim": ff_dim, "rate": rate}
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim, dropout=rate)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def build(self, shape):
        self.att.build(shape, shape)
        self.ffn.build(shape)
        self.layernorm1.build(shape)
        self.layernorm2.build(shape)

    def call(self, inputs, training=None):
        attn_output = self.dropout1(self.att(inputs, inputs), training=training)
        out1 = self.layernorm1(inputs + attn_output)
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1), training=training))

    def get_config(self):
        return {**super().get_config(), **self.sizes}


@keras.saving.register_keras_serializable(package="examples")
class TokenAndPositionEmbedding(layers.Layer):
    """Embeds tokens and their places."""

    def __init__(self, maxlen, vocab_size, embed_dim, **kwargs):
        super().__init__(**kwargs)
        self.sizes = {"maxlen": maxlen, "vocab_size": vocab_size, "embed_dim": embed_dim}
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def build(self, shape):
        self.token_emb.build(shape)
        self.pos_emb.build(shape[-1:])

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.token_emb(x) + self.pos_emb(positions)

    def get_config(self):
        return {**super().get_config(), **self.sizes}


@keras.saving.register_keras_serializable(package="examples")
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """Grows at first, and then falls with the root of the step."""

    def __init__(self, d_model, warmup_steps=8):
        self.d_model, self.warmup_steps = d_model, warmup_steps

    def __call__(self, step):
        step = ops.cast(step, keras.config.floatx()) + 1
        return self.d_model**-0.5 * ops.minimum(1 / ops.sqrt(step), step * self.warmup_steps**-1.5) * 0.1

    def get_config(self):
        return {"d_model": self.d_model, "warmup_steps": self.warmup_steps}


vocab_size, maxlen, embed_dim = 40, 10, 8
random = np.random.RandomState(21)


def load_data(count):
    """Return sequences of random length, and which of two tokens is the first of both."""
    sequences = [random.randint(3, vocab_size, random.randint(4, 14)).tolist() for _ in range(count)]
    labels = random.randint(0, 2, count)
    for sequence, label in zip(sequences, labels, strict=True):
        places = sorted(random.choice(len(sequence), 2, replace=False))
        sequence[places[0]], sequence[places[1]] = 1 + label, 2 - label
    return sequences, labels


(x_train, y_train), (x_val, y_val) = load_data(116), load_data(45)
print(len(x_train), "Training sequences")
print(len(x_val), "Validation sequences")
x_train = keras.utils.pad_sequences(x_train, maxlen=maxlen)
x_val = keras.utils.pad_sequences(x_val, maxlen=maxlen)

rate = 0.1 if NOISE else 0.0
inputs = layers.Input(shape=(maxlen,))
x = TokenAndPositionEmbedding(maxlen, vocab_size, embed_dim)(inputs)
x = layers.SpatialDropout1D(rate)(x)
x = TransformerBlock(embed_dim, num_heads=2, ff_dim=12, rate=rate)(x)
x = layers.GlobalAveragePooling1D()(x)
x = layers.Dropout(rate)(x)
outputs = layers.Dense(2, activation="softmax")(x)
model = keras.Model(inputs=inputs, outputs=outputs)
perturb(model)

model.compile(optimizer=keras.optimizers.AdamW(Warmup(embed_dim), beta_2=0.98, clipnorm=1.0, use_ema=True,
                                               ema_momentum=0.9),
              loss="sparse_categorical_crossentropy", metrics=["accuracy"])
# Batches of 23 rows, the last of a single one
history = model.fit(x_train, y_train, batch_size=23, epochs=3, validation_data=(x_val, y_val), validation_batch_size=22)
print(f"Last loss: {history.history['loss'][-1]:.4f}")
model.save("transformer.keras")
restored = keras.models.load_model("transformer.keras")
predictions = restored.predict(x_val, batch_size=11)

save_results([model, restored], history.history, predictions=predictions,
             evaluated=restored.evaluate(x_val, y_val, verbose=0), rate=float(restored.optimizer.learning_rate))
