"""Data assigned to ranks, and messages if ranks have different data."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras.data.pipeline import stage_name, stages
from hvkeras.data.shuffles import reseeded
from hvkeras.job.session import current_session

keras: Any = tf.keras
Dataset = tf.data.Dataset
PyDataset = getattr(keras.utils, "PyDataset", None) or keras.utils.Sequence
COUNT = 43


class Numbers(PyDataset):  # type: ignore[misc, valid-type]
    """Batches of rows whose first feature is their number, in an order that may change at the end of an epoch."""

    def __init__(self, count: int = COUNT, shuffle: Callable[[Any], None] | None = None, start: Any = None) -> None:
        super().__init__()
        self.order, self.shuffle = np.arange(count) if start is None else start, shuffle
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return (len(self.order) + 3) // 4

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        ids = self.order[index * 4 : index * 4 + 4]
        return np.stack([ids, ids], 1).astype("float32"), np.ones((len(ids), 1), "float32")


class Shuffling(Numbers):
    """The same, with its own `on_epoch_end`."""

    def on_epoch_end(self) -> None:
        self.shuffle(self.order)


class Watched(keras.Model):  # type: ignore[misc]
    """Model that records the numbers of the rows of each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
        self.seen: list[list[int]] = []

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        self.seen.append(data[0][:, 0].numpy().astype(int).tolist())
        return super().train_step(data)


def steps_of_fit(data: Any, y: Any = None, epochs: int = 1, **options: Any) -> list[list[list[int]]]:
    """Return the rows of each step of each epoch of a `fit`."""
    model = Watched()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", run_eagerly=True)
    found = []
    for _ in range(epochs):
        model.fit(data, y, verbose=0, **options)
        found.append(model.seen)
        model.seen = []
    return found


def steps_of_reading(dataset: Any, epochs: int = 1) -> list[list[list[int]]]:
    """Return the same without `fit`."""
    return [[batch[:, 0].numpy().astype(int).tolist() for batch, _ in dataset] for _ in range(epochs)]


@check
def arrays() -> dict[str, Any]:
    """The rows of two epochs of training, and those of evaluation and of a common permutation."""
    x = np.stack([np.arange(COUNT)] * 2, 1).astype("float32")
    mine, y = hvd.shard((x, np.ones((COUNT, 1))))
    return {"steps": steps_of_fit(mine, y, 2, batch_size=4),
            "evaluation": hvd.shard({"x": x}, training=False)["x"][:, 0],
            "shuffled": hvd.shard(tf.constant(x), shuffle=True, seed=7)[:, 0]}


def generated() -> Any:
    return Dataset.from_generator(lambda: iter(range(COUNT)), output_signature=tf.TensorSpec([], tf.int64))


def features(samples: Any) -> Any:
    return samples.map(lambda number: (tf.cast([number, number], tf.float32), tf.ones([1])))


@check
def datasets() -> dict[str, Any]:
    """The rows of each step: of samples shuffled after sharding, of a generator, and of whole batches."""
    samples = features(Dataset.range(COUNT))
    rows = Dataset.from_generator(
        lambda: ((np.array([number, number], "float32"), np.ones(1)) for number in range(COUNT)),
        output_signature=(tf.TensorSpec([2]), tf.TensorSpec([1])))
    return {
        "samples": steps_of_fit(hvd.shard(samples, shuffle=100).batch(4), epochs=2),
        "batches": steps_of_fit(hvd.shard(samples.batch(12).prefetch(1))),
        "generator": steps_of_reading(hvd.shard(features(generated())).batch(4)),
        "generated rows": steps_of_reading(hvd.shard(rows, batched=False).batch(4)),
        "shuffled before": steps_of_reading(hvd.shard(samples.shuffle(100, seed=3).batch(12)), epochs=2),
        "evaluation": steps_of_reading(hvd.shard(samples.batch(12), training=False)),
        **shuffled_before(),
    }


def shuffled_before() -> dict[str, Any]:
    """The rows of shuffles without a seed, and with another one on each rank."""
    unseeded = features(Dataset.range(COUNT).shuffle(20)).batch(12).prefetch(1)
    filtered = features(Dataset.range(2 * COUNT).shuffle(20).filter(lambda number: number < COUNT)).batch(12)
    keras.utils.set_random_seed(1 + hvd.rank())
    seeded_apart = features(Dataset.range(COUNT).shuffle(20).shuffle(COUNT, seed=hvd.rank()))
    tf.random.set_seed(None)
    return {
        "shuffled without a seed": steps_of_fit(hvd.shard(unseeded), epochs=3),
        "shuffled and filtered": steps_of_reading(hvd.shard(filtered), epochs=2),
        "shuffled with other seeds": steps_of_reading(hvd.shard(seeded_apart.batch(12)), epochs=3),
        "shuffled samples": steps_of_reading(hvd.shard(seeded_apart).batch(4), epochs=2),
        "evaluation of shuffled batches": steps_of_reading(hvd.shard(unseeded, training=False)),
    }


@check
def trained_on_shuffled_batches() -> dict[str, list[float]]:
    """Weights and losses of ranks after a fit, and of one process that reads the batches in the same order."""
    x = np.random.default_rng(5).normal(size=(48, 2)).astype("float32")
    dataset = Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(30).map(
        lambda row, label: (row * 2, label), num_parallel_calls=2).batch(12).prefetch(1)

    def learned(data: Any, optimizer: Any) -> list[float]:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer, "mse")
        losses = model.fit(data, epochs=3, verbose=0).history["loss"]
        return [*np.ravel(model.get_weights()[0]).tolist(), *losses]

    share = hvd.shard(dataset)
    seeds = [(int(stage._seed), int(stage._seed2)) for stage in stages(share) if stage_name(stage) == "Shuffle"]
    found = learned(share, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    shuffle = next(stage for stage in stages(dataset) if stage_name(stage) == "Shuffle")
    with hvd.alone():
        truth = learned(reseeded(dataset, {id(shuffle): seeds[0]}), keras.optimizers.SGD(0.1))
    return {"found": found, "truth": truth}


@check
def sequences() -> dict[str, Any]:
    """The rows of each step, unshuffled and shuffled at each epoch's end; and the loaded batches."""
    plain = Numbers()
    found = {"shuffled by fit": steps_of_fit(hvd.shard(plain), epochs=2)}
    by_numpy = hvd.shard(Shuffling(shuffle=np.random.shuffle))
    evaluation = hvd.shard(Numbers(), training=False)
    np.random.seed(hvd.rank())
    before = np.random.get_state()[1].tolist()
    found["shuffled by itself"] = steps_of_fit(by_numpy, epochs=3, shuffle=False)
    found["keeps the global state"] = before == np.random.get_state()[1].tolist()
    found["loaded"] = sorted(set(plain.loaded))
    found["evaluation"] = [row for index in range(len(evaluation)) for row in evaluation[index][0][:, 0]]
    return found


class Graphs(PyDataset):  # type: ignore[misc, valid-type]
    """Elements that are not batches: graphs of `2 + 3 (i mod 3)` nodes with labels, and the graph's number."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        x = np.random.default_rng(index).normal(size=(2 + 3 * (index % 3), 2)).astype("float32")
        return {"nodes": x, "of_graph": np.asarray([index], "int32")}, x.sum(1, keepdims=True) * index


class OfNodes(keras.layers.Layer):  # type: ignore[misc]
    def call(self, inputs: Any) -> Any:
        return inputs["nodes"] + 0.0 * tf.cast(tf.reduce_sum(inputs["of_graph"]), tf.float32)


def of_nodes(optimizer: Any, reduction: str = "sum_over_batch_size") -> Any:
    inputs = {"nodes": keras.Input((2,), name="nodes"), "of_graph": keras.Input((), dtype="int32", name="of_graph")}
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Model(inputs, dense(OfNodes()(inputs)))
    model.compile(optimizer, keras.losses.MeanSquaredError(reduction=reduction), metrics=["mae"])
    return model


def graphs(count: int) -> Any:
    data = Graphs(count)
    signature = ({"nodes": tf.TensorSpec([None, 2]), "of_graph": tf.TensorSpec([None], tf.int32)},
                 tf.TensorSpec([None, 1]))
    return Dataset.from_generator(lambda: (data[index] for index in range(count)), output_signature=signature).apply(
        tf.data.experimental.assert_cardinality(count))


@check
def whole_elements() -> dict[str, Any]:
    """Results of ranks on elements with different numbers of rows, and of one process on those of each step."""
    size = hvd.size()
    count, data = 3 * size + 1, Graphs(3 * size + 1)  # training drops the last one

    def steps() -> Any:
        for step in range(3):
            parts = [data[step * size + rank] for rank in range(size)]
            x, y = ([part[index] for part in parts] for index in (0, 1))
            yield {name: np.concatenate([one[name] for one in x]) for name in ("nodes", "of_graph")}, np.concatenate(y)

    def learned(model: Any, given: Any, evaluated: Any) -> list[float]:
        history = model.fit(given, epochs=2, shuffle=False, verbose=0).history
        weights = [float(value) for weight in model.get_weights() for value in np.ravel(weight)]
        return [*weights, *history["loss"], *history["mae"], *model.evaluate(evaluated, verbose=0)]

    found, truth = {}, {}
    for name, whole, reduction in (("dataset", graphs(count), "sum_over_batch_size"), ("sequence", data, "sum")):
        rate = 0.01 if name == "dataset" else 0.0001
        given, evaluated = hvd.shard(whole, by="elements"), hvd.shard(whole, training=False, by="elements")
        given = given.prefetch(1) if name == "dataset" else given
        mine = of_nodes(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), reduction)
        found[name] = learned(mine, given, evaluated)
        with hvd.alone():
            one = graphs(count)
            in_steps = Dataset.from_generator(steps, output_signature=one.element_spec).apply(
                tf.data.experimental.assert_cardinality(3))
            truth[name] = learned(of_nodes(keras.optimizers.SGD(rate), reduction), in_steps, one)
    model, few = of_nodes("sgd"), hvd.shard(graphs(1), training=False, by="elements")
    with hvd.alone():
        one_graph = model.evaluate(graphs(1), verbose=0)
    together, alone = hvd.predict(model, graphs(count)), model.predict(graphs(count), verbose=0)
    return {"found": found, "truth": truth,
            "predicted": together.shape == alone.shape and float(np.abs(together - alone).max()),
            "few": model.evaluate(few, verbose=0), "few truth": one_graph}


@check
def unlike_numbers_of_rows() -> dict[str, Any]:
    """The first rows and the numbers of rows of each array in each step, and the message about split batches."""
    size = hvd.size()
    labelled, unlabelled = Dataset.range(9 * size), Dataset.range(1000)
    shares = {
        "in ratio": hvd.shard(Dataset.zip((labelled.batch(4 * size), unlabelled.take(27 * size).batch(12 * size)))),
        "mapped": hvd.shard(Dataset.zip((labelled.batch(4 * size), unlabelled.batch(12 * size))).map(
            lambda few, many: {"few": few, "many": many})),
        "to evaluate": hvd.shard(Dataset.zip((labelled.skip(9 * size - 1).batch(size), unlabelled.batch(3 * size))),
                                 training=False),
    }
    later = Dataset.from_generator(lambda: ((np.ones(8), np.ones(rows)) for rows in (8, 8, 5)),
                                   output_signature=(tf.TensorSpec([None]), tf.TensorSpec([None])))
    read = {name: [[[int(leaf[0]) if len(leaf) else -1, len(leaf)] for leaf in tf.nest.flatten(element)]
                   for element in share] for name, share in shares.items()}
    return {**read, "lengths": [int(share.cardinality()) for share in shares.values()],
            "torn": error_of(lambda: list(hvd.shard(later, batched=True)))}


def error_of(function: Callable[[], Any]) -> list[str]:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - the class is what the test looks at
        return [type(error).__name__, str(error)]
    return ["", "no error"]


def twice(row: Any) -> Any:
    return row * 2


@check
def errors() -> dict[str, list[str]]:
    """The error of each misuse."""
    x, rank, size = np.arange(24.0)[:, None], hvd.rank(), hvd.size()
    own = np.random.default_rng(rank)
    in_own_order = own.permutation(24)
    samples = Dataset.range(24)
    unseeded = samples.shuffle(24, seed=None if rank else 3)

    def broken() -> Any:
        yield 1
        raise OSError("the disk is full")

    one_broken = Dataset.from_generator(broken if rank == 1 else lambda: iter(range(24)),
                                        output_signature=tf.TensorSpec([], tf.int64))
    of_unknown_batches = Dataset.from_generator(lambda: iter([[1.0]]), output_signature=tf.TensorSpec([None]))
    misuses: dict[str, Callable[[], Any]] = {
        "different lengths": lambda: hvd.shard(x[: 12 + rank]),
        "sharded before": lambda: hvd.shard(x[rank::size]),
        "shuffled before": lambda: hvd.shard(own.permutation(x)),
        "different arguments": lambda: hvd.shard(x, training=rank == 0),
        "two arguments": lambda: hvd.shard(x, x),
        "dataset sharded before": lambda: hvd.shard(samples.shard(size, rank).take(6)),
        "shuffle before an unknown stage": lambda: hvd.shard(unseeded.ignore_errors().map(twice).batch(8)),
        "more shuffles on a rank": lambda: hvd.shard(samples.shuffle(24) if rank else samples),
        "random filter": lambda: hvd.shard(samples.filter(lambda row: tf.random.uniform([]) < 0.5)),
        "generator shuffled apart": lambda: hvd.shard(Dataset.from_generator(
            lambda: iter(in_own_order), output_signature=tf.TensorSpec([], tf.int64)).shuffle(4).batch(8)),
        "unordered": lambda: hvd.shard(samples.map(lambda row: row, num_parallel_calls=2, deterministic=False)),
        "unknown batches": lambda: hvd.shard(of_unknown_batches),
        "shuffled batches": lambda: hvd.shard(samples.batch(8), shuffle=8),
        "shuffle without a buffer": lambda: hvd.shard(samples, shuffle=True),
        "reading fails on rank 1": lambda: hvd.shard(one_broken),
        "too few": lambda: hvd.shard(x[: size - 1]),
        "sequence in another order": lambda: hvd.shard(Numbers(start=own.permutation(24))),
        "sequence of another length": lambda: hvd.shard(Numbers(24 + 4 * rank)),
        "sequence shuffled apart": lambda: steps_of_fit(hvd.shard(Shuffling(24, own.shuffle))),
        "graphs as batches": lambda: hvd.shard(graphs(size), batched=True),
        "graphs in a sequence": lambda: hvd.shard(Graphs(size)),
        "views": lambda: hvd.shard(samples.batch(8).map(lambda rows: (rows, tf.tile(rows, [3])))),
        "no ratio for the ranks": lambda: hvd.shard(Dataset.zip((samples.batch(7), samples.batch(8)))),
        "arrays by elements": lambda: hvd.shard(x, by="elements"),
        "by something else": lambda: hvd.shard(x, by="files"),
        "fewer elements than ranks": lambda: hvd.shard(graphs(size - 1), by="elements"),
        "fewer batches than ranks": lambda: hvd.shard(Graphs(size - 1), training=False, by="elements"),
        "predict of parts": lambda: hvd.predict(small_model(), x[rank::size]),
        "predict of other lengths": lambda: hvd.predict(small_model(), Numbers(24 + 4 * rank)),
        "predict fails on rank 1": lambda: hvd.predict(small_model(fail=rank == 1), np.ones((70, 2))),
        "predict without end": lambda: hvd.predict(small_model(), samples.batch(2).repeat()),
    }
    return {name: error_of(misuse) for name, misuse in misuses.items()}


@check
def what_is_random_at_every_reading() -> list[float]:
    """Random features are ignored if something else can be compared; entirely random data pass."""
    own = np.random.default_rng(hvd.rank())
    augmented = Dataset.range(24).map(lambda row: (row, tf.numpy_function(own.random, [], tf.float64)))
    noise = Dataset.range(24).map(lambda row: tf.numpy_function(own.random, [], tf.float64))
    found = [float(row) for row, _ in hvd.shard(augmented)]
    hvd.shard(noise.map(lambda value: tf.ensure_shape(value, [])))
    return found


@check
def some_ranks_only() -> list[int] | None:
    """The rows of ranks 0 and 1 when only they share the data."""
    pair = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.global_process_set
    found = hvd.shard(np.arange(7), process_set=pair).tolist() if pair.included() else None
    hvd.remove_process_set(pair)
    return found


@check
def forked_process() -> int | None:
    """The exit code of a forked process that gets SIGTERM, like workers of a `PyDataset`; the job must continue."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(timeout=10)
    return process.exitcode


@check
def forked_pool() -> dict[str, Any]:
    """Results of a pool of forked processes; at the fork, threads of the rank hold hvkeras's locks."""
    control = current_session().control
    with control._connection._sending, control._exchange._changed:
        pool = multiprocessing.get_context("fork").Pool(2)
        failing = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
        failing.start()
    failing.join(timeout=20)
    with pool:
        indices = pool.starmap_async(where, [()] * 4).get(timeout=20)
        refusal = pool.apply_async(refused).get(timeout=20)
        pool.close()
        pool.join()
    return {"places": indices, "refusal": refusal, "failing": failing.exitcode}


def where() -> list[int]:
    return [hvd.rank(), hvd.size()]


def refused() -> str:
    """Return the error of a collective in a forked process."""
    try:
        hvd.broadcast_object(1)
    except hvd.UsageError as error:
        return str(error)
    return ""


def small_model(fail: bool = False) -> Any:
    """Return a model with two outputs and the same weights on every rank."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((2,))
    dense = keras.layers.Dense(3, activation="tanh")(inputs)
    model = keras.Model(inputs, {"wide": dense, "narrow": keras.layers.Dense(1)(dense)})
    if fail:
        model.predict = lambda *_, **__: 1 / 0
    return model


@check
def predictions() -> dict[str, list[float]]:
    """Differences of distributed predictions from one process, for each output."""
    model = small_model()
    x = np.random.default_rng(0).normal(size=(70, 2)).astype("float32")
    uneven = Dataset.from_generator(lambda: (x[start : start + 1 + start % 5] for start in range(0, 35, 3)),
                                    output_signature=tf.TensorSpec([None, 2]))
    labelled = Dataset.from_tensor_slices((x, np.ones(70))).batch(9)
    forms = {
        "arrays": (x, {}), "tensors": (tf.constant(x), {"batch_size": 7}), "fewer batches than ranks": (x[:20], {}),
        "one row": (x[:1], {}), "dataset": (labelled, {}), "uneven dataset": (uneven, {}),
        "one batch": (labelled.take(1), {}), "sequence": (Numbers(), {}), "one batch of a sequence": (Numbers(3), {}),
    }
    found = {}
    for name, (data, options) in forms.items():
        together, alone = hvd.predict(model, data, **options), model.predict(data, verbose=0, **options)
        found[name] = [float(np.max(np.abs(together[key] - alone[key]))) if together[key].shape == alone[key].shape
                       else np.inf for key in ("wide", "narrow")]
    return found


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)
