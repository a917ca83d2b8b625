"""Keras optimizers, tapes and callbacks on two ranks: each check returns values that the tests compare."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras.job.session import current_session

keras: Any = tf.keras
KERAS_3 = not keras.Model.__module__.startswith("tf_keras.")


def variable(value: Any) -> Any:
    return keras.Variable(value) if KERAS_3 else tf.Variable(value)


def updated(gradients: list[Any], graph: bool = False, local: int | None = None, **options: Any) -> list[Any]:
    """Return the amount that SGD with learning rate 1 subtracts from zeros for these gradients."""
    shapes = [(2,) if gradient is None else gradient.shape for gradient in gradients]
    variables = [variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    if local is not None:
        optimizer.register_local_var(variables[local])
    optimizer.build(variables)

    def step() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    (tf.function(step) if graph else step)()
    return [-np.asarray(each) for each in variables]


def mine(*shape: int) -> Any:
    """Return a gradient that is 1 on rank 0, 2 on rank 1, ..."""
    return tf.ones(shape) * float(hvd.rank() + 1)


@check
def options() -> dict[str, Any]:
    """The update by two gradients with each option; before reduction they are 1, 2, ... by rank."""
    pair = [mine(3), mine(2, 2)]
    first = variable(np.zeros(3, "float32"))
    even = hvd.add_process_set([rank for rank in range(hvd.size()) if rank % 2 == 0])
    odd = hvd.add_process_set([rank for rank in range(hvd.size()) if rank % 2 == 1])
    found = {
        "average": updated(pair),
        "in a graph": updated(pair, graph=True),
        "sum": updated(pair, op=hvd.Sum),
        "predivide": updated(pair, gradient_predivide_factor=4.0),
        "two groups": updated(pair, groups=2, graph=True),
        "num_groups": updated(pair, num_groups=1),
        "foreign groups": updated(pair, groups=[[first]]),
        "local scaled": updated(pair, local=0),
        "local unscaled": updated(pair, local=0, scale_local_gradients=False),
        "process set": updated(pair, process_set=odd if hvd.rank() % 2 else even),
    }
    hvd.remove_process_set(odd)
    hvd.remove_process_set(even)
    return {name: [each.flat[0] for each in values] for name, values in found.items()}


@check
def compressed() -> dict[str, Any]:
    """The update by a gradient that float16 and bfloat16 round differently."""
    gradient = tf.constant([1.0 + 1 / 3, 100.1]) * float(hvd.rank() + 1)
    return {name: updated([gradient], compression=getattr(hvd.Compression, name), graph=True)[0]
            for name in ("none", "fp16", "bf16")}


@check
def eight_bits() -> list[Any]:
    """The update by a gradient in 8 bits between hosts, which is exact on one host, or why there is none."""
    gradient = tf.cast(tf.range(5000), tf.float32) * float(hvd.rank() + 1)
    try:
        return [updated([gradient], compression=hvd.Compression.int8, graph=graph)[0][4999] for graph in (True, False)]
    except hvd.UnsupportedError as error:
        return [str(error)]


@check
def gradients_that_are_none() -> list[Any]:
    """The update if the second of three variables has no gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [each.flat[0] for each in updated([mine(2), None, mine(2)])]


def embedding_gradient(sparse_as_dense: bool = False) -> tuple[Any, Any]:
    """Return the gradient of a table of four rows, of which rank r looks up row r and row 3."""
    table = variable(np.ones((4, 2), "float32"))
    with tf.GradientTape() as tape:
        rows = tf.gather(table.value if KERAS_3 else table, [hvd.rank(), 3])
        loss = tf.reduce_sum(rows) * float(hvd.rank() + 1)
    tape = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense)
    return table, tape.gradient(loss, table.value if KERAS_3 else table)


@check
def sparse_gradients() -> dict[str, Any]:
    """Whether embedding gradients stay sparse, their sum, and the table after an optimizer's update."""
    _, sparse = embedding_gradient()
    _, dense = embedding_gradient(sparse_as_dense=True)
    table = variable(np.ones((4, 2), "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([table])

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        with tf.GradientTape() as tape:
            rows = tf.gather(table.value if KERAS_3 else table, [hvd.rank(), 3])
            loss = tf.reduce_sum(rows) * float(hvd.rank() + 1)
        gradient = tape.gradient(loss, table.value if KERAS_3 else table)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply_gradients([(gradient, table)])

    step()
    return {
        "sparse": isinstance(sparse, tf.IndexedSlices),
        "dense": isinstance(dense, tf.IndexedSlices),
        "values": tf.convert_to_tensor(sparse)[:, 0],
        "values of the dense": tf.convert_to_tensor(dense)[:, 0],
        "table": np.asarray(table)[:, 0],
    }


def of_lists(passes: int, **options: Any) -> list[Any]:
    """Return the amount that SGD subtracts from zeros for sparse and dense gradients made of lists."""
    tables = [variable(np.zeros((4, 2), "float32")) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes, **options)
    optimizer.build(tables)
    number = hvd.rank() + 1.0
    for _ in range(passes):
        slices = tf.IndexedSlices([[number, number]], (hvd.rank(),), (4, 2))
        optimizer.apply_gradients(zip([slices, np.full((4, 2), number).tolist()], tables, strict=True))
    return [(-np.asarray(table)[:, 0]).tolist() for table in tables]


@check
def gradients_of_lists() -> dict[str, Any]:
    """Sparse and dense gradients whose parts are lists or tuples."""
    return {"at once": of_lists(1), "as dense": of_lists(1, sparse_as_dense=True), "two passes": of_lists(2),
            "shared": of_lists(1, shard_update=True)}


def accumulated(average: bool, graph: bool) -> list[float]:
    target, other = variable(np.zeros(2, "float32")), variable(np.zeros(2, "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2,
                                         average_aggregated_gradients=average)

    def step(number: Any) -> None:
        optimizer.apply_gradients([(mine(2) * number, target), (tf.zeros(2), other)])

    run = tf.function(step) if graph else step
    values = []
    for number in range(4):
        run(tf.constant(float(number + 1)))
        values.append(-float(np.asarray(target)[0]))
    return [*values, int(optimizer.iterations)]


@check
def accumulation() -> dict[str, Any]:
    """A variable after each of four passes with an update every two passes; and the iterations."""
    return {"summed": accumulated(False, False), "averaged": accumulated(True, False),
            "in a graph": accumulated(True, True),
            "averages of weights": [] if not KERAS_3 else [averages_of_weights(sharded) for sharded in (False, True)]}


def averages_of_weights(sharded: bool) -> list[float]:
    """A weight that starts at 10, and its average, which `use_ema` makes the weight, after each of two updates."""
    target, found = variable(np.full(2, 10.0, "float32")), []
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.75),
                                         backward_passes_per_step=2, shard_update=sharded)
    optimizer.build([target])
    for number in range(4):
        optimizer.apply_gradients([(tf.ones(2), target)])
        if number % 2:
            found.append(float(np.asarray(target)[0]))
    optimizer.finalize_variable_values([target])
    return [*found, float(np.asarray(target)[0])]


def small_model(policy: Any = None, width: int = 3) -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(1)])


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """Record the loss scale and the sum of the weights after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        scale = optimizer.dynamic_scale if KERAS_3 else optimizer.loss_scale
        self.seen.append((float(scale), float(sum(np.sum(np.abs(one)) for one in self.model.get_weights()))))


def overflow(wrap_first: bool, explicit: bool = False, passes: int = 1, local: bool = False,
             eager: bool = False, compiled: bool = False) -> Any:
    """Return loss scale and weights after each of four steps; in the second one, only rank 1 overflows."""
    x, y = np.ones((8, 4), "float32") / 8, np.ones((8, 1), "float32") / 8
    if hvd.rank() == 1:
        x[2:4] = np.inf

    def wrapped() -> Any:
        plain = keras.optimizers.SGD(0.1)
        options = {"backward_passes_per_step": passes, "compile_update": compiled or "auto"}
        if explicit:
            plain = keras.mixed_precision.LossScaleOptimizer(plain)
        return hvd.DistributedOptimizer(plain, **options)

    optimizer = wrapped() if wrap_first else None
    policy = keras.mixed_precision.global_policy() if not KERAS_3 else keras.config.dtype_policy()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = small_model()
        optimizer = optimizer or wrapped()
        if local:
            for weight in model.trainable_weights:
                optimizer.register_local_var(weight)
        watch = Watch()
        model.compile(optimizer, "mse", run_eagerly=eager)
        model.fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=[watch])
    finally:
        keras.mixed_precision.set_global_policy(policy)
    return watch.seen


@check
def overflow_on_one_rank() -> dict[str, Any]:
    return {
        "policy before wrapping": overflow(wrap_first=False),
        "policy after wrapping": overflow(wrap_first=True, eager=True),
        "explicit loss scale": overflow(wrap_first=False, explicit=True, eager=True),
        "local variables": overflow(wrap_first=False, local=True),
        "compiled": overflow(wrap_first=False, compiled=True),
        "two passes": overflow(wrap_first=False, passes=2),
    }


@check
def bfloat16_policy() -> Any:
    """The weights after training under mixed_bfloat16 on different data."""
    policy = keras.mixed_precision.global_policy() if not KERAS_3 else keras.config.dtype_policy()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = small_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
        model.fit(np.full((4, 4), hvd.rank(), "float32"), np.ones((4, 1)), verbose=0, epochs=2)
    finally:
        keras.mixed_precision.set_global_policy(policy)
    return [np.asarray(weight).tolist() for weight in model.get_weights()]


def shard(rows: int = 12) -> tuple[Any, Any]:
    random = np.random.default_rng(hvd.rank())
    return random.normal(size=(rows, 4)).astype("float32"), random.normal(size=(rows, 1)).astype("float32")


class OwnStep(keras.Model):  # type: ignore[misc]
    """A model with a custom train step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@check
def ways_to_train() -> dict[str, Any]:
    """The weights of ranks with different data after each way to train; they must be equal."""
    x, y = shard()
    found = {}
    for name, arguments in (("many steps an execution", {"steps_per_execution": 3}), ("eager", {"run_eagerly": True})):
        model = small_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse", **arguments)
        model.fit(x, y, batch_size=2, verbose=0)
        found[name] = model.get_weights()
    own = OwnStep()
    own.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    own.fit(x, y, batch_size=4, verbose=0)
    found["own train_step"] = own.get_weights()
    return {name: [np.asarray(weight).tolist() for weight in weights] for name, weights in found.items()}


@check
def partial_batch_on_one_rank() -> Any:
    """The weights after a custom loop in which only rank 1 retraces its step, for a shorter batch."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    x, y = shard(8)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    for start, end in ((0, 4), (4, 7 if hvd.rank() == 1 else 8), (0, 4)):
        step(x[start:end], y[start:end])
    return [np.asarray(weight).tolist() for weight in model.get_weights()]


@check
def two_optimizers_in_one_step() -> list[Any]:
    """Two variables of the same shape, each with its own optimizer, updated in one graph."""
    one, other = variable(np.zeros(2, "float32")), variable(np.zeros(2, "float32"))
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]
    for optimizer, target in zip(optimizers, (one, other), strict=True):
        optimizer.build([target])

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        optimizers[0].apply_gradients([(mine(2), one)])
        optimizers[1].apply_gradients([(mine(2) * 10.0, other)])

    step()
    step()
    return [-float(np.asarray(each)[0]) for each in (one, other)]


def overwritten(optimizer: Any, graph: bool = False, passes: int = 1, local: bool = False, **options: Any) -> Any:
    """Return a variable whose gradient is its new value: [10, 5] per pass on rank 0, [20, 4] on rank 1."""
    scale, weight = variable([1.0, 1.0]), variable([1.0] * 70)
    scale.overwrite_with_gradient = True
    distributed = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes, **options)
    if local:
        distributed.register_local_var(scale)
    distributed.build([weight, scale])
    value = tf.constant([10.0 * (hvd.rank() + 1), 5.0 - hvd.rank()])

    def step(factor: Any) -> None:
        distributed.apply([tf.fill([70], 1.0), value * factor], [weight, scale])

    run = tf.function(step) if graph else step
    for number in range(passes):
        run(tf.constant(3.0 if number == 0 and passes > 1 else 1.0))
    return scale.numpy().tolist()


@check
def new_values() -> dict[str, Any]:
    """Result of the ranks' new values of a variable, however applied; nothing if Keras has no such variables."""
    if not hasattr(getattr(keras, "Variable", None), "overwrite_with_gradient"):
        return {}
    sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
    scale = variable([1.0, 1.0])
    scale.overwrite_with_gradient = True
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(scale * tf.constant([10.0 * (hvd.rank() + 1), 5.0 - hvd.rank()]))
    return {
        "largest": {
            "average": overwritten(sgd(1.0)), "sum": overwritten(sgd(1.0), op=hvd.Sum),
            "adasum": overwritten(sgd(1.0), op=hvd.Adasum), "in a graph": overwritten(adam(1.0), graph=True),
            "compressed": overwritten(sgd(1.0), compression=hvd.Compression.fp16, gradient_predivide_factor=2.0),
            "compiled": overwritten(adam(1.0), graph=True, compile_update=True),
            "clipped": overwritten(sgd(1.0, global_clipnorm=0.1)),
            "shared": overwritten(adam(1.0), shard_update=True),
            "shared, clipped": overwritten(adam(1.0, clipnorm=0.1), shard_update=True, graph=True),
            "shared, compiled": overwritten(adam(1.0), shard_update=True, compile_update=True, graph=True),
            "tape": hvd.DistributedGradientTape(tape).gradient(loss, [scale])[0].numpy().tolist(),
        },
        "passes": [overwritten(sgd(1.0), passes=2, average_aggregated_gradients=True, **options)
                   for options in ({}, {"graph": True}, {"shard_update": True})],
        "local": overwritten(sgd(1.0), local=True),
    }


def in_float8(optimizer: Callable[..., Any], accumulation: Any = None, tolerance: float = 0.01,
              **options: Any) -> list[str]:
    """Return the variables that differ from those of one process after float8 training on the same global batches."""
    random = np.random.default_rng(0)
    x = (random.normal(size=(4, hvd.size(), 4, 6)) * np.arange(1, 1 + hvd.size()).reshape(-1, 1, 1)).astype("float32")

    def trained(mine: Any, given: Any) -> Any:
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, dtype="float8_from_float32"),
                                 keras.layers.Dense(1)])
        made.compile(given, keras.losses.MeanSquaredError(reduction="sum"))
        rows = mine.reshape(-1, 6)
        made.fit(rows, rows[:, :1], batch_size=len(rows) // 4, shuffle=False, verbose=0)
        return made.trainable_variables

    found = trained(x[:, hvd.rank()], hvd.DistributedOptimizer(optimizer(), op=hvd.Sum, **options))
    with hvd.alone():
        truth = trained(x, optimizer(**(accumulation or {})))
    return [one.path for one, other in zip(found, truth, strict=True)
            if not np.allclose(one, other, rtol=1e-4 if "amax" in one.path or "scale" in one.path else tolerance,
                               atol=tolerance * float(np.max(np.abs(other))) if "amax" not in one.path else 0.0)]


@check
def float8_training() -> dict[str, list[str]]:
    if not hasattr(getattr(keras, "Variable", None), "overwrite_with_gradient"):
        return {}
    sgd, adam = functools.partial(keras.optimizers.SGD, 1e-4), functools.partial(keras.optimizers.Adam, 1e-3)
    return {
        "plain": in_float8(sgd), "loss scale": in_float8(lambda: keras.optimizers.LossScaleOptimizer(sgd(), 16.0)),
        "two passes": in_float8(sgd, {"gradient_accumulation_steps": 2}, backward_passes_per_step=2,
                                average_aggregated_gradients=True),
        "shared": in_float8(adam, shard_update=True), "compiled": in_float8(adam, compile_update=True),
    }


@check
def tapes() -> dict[str, Any]:
    """Gradients of distributed tapes over nested sources, persistent, in a graph, with a local source."""
    one, other = tf.Variable([1.0, 1.0]), tf.Variable([[1.0]])

    def gradients(persistent: bool, local: bool = False, **options: Any) -> Any:
        with tf.GradientTape(persistent=persistent) as tape:
            loss = tf.reduce_sum(one) * float(hvd.rank() + 1) + tf.reduce_sum(other) * 10.0 * float(hvd.rank() + 1)
        tape = hvd.DistributedGradientTape(tape, **options)
        if local:
            tape.register_local_source(one)
        for _ in range(2 if persistent else 1):
            found = tape.gradient(loss, {"b": [other], "a": one})
        return [found["a"][0], found["b"][0][0][0]]

    with hvd.DistributedGradientTape(tf.GradientTape()) as entered:
        loss = tf.reduce_sum(one) * float(hvd.rank() + 1)

    @tf.function(input_signature=[tf.TensorSpec([None])])  # type: ignore[untyped-decorator]
    def unknown_length(values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            loss = tf.reduce_sum(values) * float(hvd.rank() + 1)
        return hvd.DistributedGradientTape(tape).gradient(loss, values)

    return {
        "once": gradients(False),
        "persistent": gradients(True),
        "sum": gradients(False, op=hvd.Sum),
        "in a graph": tf.function(lambda: gradients(False))(),
        "local source": gradients(False, local=True),
        "entered itself": entered.gradient(loss, [one, other]),
        "of unknown length": unknown_length(tf.ones([5])),
    }


def start_apart() -> Any:
    """Return a model with BatchNormalization and different initial weights on each rank."""
    keras.utils.set_random_seed(hvd.rank())
    return [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]


@check
def broadcast_callback() -> dict[str, Any]:
    """Weights after training from rank 0's weights (by the callback), and from equal initial weights without it."""
    x, y = shard(8)
    found = {}
    for name, built in (("built", True), ("unbuilt", False)):
        model = keras.Sequential(([keras.Input((4,))] if built else []) + start_apart())
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * (hvd.rank() + 1), 0.9)), "mse")
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        trainable = [np.asarray(weight).tolist() for weight in model.trainable_weights]
        found[name] = [trainable, float(model.optimizer.learning_rate), int(model.optimizer.iterations)]
    same = keras.Sequential([keras.Input((4,)), *start_apart()])
    hvd.broadcast_variables(same.weights, root_rank=0)
    same.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, 0.9)), "mse", run_eagerly=True)
    same.fit(x, y, batch_size=8, verbose=0)
    found["truth"] = [[np.asarray(weight).tolist() for weight in same.trainable_weights], 0.1, 1]
    return found


@check
def broadcast_keeps_local_variables() -> list[float]:
    """A local and a global weight after a broadcast from rank 1."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    model.set_weights([np.full((2, 1), hvd.rank() + 1.0), np.full((1,), hvd.rank() + 1.0)])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[model.trainable_weights[1]])
    model.fit(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0, callbacks=[callback])
    return [float(weight.flat[0]) for weight in model.get_weights()]


@check
def plain_optimizer_warning() -> list[list[str]]:
    """The callback's warnings about a model that does not average gradients, where `fit` checks weights and not."""
    settings = current_session().settings
    checked = _warnings_of_a_plain_optimizer()
    settings.__dict__["guard"] = False  # as HVKERAS_GUARD=off
    unchecked = _warnings_of_a_plain_optimizer()
    settings.__dict__["guard"] = True
    return [checked, unchecked]


def _warnings_of_a_plain_optimizer() -> list[str]:
    model = small_model()
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The same data on all ranks: otherwise the weights would diverge, which ends the job.
        model.fit(np.ones((2, 4)), np.ones((2, 1)), verbose=0,
                  callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    return [str(warning.message) for warning in caught if "hvkeras" in str(warning.message)]


@check
def jit_compile_error() -> list[str]:
    """Class and text of the error when a step is compiled by XLA."""
    model = small_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    try:
        model.fit(*shard(4), verbose=0)
    except Exception as error:  # noqa: BLE001 - the class is what the test looks at
        return [type(error).__name__, str(error)]
    return ["", "no error"]


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)
