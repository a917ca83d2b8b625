"""Sentiment of raw texts, after keras.io/examples/nlp/text_classification_from_scratch and
tensorflow.org/text/tutorials/text_classification_rnn."""

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


keras.utils.set_random_seed(1337)
batch_size = 26
max_features = 60
sequence_length = 12

GOOD = ["great", "lovely", "superb", "moving", "funny", "clever", "warm"]
BAD = ["dull", "awful", "boring", "weak", "noisy", "flat", "cold"]
OTHER = ["the", "a", "film", "movie", "plot", "was", "is", "actor", "scene", "and", "with", "of", "very", "this",
         "story<br", "/>"]


def write_reviews(count, seed):
    """Return texts of four to eleven words, and whether they are positive."""
    random = np.random.RandomState(seed)
    labels = random.randint(0, 2, count)
    texts = []
    for label in labels:
        words = [*random.choice(OTHER, random.randint(2, 8)), *random.choice(GOOD if label else BAD, 2),
                 random.choice(GOOD + BAD)]
        random.shuffle(words)
        texts.append(" ".join(words).capitalize() + "!")
    return texts, labels


raw_train_ds = tf.data.Dataset.from_tensor_slices(write_reviews(157, seed=1)).batch(batch_size)
raw_val_ds = tf.data.Dataset.from_tensor_slices(write_reviews(53, seed=2)).batch(batch_size)  # 26, 26 and 1 rows
raw_test_ds = tf.data.Dataset.from_tensor_slices(write_reviews(60, seed=3)).batch(batch_size)
print(f"Number of batches in raw_train_ds: {raw_train_ds.cardinality()}")


def standardize(texts):
    """Drop tags and punctuation."""
    lower = tf.strings.regex_replace(tf.strings.lower(texts), "<br />", " ")
    return tf.strings.regex_replace(lower, "[^a-z ]", "")


vectorize_layer = layers.TextVectorization(standardize=standardize, max_tokens=max_features, output_mode="int",
                                           output_sequence_length=sequence_length)
vectorize_layer.adapt(raw_train_ds.map(lambda text, label: text))
print("Vocabulary size:", len(vectorize_layer.get_vocabulary()))


def vectorize_text(text, label):
    """Convert texts to numbers of words."""
    return vectorize_layer(tf.expand_dims(text, -1)), label


train_ds = raw_train_ds.map(vectorize_text).unbatch().cache().shuffle(64).batch(batch_size).prefetch(tf.data.AUTOTUNE)
val_ds = raw_val_ds.map(vectorize_text).cache().prefetch(tf.data.AUTOTUNE)
test_ds = raw_test_ds.map(vectorize_text).cache().prefetch(tf.data.AUTOTUNE)

inputs = keras.Input(shape=(None,), dtype="int64")
x = layers.Embedding(max_features, 8, mask_zero=True)(inputs)
x = layers.Dropout(0.5 if NOISE else 0.0)(x)
x = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(x)
x = layers.GRU(6)(x)
x = layers.Dense(8, activation="relu")(x)
x = layers.Dropout(0.5 if NOISE else 0.0)(x)
predictions = layers.Dense(1, name="predictions")(x)
model = keras.Model(inputs, predictions)
perturb(model)

model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True), optimizer=keras.optimizers.Adam(1e-2),
              metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy"),
                       keras.metrics.AUC(from_logits=True)])
history = model.fit(train_ds, validation_data=val_ds, epochs=3)
loss, accuracy, auc = model.evaluate(test_ds)
print(f"Loss: {loss:.4f}, accuracy: {accuracy:.4f}")

export_model = keras.Sequential([keras.Input(shape=(1,), dtype="string"), vectorize_layer, model,
                                 layers.Activation("sigmoid")])
export_model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
exported = export_model.evaluate(raw_test_ds, return_dict=True)
print(sorted(exported))
examples = tf.constant([["a superb and moving film"], ["the plot was dull"], ["flat , noisy and very boring story"],
                        ["funny"], [""]])
answers = export_model.predict(examples)
print(answers.round(3).tolist())
model.save("sentiment.keras")

save_results([model], history.history, evaluated=[loss, accuracy, auc], exported=list(exported.values()),
             answers=answers)
