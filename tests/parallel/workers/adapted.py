"""Layers with `adapt()` on two ranks: learning from all ranks' data, broadcast from the root, divergence check."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras.horovod import as_horovod

keras: Any = tf.keras
KERAS_3 = not keras.Model.__module__.startswith("tf_keras.")
layers = keras.layers
WORDS = ["b b a", "c a d", "ä d", "", "e e e c", "f g", "[UNK] b", "a\0z b"]
RANDOM = np.random.default_rng(3)
TABLE = (RANDOM.normal(size=(37, 3)) * [1, 100, 0.01] + [1000, 0, -5]).astype("float32")
LONG = RANDOM.gamma(2.0, size=5000).astype("float32")


def mine(data: Any) -> Any:
    """Return this rank's part; the last rank has only an eighth."""
    cut = len(data) * 7 // 8
    return data[:cut] if hvd.rank() == 0 else data[cut:]


def dataset(data: Any, batch: int = 3) -> Any:
    return tf.data.Dataset.from_tensor_slices(data).batch(batch)


def strings(*rows: Any) -> Any:
    return np.array(rows, object)


def nothing_on_rank_0(data: Any) -> Any:
    return None if hvd.rank() == 0 else data


def knows(layer: Any) -> Any:
    """Return a layer's learned state, as numbers and strings."""
    if hasattr(layer, "get_vocabulary"):
        lookup = getattr(layer, "_lookup_layer", layer)
        words = [str(word) for word in layer.get_vocabulary()]
        return words, [] if lookup.output_mode != "tf_idf" else lookup.idf_weights_const.numpy().tolist()
    if hasattr(layer, "bin_boundaries"):
        return list(map(float, layer.bin_boundaries))
    return np.asarray(layer.mean).tolist(), np.asarray(layer.variance).tolist()


def cases() -> dict[str, tuple[Callable[[], Any], Any, Callable[[Any], Any]]]:
    """Return by name: a constructor of a layer, all data, and a function that selects a rank's part."""
    text, words = layers.TextVectorization, [[word] for row in WORDS for word in row.split()]
    numbers = np.array([[3], [3], [9], [7], [-2], [7], [5], [9], [1]], np.int64)
    found = {
        "words": (layers.StringLookup, strings(*words), mine),
        "few words": (lambda: layers.StringLookup(max_tokens=4, num_oov_indices=0), strings(*words), mine),
        "numbers": (lambda: layers.IntegerLookup(max_tokens=5), numbers, lambda data: dataset(mine(data))),
        "text": (text, strings(*WORDS), mine),
        "text in batches": (lambda: text(max_tokens=6, ngrams=2), strings(*WORDS), lambda data: dataset(mine(data))),
        "documents": (lambda: text(output_mode="tf_idf"), strings(*WORDS), mine),
        "documents of lookups": (
            lambda: layers.StringLookup(output_mode="tf_idf", max_tokens=5, pad_to_max_tokens=True),
            strings(["a", "b"], ["a", "a"], ["c", "b"], ["d", "e"]), mine),
        "none on rank 0": (text, strings(*WORDS), nothing_on_rank_0),
        "table": (layers.Normalization, TABLE, mine),
        "table in batches": (layers.Normalization, TABLE, lambda data: dataset(mine(data))),
        "one mean": (lambda: layers.Normalization(axis=None), TABLE[:, 0], mine),
        "two axes": (lambda: layers.Normalization(axis=(1, 3)), TABLE[:32].reshape(4, 2, 4, 3), mine),
        "table, none on rank 0": (layers.Normalization, TABLE, nothing_on_rank_0),
        "bins": (lambda: layers.Discretization(num_bins=4), LONG[:90], mine),
        "bins, none on rank 0": (lambda: layers.Discretization(num_bins=4), LONG[:90], nothing_on_rank_0),
    }
    if not KERAS_3:  # tf_keras uses batches of 32 rows, and one row of text is not a batch
        found.pop("documents of lookups")
    return found


@check
def together() -> dict[str, Any]:
    """Learned state from all ranks' data, and from the whole data on one process."""
    found = {}
    for name, (make, data, give) in cases().items():
        layer, one = make(), make()
        hvd.adapt(layer, give(data))
        one.adapt(tf.constant(data.tolist()) if data.dtype == object and KERAS_3 else data)
        found[name] = [knows(layer), knows(one)]
    return found


@check
def quantiles() -> dict[str, Any]:
    """Deviation of the fractions of values below boundaries from equal ones: on all ranks, and on one process."""
    layer, one = (layers.Discretization(num_bins=8) for _ in range(2))
    hvd.adapt(layer, dataset(mine(LONG), 700))
    one.adapt(LONG)

    def off(made: Any) -> float:
        shares = np.searchsorted(np.sort(LONG), made.bin_boundaries) / len(LONG)
        return float(np.abs(shares - np.arange(1, 8) / 8).max())

    return {"together": off(layer), "one": off(one), "boundaries": list(map(float, layer.bin_boundaries))}


@check
def spaces() -> list[Any]:
    """Learned state of a `FeatureSpace`'s layers, also without data on rank 1, and on one process."""
    features = {"number": "float_normalized", "word": "string_categorical", "bin": "float_discretized"}
    data = {"number": TABLE[:, 0], "word": strings(*[WORDS[row % 5] for row in range(37)]), "bin": LONG[:37]}

    def made() -> Any:
        return keras.utils.FeatureSpace(features=features, output_mode="concat", num_discretization_bins=3)

    def learned(space: Any) -> Any:
        return [knows(space.preprocessors[name]) for name in features]

    space, other, one = made(), made(), made()
    hvd.adapt(space, dataset({name: mine(column) for name, column in data.items()}))
    hvd.adapt(other, dataset(data).take(0) if hvd.rank() else data)
    one.adapt(dataset(data, 37))
    row = {name: column[:1] for name, column in data.items()}
    difference = float(np.abs(np.asarray(space(row)) - np.asarray(one(row))).max())
    return [learned(space), learned(other), learned(one), difference]


def mistake(act: Callable[[], Any]) -> str:
    try:
        act()
    except hvd.HvkerasError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Own(layers.Normalization):  # type: ignore[misc,name-defined]
    def adapt(self, data: Any) -> None:
        super().adapt(data)


@check
def refused() -> dict[str, str]:
    return {
        "dense": mistake(lambda: hvd.adapt(layers.Dense(2), TABLE)),
        "own": mistake(lambda: hvd.adapt(Own(), TABLE)),
        "given": mistake(lambda: hvd.adapt(layers.StringLookup(vocabulary=["a"]), strings("a"))),
        "given mean": mistake(lambda: hvd.adapt(layers.Normalization(mean=1.0, variance=1.0), TABLE)),
        "no data": mistake(lambda: hvd.adapt(layers.StringLookup(), None)),
        "space": mistake(lambda: hvd.adapt(keras.utils.FeatureSpace(features={"word": "string_categorical"}), TABLE)),
        "samples": mistake(lambda: hvd.adapt(layers.Normalization(), TABLE[:, 0])),
        "shapes": mistake(lambda: hvd.adapt(layers.Normalization(), TABLE[:, hvd.rank():])),
        "order": mistake(lambda: hvd.adapt(layers.StringLookup() if hvd.rank() else layers.IntegerLookup(),
                                           strings("a") if hvd.rank() else np.array([[1]]))),
    }


def model(seed: int = 1) -> Any:
    """Return a model with one layer of each kind, one of them nested."""
    keras.utils.set_random_seed(seed)
    number, word, size = keras.Input((3,)), keras.Input((1,), dtype="string"), keras.Input((1,))
    inner = keras.Sequential([keras.Input((3,)), layers.Normalization(name="inner")])
    parts = [inner(number), layers.TextVectorization(output_sequence_length=2, name="text")(word),
             layers.StringLookup(name="word", output_mode="tf_idf", max_tokens=8, pad_to_max_tokens=True)(word),
             layers.Discretization(num_bins=3, name="bins")(size)]
    joined = layers.Concatenate()([tf.cast(part, "float32") if not KERAS_3 else keras.ops.cast(part, "float32")
                                   for part in parts])
    return keras.Model([number, word, size], layers.Dense(1)(joined))


def inputs() -> list[Any]:
    return [tf.constant(TABLE[:8]), tf.constant([[word] for word in WORDS]), tf.constant(LONG[:8, None])]


def adapted(by: int, made: Any = None) -> Any:
    """Return a model whose layers are adapted to data that depend on `by`."""
    made = made or model()
    for name in () if KERAS_3 else ("text", "word", "bins"):
        made.get_layer(name).compile(run_eagerly=True)  # faster than tracing
    inner = next(part for part in made.layers if isinstance(part, keras.Sequential))
    inner.layers[-1].adapt(TABLE[by::2])
    made.get_layer("text").adapt(tf.constant(WORDS[by::2]))
    made.get_layer("word").adapt(tf.constant([row.split() for row in ("b e", "c a", "d b")][by : by + 2]))
    made.get_layer("bins").adapt(LONG[by * 50 : by * 50 + 40])
    return made


def compiled(made: Any, **options: Any) -> Any:
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3)), "mse", **options)
    return made


def fit(made: Any, *callbacks: Any) -> Any:
    data = tf.data.Dataset.from_tensor_slices((tuple(inputs()), np.ones((8, 1), "float32"))).batch(4)
    return made.fit(data, verbose=0, callbacks=list(callbacks)).history.get("loss")


def outputs(made: Any) -> Any:
    return np.asarray(made(inputs())).ravel().tolist()


@check
def given_by_the_root() -> dict[str, Any]:
    """Outputs after the broadcast to ranks with different layers; and of rank 1's model before it."""
    made = compiled(adapted(hvd.rank()))
    before = outputs(made)
    made.optimizer.learning_rate = 0.0
    own = made.predict(tuple(inputs()), verbose=0).ravel().tolist()  # traced with the old tables
    first = fit(made, hvd.callbacks.BroadcastGlobalVariablesCallback(1))
    predicted = made.predict(tuple(inputs()), verbose=0).ravel().tolist()
    after = outputs(made)
    again = fit(adapted_again := adapted(1 - hvd.rank(), made), hvd.callbacks.BroadcastGlobalVariablesCallback(1))
    root_alone = compiled(model() if hvd.rank() else adapted(0), run_eagerly=True)
    root_alone.optimizer.learning_rate = 0.0
    fit(root_alone, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    return {"before": before, "after": after, "predicted": [own, predicted], "losses": [first, again],
            "again": [outputs(adapted_again), outputs(adapted(0))],
            "root alone": [outputs(root_alone), outputs(adapted(0))]}


@check
def given_by_other_ways() -> dict[str, Any]:
    """Outputs after restoring a backup, without an input shape, and after a loop's broadcast in tf_keras."""
    found = {}
    if KERAS_3:
        made, backup = compiled(adapted(0), run_eagerly=True), hvd.callbacks.BackupAndRestore
        fit(made, backup("backup", delete_checkpoint=False))
        restored = compiled(adapted(hvd.rank()), run_eagerly=True)
        fit(restored, backup("backup"))
        found = {"truth": outputs(made), "restored": outputs(restored)}
    layer = layers.Normalization()
    layer.adapt(TABLE[hvd.rank() :: 2])
    late = compiled(keras.Sequential([layer, layers.Dense(1)]), run_eagerly=True)
    late.fit(TABLE, TABLE[:, :1], verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
    found["late"] = np.asarray(layer(TABLE[:4])).ravel().tolist()
    if not KERAS_3:
        looped = adapted(hvd.rank())
        hvd.broadcast_variables(looped.variables, 0)
        words = [looped.get_layer("text").get_vocabulary(), looped.get_layer("word").get_vocabulary()]
        truly = adapted(0)
        found["loop"] = [words, [truly.get_layer("text").get_vocabulary(), truly.get_layer("word").get_vocabulary()]]
    return found


@check
def kept_by_a_state() -> dict[str, Any]:
    """Outputs after a sync from rank 0, after a restore, and from a commit in another process."""
    made = compiled(adapted(hvd.rank()))
    state = hvd.elastic.TensorFlowKerasState(made, epoch=0)
    state.sync()
    synced = outputs(made)
    saved = pickle.loads(pickle.dumps(state.saved()))
    adapted(1, made)
    changed = outputs(made)
    state.restore()
    other = compiled(adapted(1, model(seed=2)))
    taker = hvd.elastic.TensorFlowKerasState(other, epoch=0)
    taker.take(saved)
    taker.restore()
    return {"truth": outputs(adapted(0)), "synced": synced, "changed": changed, "restored": outputs(made),
            "taken": outputs(other)}


@check
def guarded() -> dict[str, Any]:
    """Result of `fit` with a layer that differs between ranks, and with one that differs by rounding."""
    found, made = {}, compiled(adapted(0), run_eagerly=True)
    others = {layer.name: layer for layer in adapted(hvd.rank())._flatten_layers()}
    mine = {layer.name: layer for layer in made._flatten_layers()}
    for name in ("inner", "text", "word", "bins"):
        computed = {key: vars(mine[name])[key] for key in (
            "mean", "variance", "bin_boundaries", "_lookup_layer", "lookup_table", "idf_weights_const")
            if key in vars(mine[name])}
        vars(mine[name]).update({key: vars(others[name])[key] for key in computed})
        found[name] = mistake(lambda: fit(made))
        vars(mine[name]).update(computed)
    swapped = {"_lookup_layer": mine["text"]._lookup_layer}
    vars(mine["text"])["_lookup_layer"] = others["text"]._lookup_layer
    as_horovod.install()
    found["as Horovod"] = mistake(lambda: fit(made))
    as_horovod.uninstall()
    vars(mine["text"]).update(swapped)
    mine["inner"].mean = mine["inner"].mean * (1 + 1e-7 * hvd.rank())
    found["near"] = mistake(lambda: fit(made))
    wide = {0: ["a", "b"], 1: ["a", "b", "c"]}[hvd.rank()]
    made = compiled(keras.Sequential([keras.Input((1,), dtype="string"), layers.StringLookup(
        vocabulary=wide, output_mode="multi_hot", name="wide")]), run_eagerly=True)
    found["width"] = mistake(lambda: fit_words(made))
    made = compiled(keras.Sequential([keras.Input((1,), dtype="string"), layers.StringLookup(
        vocabulary=wide, name="wide"), layers.Embedding(len(wide) + 1, 2)]), run_eagerly=True)
    found["embedding"] = mistake(lambda: fit_words(made))
    return found


def fit_words(made: Any) -> None:
    made.fit(tf.constant([["a"], ["b"]]), np.ones((2, 4), "float32"), verbose=0,
             callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)
