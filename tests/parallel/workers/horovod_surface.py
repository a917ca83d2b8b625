"""Horovod's features besides the plain collectives; each check returns a value that the test compares."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
import hvkeras.tensorflow as hvd_tf
import hvkeras.tensorflow.mpi_ops
from harness.checks import check, run_checks
from hvkeras import compat
from hvkeras.job.process_sets import process_set_of

keras: Any = tf.keras
LENGTHS = (1, 5, 64)


def vectors(rank: int, dtype: str = "float32") -> list[Any]:
    """Return a rank's tensors for Adasum: some equal on all ranks, some different, one zero on rank 0."""
    random = np.random.default_rng(17 + rank)
    alike = np.random.default_rng(3).normal(size=(4, 3))
    mixed = [random.normal(size=length) for length in LENGTHS]
    return [each.astype(dtype) for each in [alike, *mixed, np.zeros(7) if rank == 0 else random.normal(size=7)]]


def adasum(*each: Any) -> Any:
    """Return Adasum by the published rule, starting with pairs, in double precision."""
    if len(each) == 1:
        return each[0]
    middle = len(each) // 2
    one, other = adasum(*each[:middle]), adasum(*each[middle:])
    dot = np.sum(one * other)

    def weight(vector: Any) -> Any:
        square = np.sum(vector * vector)
        return 1.0 - dot / (2.0 * square) if square else 1.0

    return weight(one) * one + weight(other) * other


def furthest(found: Any, expected: Any) -> float:
    return max(float(np.max(np.abs(np.asarray(one, np.float64) - other))) for one, other in
               zip(found, expected, strict=True))


@check
def adasum_of_tensors() -> Any:
    if hvd.size() & (hvd.size() - 1):
        return {}
    mine = vectors(hvd.rank())
    expected = [adasum(*(part.astype("float64") for part in parts))
                for parts in zip(*(vectors(rank) for rank in range(hvd.size())), strict=True)]
    one_by_one = [hvd.allreduce(part, op=hvd.Adasum) for part in mine]
    grouped = hvd.grouped_allreduce(mine, op=hvd.Adasum)
    graph = tf.function(lambda: hvd.grouped_allreduce(mine, op=hvd.Adasum))()
    double = [hvd.allreduce(part.astype("float64"), op=hvd.Adasum) for part in mine]
    half = [hvd.allreduce(part.astype("float16"), op=hvd.Adasum) for part in mine]
    return {"one by one": furthest(one_by_one, expected), "grouped": furthest(grouped, expected),
            "in a graph": furthest(graph, expected), "double": furthest(double, expected),
            "half": furthest(half, expected), "dtype": half[0].dtype.name, "shape": list(one_by_one[0].shape),
            "postscaled": furthest([hvd.allreduce(mine[1], op=hvd.Adasum, postscale_factor=2.0)], [2 * expected[1]])}


@check
def adasum_of_gradients() -> Any:
    if hvd.size() & (hvd.size() - 1):
        return {}
    variables = [tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([2, 2]))]
    random = np.random.default_rng(5)
    slopes = random.normal(size=(hvd.size(), 7)).astype("float32")

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = (tf.reduce_sum(variables[0] * slopes[hvd.rank(), :3])
                    + tf.reduce_sum(tf.reshape(variables[1], [-1]) * slopes[hvd.rank(), 3:]))
        return hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, variables)

    expected = [adasum(*slopes[:, :3].astype("float64")), adasum(*slopes[:, 3:].astype("float64")).reshape(2, 2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
    optimizer.apply_gradients(zip([slopes[hvd.rank(), :3], slopes[hvd.rank(), 3:].reshape(2, 2)], variables,
                                  strict=True))
    return {"tape": furthest(tf.function(gradients)(), expected),
            "optimizer": furthest([-variable.numpy() for variable in variables], expected)}


@check
def adasum_refusals() -> Any:
    def refusal(function: Any) -> Any:
        try:
            function()
        except hvd.HvkerasError as error:
            return [type(error).__name__, str(error)]
        return None

    sparse = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    set_of_three = hvd.add_process_set(range(3)) if hvd.size() > 3 else None
    return {
        "integers": refusal(lambda: hvd.allreduce(tf.constant([1]), op=hvd.Adasum)),
        "slices": refusal(lambda: hvd.allreduce(sparse, op=hvd.Adasum)),
        "three ranks": refusal(lambda: hvd.allreduce(1.0, op=hvd.Adasum, process_set=set_of_three))
        if set_of_three is not None and set_of_three.included() else None,
    }


@check
def numbers_as_operations() -> Any:
    try:
        hvd.add_process_set(range(hvd.size()))
    except hvd.UsageError as error:
        all_ranks = str(error)
    pair = hvd.add_process_set([0, 1][: hvd.size() // 2])
    number = pair.process_set_id

    @tf.function
    def asked() -> Any:
        return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.size_op(number),
                hvd.process_set_included_op(number), hvd.process_set_included_op()]

    in_graph = [int(each) for each in asked()]
    eager = [int(each) for each in (hvd.rank_op(), hvd.size_op(), hvd.size_op(number, name="pair"))]
    try:
        hvd.size_op(99)
    except hvd.UsageError as error:
        return [in_graph, eager, pair.included(), str(error), all_ranks]
    return None


@check
def steps_of_a_process_set() -> Any:
    """Gradients on each rank if the optimizer or tape has the process set of the check above."""
    first, slope = process_set_of(hvd.size() // 4 + 1), hvd.rank() + 1.0
    weight = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=first)
    optimizer.apply_gradients([(tf.constant(slope), weight)])
    model = keras.Sequential([keras.layers.Input((1,)),
                              keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), process_set=first), loss="mse")
    model.fit(np.ones((2, 1)), np.full((2, 1), -slope), batch_size=2, verbose=0)

    @tf.function
    def in_graph() -> Any:
        with tf.GradientTape() as tape:
            loss = weight * slope
        return -hvd.DistributedGradientTape(tape, process_set=first).gradient(loss, weight)

    with tf.Graph().as_default():
        other = tf.compat.v1.get_variable("other", initializer=tf.constant(0.0))
        of_session = hvd_tf.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), process_set=first)
        train = of_session.minimize(other * slope)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(train)
            trained = float(session.run(other))
    steps = [float(weight), float(in_graph()), *model.get_weights()[0][0].tolist()]
    return [first.included(), first.ranks, steps, trained]


@check
def second_init() -> Any:
    first, new = process_set_of(hvd.size() // 4 + 1), hvd.ProcessSet([1])
    before = first.process_set_id
    hvd.init(process_sets=[first, new])
    try:
        hvd.init(process_sets=[hvd.ProcessSet([1])])
    except hvd.UsageError as error:
        also = hvd_tf.mpi_ops._basics._process_set_size(new.process_set_id)
        return [before == first.process_set_id, new.size(), also, str(error)]
    return None


@check
def groups_of_gathers() -> Any:
    return [part.numpy().tolist() for part in
            hvd_tf.grouped_allgather([tf.fill([hvd.rank() + 1], hvd.rank()), tf.constant([[1.0, 2.0]])], name="group")]


@check
def variables_from_the_root() -> Any:
    variables = [tf.Variable([float(hvd.rank())]), tf.Variable([[hvd.rank()]])]
    returned = hvd.broadcast_(variables, root_rank=1)
    eager = [variable.numpy().tolist() for variable in returned]
    other = tf.Variable(float(hvd.rank()))
    graph = [value.numpy() for value in tf.function(lambda: hvd.broadcast_([other], 1, name="other"))()]
    share = hvd.broadcast_object_fn(root_rank=1)
    return [eager, graph, float(other), share({"rank": hvd.rank()})]


@check
def session_of_tensorflow_1() -> Any:
    with tf.Graph().as_default():
        weights = tf.compat.v1.get_variable("weights", initializer=tf.constant([1.0, 2.0]) * (hvd.rank() + 1))
        try:
            total = hvd.allreduce(weights.read_value(), op=hvd.Sum)
        except hvd.UnsupportedError as error:
            return str(error)
        rank = hvd.rank_op()
        shared = hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1)
        hooks = [hvd_tf.BroadcastGlobalVariablesHook(1)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            return [session.run(weights).tolist(), session.run(total).tolist(), session.run(total).tolist(),
                    int(session.run(rank)), shared]


def optimizer_of_tensorflow_1() -> Any:
    return hvd_tf.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))


@check
def training_of_tensorflow_1_in_eager_mode() -> Any:
    """The weights after two SGD steps with this rank's gradient."""
    weights = tf.Variable([1.0, 2.0])
    optimizer = optimizer_of_tensorflow_1()
    for _ in range(2):
        optimizer.minimize(lambda: tf.reduce_sum(weights) * (hvd.rank() + 1.0))
    return weights


@check
def training_of_tensorflow_1_in_a_session() -> Any:
    """The same, and an embedding table of which each rank uses one row."""
    with tf.Graph().as_default():
        weights = tf.compat.v1.get_variable("weights", initializer=tf.constant([1.0, 2.0]))
        table = tf.compat.v1.get_variable("table", initializer=tf.ones([3, 2]))
        loss = tf.reduce_sum(weights) * (hvd.rank() + 1.0) + tf.reduce_sum(tf.gather(table, [hvd.rank() % 3]))
        try:
            train = optimizer_of_tensorflow_1().minimize(loss)
        except hvd.UnsupportedError as error:
            return str(error)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(2):
                session.run(train)
            return [session.run(weights), session.run(table)]


def steps_of_a_loop(optimizer: Any, way: str, applied: dict[str, bool]) -> Any:
    """Return the gradients in two steps of a TensorFlow 2.4 custom loop, and the resulting weights."""
    weight, slope = tf.Variable(0.0), hvd.rank() + 1.0

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = weight * slope
        if way == "computed":
            pairs = optimizer._aggregate_gradients(optimizer._compute_gradients(loss, [weight], tape=tape))
        elif way == "of a function":
            pairs = optimizer._compute_gradients(lambda: 2 * weight, [weight], grad_loss=tf.constant(slope / 2))
        else:
            pairs = optimizer._aggregate_gradients([(tape.gradient(loss, weight), weight)])
        optimizer.apply_gradients([(tf.identity(gradient), one) for gradient, one in pairs], **applied)
        return pairs[0][0]

    run = tf.function(step, autograph=False) if way == "computed" else step
    return weight, [[float(run()), float(weight)] for _ in range(2)]


@check
def gradients_that_are_reduced_before_they_are_applied() -> Any:
    if compat.is_keras_3(compat.default_keras()):
        return {}
    slope, optimizers = hvd.rank() + 1.0, keras.optimizers
    makers = {"legacy": lambda: optimizers.legacy.SGD(1.0), "new": lambda: optimizers.SGD(1.0),
              "scaled": lambda: keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(1.0), initial_scale=4.0),
              "scaled legacy": lambda: keras.mixed_precision.LossScaleOptimizer(optimizers.legacy.SGD(1.0))}
    found = {}
    ways = ((1, "computed"), (2, "computed"), (1, "aggregated"), (2, "aggregated"), (1, "of a function"))
    for kind, (passes, way) in itertools.product(makers, ways):
        optimizer = hvd.DistributedOptimizer(makers[kind](), op=hvd.Sum, backward_passes_per_step=passes)
        applied = {} if "legacy" not in kind or way == "computed" else {"experimental_aggregate_gradients": False}
        weight, steps = steps_of_a_loop(optimizer, way, applied)
        weight.assign(0.0)
        for _ in range(passes):  # then as usual
            optimizer.apply_gradients([(tf.constant(slope), weight)])
        found[f"{kind}, {way}, {passes}"] = [*steps, float(weight)]
    found["minimized"] = []
    for make in (optimizers.legacy.SGD, optimizers.SGD):
        inside, weight = hvd.DistributedOptimizer(make(1.0), op=hvd.Sum), tf.Variable(0.0)
        scaled = keras.mixed_precision.LossScaleOptimizer(inside)
        inside.compute_gradients(lambda weight=weight: weight * slope, [weight])  # never applied
        for _ in range(2):
            scaled.minimize(lambda weight=weight: weight * slope, [weight])
            found["minimized"].append([float(inside.iterations), float(weight)])
    return found


@check
def global_variables_in_eager_mode() -> Any:
    try:
        hvd.broadcast_global_variables(0)
    except hvd.UsageError as error:
        return str(error)
    return None


@check
def gradients_of_local_sources_apart() -> Any:
    """Attributes of tapes and optimizers, their gradients, and the resulting weights."""
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
    slope = tf.constant([[hvd.rank() + 1.0]])
    with tf.GradientTape() as plain:
        loss = tf.reduce_sum(layers[1](layers[0](slope)))
    tape = hvd_tf.PartialDistributedGradientTape(plain, local_layers=layers[:1], scale_local_gradients=False)
    both = [layer.trainable_variables[0] for layer in layers]
    found = [[[variable is both[index], float(tf.reduce_sum(gradient))] for variable, gradient in pairs]
             for index, pairs in enumerate(tape.get_local_and_global_gradients(loss, both, use_generic_names=True))]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=False)
    weight = tf.Variable(0.0)
    computed = optimizer.compute_gradients(lambda: weight * (hvd.rank() + 1.0), [weight])
    optimizer.apply_gradients([(2 * gradient, variable) for gradient, variable in computed])
    is_of_job = [each.process_set is hvd.global_process_set for each in (tape, optimizer)]
    return {"gradients": found, "tape": isinstance(tape, tf.GradientTape), "of the job": is_of_job,
            "scaled": [tape.scale_local_gradients, optimizer.scale_local_gradients],
            "listed": "get_local_and_global_gradients" in dir(tape), "stepped": [float(computed[0][0]), float(weight)]}


def small_model() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, name="mine"),
                             keras.layers.Dense(1, name="shared")])


@check
def local_layers() -> Any:
    """Differences of both layers' weights from rank 0's after a step on different data."""
    samples = np.random.default_rng(hvd.rank()).normal(size=(8, 4)).astype("float32")

    def spread(model: Any) -> list[float]:
        flat = [tf.concat([tf.reshape(weight, [-1]) for weight in model.get_layer(name).weights], 0)
                for name in ("mine", "shared")]
        return [float(tf.reduce_max(tf.abs(part - hvd.broadcast(part, 0)))) for part in flat]

    found = {}
    for kind in ("optimizer", "late", "tape", "none"):
        model = small_model()
        layers = model.get_layer("mine")
        if kind == "tape":
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(samples)))
            tape = hvd_tf.PartialDistributedGradientTape(tape, local_layers=[layers])
            gradients = tape.gradient(loss, model.trainable_variables)
            keras.optimizers.SGD(0.1).apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        else:
            unbuilt = [layers]
            if kind == "late":
                model = keras.Sequential([keras.layers.Dense(3, name="mine", kernel_initializer="ones"),
                                          keras.layers.Dense(1, name="shared", kernel_initializer="ones")])
                unbuilt = model.layers[:1]
            optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1),
                                                        local_layers=None if kind == "none" else unbuilt)
            model.compile(optimizer, loss="mse")
            model.train_on_batch(samples, np.zeros((8, 1), "float32"))
        found[kind] = spread(model)
    return found


def normalized(model: Any, samples: Any) -> Any:
    """Return a model's outputs in training, the gradients of its weights, and its moving statistics."""
    with tf.GradientTape() as tape:
        out = model(samples, training=True)
        loss = tf.reduce_sum(tf.square(out) * tf.cast(tf.range(1, out.shape[-1] + 1), out.dtype))
    gradients = tape.gradient(loss, model.trainable_variables)
    return out, gradients


def relative(one: Any, other: Any) -> float:
    return float(np.max(np.abs(one.numpy() - other.numpy())) / (1 + np.max(np.abs(other.numpy()))))


def with_normalization(layer: Any, shape: Any) -> Any:
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.layers.Input(shape), keras.layers.Dense(3, dtype=layer.dtype), layer,
                             keras.layers.Dense(2, dtype=layer.dtype)])


def flagged() -> Any:
    return with_normalization(keras.layers.BatchNormalization(synchronized=True, dtype="float64"), (5,))


BEFORE_INIT = None if os.environ["HVKERAS_BACKEND"] == "tfdist" else flagged()  # must run before TensorFlow initializes


class Normalized(keras.layers.BatchNormalization):  # type: ignore[misc]  # Keras ships no types
    """A custom layer that overrides the method that Keras's layer calls."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return super().call(inputs, training=training, mask=mask)


def saved_and_loaded() -> Any:
    layer = keras.layers.BatchNormalization(synchronized=True, dtype="float64")
    path = str(Path(os.environ["HARNESS_RESULTS"]) / f"synchronized.{hvd.rank()}.keras")
    with_normalization(layer, (5,)).save(path)
    return keras.models.load_model(path)


def compared(model: Any, truth: Any, mine: Any, everything: Any, first: int, eagerly: bool) -> dict[str, Any]:
    """Return the largest differences of a model on this rank's samples from one process on all ranks' samples."""
    found = {}
    truth.set_weights(model.get_weights())
    for graph in (False, True) if eagerly else (True,):
        run = tf.function(normalized, autograph=False) if graph else normalized
        out, gradients = run(model, tf.constant(mine))
        summed = [hvd.allreduce(gradient, op=hvd.Sum) for gradient in gradients]
        whole, true_gradients = run(truth, tf.constant(everything))
        found["graph" if graph else "eager"] = {
            "outputs": float(np.max(np.abs(out.numpy() - whole.numpy()[first : first + len(mine)]))),
            "gradients": max(relative(*pair) for pair in zip(summed, true_gradients, strict=True)),
            "statistics": max(float(np.max(np.abs(one - other))) for one, other in
                              zip(model.get_weights(), truth.get_weights(), strict=True)),
        }
    return found


@check
def batch_normalization_over_all_ranks() -> Any:
    """The largest differences from one process on the whole batch; ranks have different numbers of samples."""
    found = {}
    plain = keras.layers.BatchNormalization
    models = {
        "vectors": (with_normalization(hvd.SyncBatchNormalization(dtype="float64"), (5,)), {}),
        "flag, images": (with_normalization(plain(synchronized=True, dtype="float64"), (4, 4, 5)), {}),
        "flag, own layer": (with_normalization(Normalized(synchronized=True, dtype="float64"), (5,)), {}),
        "flag, before init()": (BEFORE_INIT or flagged(), {}),
        "flag, from a file": (saved_and_loaded(), {}),
    }
    if "renorm" in inspect.signature(plain.__init__).parameters:
        renorm = {"renorm": True, "renorm_clipping": {"rmax": 1.5, "rmin": 0.6, "dmax": 0.5}}
        models["flag, renorm"] = (with_normalization(plain(synchronized=True, dtype="float64", **renorm), (5,)), renorm)
    for name, (model, options) in models.items():
        shape = model.input_shape[1:]
        everything = np.random.default_rng(9).normal(loc=10.0, size=(2 * hvd.size() + 3, *shape))
        first = 2 * hvd.rank()
        mine = everything[first : first + 2] if hvd.rank() < hvd.size() - 1 else everything[first:]
        truth = with_normalization(plain(dtype="float64", **options), shape)
        found |= {f"{name} {how}": differences for how, differences in
                  compared(model, truth, mine, everything, first, eagerly=name == "vectors").items()}
    return found


@check
def batch_normalization_of_masked_samples() -> Any:
    """The same with masks, which exclude all samples of the last rank."""
    steps = np.random.default_rng(4).normal(loc=3.0, size=(hvd.size(), 2, 6, 3))
    kept = np.arange(6) < np.asarray([[5, 2], *[[3, 4]] * (hvd.size() - 1)])[..., np.newaxis]
    kept[-1] = False
    found = {}
    for name, layer in (("flag", keras.layers.BatchNormalization(synchronized=True, dtype="float64", momentum=0.5)),
                        ("hvd", hvd.SyncBatchNormalization(dtype="float64", momentum=0.5))):
        truth = keras.layers.BatchNormalization(dtype="float64", momentum=0.5)
        with tf.GradientTape(persistent=True) as tape:
            mine, everything = (tf.constant(one) for one in (steps[hvd.rank()], steps.reshape(-1, 6, 3)))
            tape.watch([mine, everything])
            out = layer(mine, training=True, mask=tf.constant(kept[hvd.rank()]))
            whole = truth(everything, training=True, mask=tf.constant(kept.reshape(-1, 6)))
            loss, true_loss = (tf.reduce_sum(tf.square(one) * tf.constant([1.0, 2.0, 3.0], tf.float64) * mask) for
                               one, mask in ((out, kept[hvd.rank()][..., np.newaxis]),
                                             (whole, kept.reshape(-1, 6)[..., np.newaxis])))
        rows = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
        found[name] = {
            "outputs": float(np.max(np.abs(out.numpy() - whole.numpy()[rows]))),
            "gradients": float(np.max(np.abs(tape.gradient(loss, mine) - tape.gradient(true_loss, everything)[rows]))),
            "statistics": max(float(np.max(np.abs(one - other))) for one, other in
                              zip(layer.get_weights(), truth.get_weights(), strict=True)),
        }
    if hasattr(keras, "ops"):
        moments = np.stack(keras.ops.moments(steps[hvd.rank()], (0, 1), synchronized=True))
        truth = np.stack([steps.mean((0, 1, 2)), steps.var((0, 1, 2))])
        found["operation"] = {"moments": float(np.max(np.abs(moments - truth)))}
    return found


@check
def batch_normalization_elsewhere() -> Any:
    layer = hvd.SyncBatchNormalization(fused=False, momentum=0.5)
    model = with_normalization(layer, (5,))
    samples = np.ones((2, 5), "float32")
    before = model.get_weights()
    model(samples, training=False)
    changes = [not np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)]
    again = keras.Sequential.from_config(model.get_config())
    try:
        hvd.SyncBatchNormalization(fused=True)
    except hvd.UsageError as error:
        refused = str(error)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(np.random.default_rng(hvd.rank()).normal(size=(16, 5)), np.ones((16, 2)), batch_size=8, verbose=0)
    trained = [not np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)]
    apart = [float(np.max(np.abs(weight - np.asarray(hvd.broadcast(weight, 0))))) for weight in model.get_weights()]
    return {"inference changes": changes, "training changes": trained, "apart": apart,
            "class": type(again.layers[-2]).__name__, "momentum": again.layers[-2].momentum, "refused": refused}


@check
def timeline() -> Any:
    """The content of both kinds of timeline files: one per rank, and rank 0's only."""
    model = small_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    folder = Path(os.environ["HARNESS_RESULTS"])
    samples = np.ones((12, 4), "float32")
    # traced before the timeline starts, so that fit must retrace
    model.fit(samples, samples[:, :1], batch_size=4, verbose=0)
    hvd.start_timeline(str(folder / "timeline.{rank}.json"))
    model.fit(samples, samples[:, :1], batch_size=4, verbose=0)
    hvd.allgather(tf.ones([2, 3]), name="mine")
    hvd.alltoall(tf.range(hvd.size()), name="mine")
    amid: list[Any] = []
    ends = time.monotonic() + 60
    while sum(event["ph"] == "X" and "mine" in str(event["args"]) for event in amid) < 2 and time.monotonic() < ends:
        time.sleep(0.5)
        amid = json.loads((folder / f"timeline.{hvd.rank()}.json").read_text())["traceEvents"]  # valid at any time
    hvd.stop_timeline()
    model.fit(samples, samples[:, :1], batch_size=4, verbose=0)
    after = json.loads((folder / f"timeline.{hvd.rank()}.json").read_text())["traceEvents"]
    hvd_tf.start_timeline(str(folder / "timeline.json"), mark_cycles=True)
    hvd.broadcast(1.0, 0, name="mine")
    hvd_tf.stop_timeline()
    alone = json.loads((folder / "timeline.json").read_text())["traceEvents"] if hvd.rank() == 0 else []
    return [amid, after, alone]


@check
def gpus() -> Any:
    return [hvd.gpu_available("tensorflow"), bool(tf.config.list_physical_devices("GPU"))]


if __name__ == "__main__":
    run_checks(hvd.init, hvd.shutdown)
