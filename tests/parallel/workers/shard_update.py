"""Training with `shard_update=True`, compared with the unsharded update and with one process.

With `--few`, only the most important cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks

keras: Any = tf.keras
KERAS_3 = not keras.Model.__module__.startswith("tf_keras.")
FEW = "--few" in sys.argv
of_keras: Any = keras.optimizers
STEPS, ROWS = 7, 8
Make = Callable[[], Any]


def net(seed: int = 3, **of_last: Any) -> Any:
    """Return a model with one kernel that is split between ranks, and some variables that are not."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Dense(33, activation="relu"), keras.layers.Dense(7, activation="tanh"),
                              keras.layers.Dense(3, **of_last)])
    model.build((None, 20))
    return model


def words() -> Any:
    """Return a model with an embedding, whose gradients are sparse."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Embedding(500, 16), keras.layers.Reshape((80,)), keras.layers.Dense(3)])
    model.build((None, 5))
    return model


def batch(rank: int, step: int, of_words: bool = False) -> tuple[Any, Any]:
    random = np.random.default_rng(100 * rank + step)
    x = random.integers(0, 500, (ROWS, 5)) if of_words else random.normal(size=(ROWS, 20)).astype("float32")
    return tf.constant(x), tf.constant(random.normal(size=(ROWS, 3)).astype("float32"))


def scaled_loss(optimizer: Any, loss: Any) -> Any:
    if hasattr(optimizer, "get_scaled_loss"):
        return optimizer.get_scaled_loss(loss)
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def unscaled(optimizer: Any, gradients: Sequence[Any]) -> Any:
    return optimizer.get_unscaled_gradients(gradients) if hasattr(optimizer, "get_unscaled_gradients") else gradients


def trained(make: Make, build: Make = net, ranks: Sequence[int] | None = None, eager: bool = False,
            change: Callable[[int, int], float] = lambda rank, step: 1.0, frozen: int = 0,
            **options: Any) -> tuple[list[Any], Any]:
    """Train, and return the weights and the optimizer.

    Args:
        make: Constructor of the optimizer.
        build: Constructor of the model.
        ranks: With one process, the ranks whose batches it trains on; otherwise None.
        eager: Whether steps run eagerly.
        change: Factor of a rank's loss in a step.
        frozen: Number of layers without gradients.
        **options: Options of `DistributedOptimizer`.
    """
    model = build()
    optimizer = make() if ranks is not None else hvd.DistributedOptimizer(make(), **options)
    variables = model.trainable_variables
    trains = variables[2 * frozen :]
    optimizer.build(variables)

    def step(batches: Sequence[tuple[Any, Any]], factors: Any) -> None:
        with tf.GradientTape() as tape:
            losses = [tf.reduce_mean((tf.cast(model(x), tf.float32) - y) ** 2) * factors[index]
                      for index, (x, y) in enumerate(batches)]
            loss = scaled_loss(optimizer, tf.add_n(losses) / len(losses))
        gradients = unscaled(optimizer, tape.gradient(loss, trains))
        optimizer.apply_gradients(zip([*[None] * (2 * frozen), *gradients], variables, strict=True))

    run = step if eager else tf.function(step)
    for number in range(STEPS):
        mine = [hvd.rank()] if ranks is None else ranks
        run([batch(rank, number, build is words) for rank in mine],
            tf.constant([change(rank, number) for rank in mine], tf.float32))
    return [np.array(each) for each in model.get_weights()], optimizer


def distance(some: Sequence[Any], others: Sequence[Any]) -> float:
    return max(float(np.abs(np.subtract(one, other, dtype=np.float64)).max() / max(np.abs(one).max(), 1e-6))
               for one, other in zip(some, others, strict=True))


def compared(make: Make, one: bool = True, **arguments: Any) -> list[Any]:
    """Return the differences from the unsharded update (weights, state), from one process, and between ranks."""
    weights, optimizer = trained(make, shard_update=True, **arguments)
    others, plain = trained(make, shard_update=False, **arguments)
    hvd.gather_optimizer(optimizer, to=range(hvd.size()))
    states = [[np.asarray(each.numpy()) for each in some.variables] for some in (plain, optimizer)]
    names = ("build", "change", "frozen")
    alone = trained(make, ranks=range(hvd.size()), **{name: arguments[name] for name in names if name in arguments}
                    )[0] if one else others
    digests = hvd.allgather_object([hashlib.sha256(each.tobytes()).hexdigest() for each in weights])
    return [distance(others, weights), distance(*states) if len(states[0]) == len(states[1]) else "lengths",
            distance(alone, weights), all(digest == digests[0] for digest in digests)]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda: of_keras.SGD(0.1), "Adam": lambda: of_keras.Adam(0.01),
    "momentum": lambda: of_keras.SGD(0.1, momentum=0.9, nesterov=True),
    "AMSGrad": lambda: of_keras.Adam(0.01, amsgrad=True), "AdamW": lambda: of_keras.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: of_keras.Adamax(0.01),
    "RMSprop": lambda: of_keras.RMSprop(0.01, centered=True, momentum=0.5),
    "Adagrad": lambda: of_keras.Adagrad(0.01), "Adadelta": lambda: of_keras.Adadelta(0.1),
    "Ftrl": lambda: of_keras.Ftrl(0.01),
    "Lion": lambda: of_keras.Lion(0.001),
    **({"Nadam": lambda: of_keras.Nadam(0.01), "Lamb": lambda: of_keras.Lamb(0.01),
        "Adafactor": lambda: of_keras.Adafactor(0.01)} if KERAS_3 else {}),
    **({"Muon": lambda: of_keras.Muon(0.01)} if hasattr(of_keras, "Muon") else {}),
}


@check
def optimizers() -> dict[str, Any]:
    """Each optimizer."""
    wanted = ("Adam",) if FEW else OPTIMIZERS
    return {name: compared(OPTIMIZERS[name]) for name in wanted if name in OPTIMIZERS}


def derived() -> Any:
    class Slower(of_keras.Adam):  # type: ignore[misc]  # Keras ships no types
        pass

    return Slower(0.01)


def with_its_own_step() -> Any:
    class Normed(of_keras.SGD):  # type: ignore[misc]  # Keras ships no types
        def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None:
            super().update_step(gradient / (1e-3 + tf.norm(gradient)), variable, *rate)

    return Normed(0.1, momentum=0.5)


def without_decay_of_biases() -> Any:
    optimizer = of_keras.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def loss_scale() -> Any:
    inner = of_keras.SGD(0.05, momentum=0.9)
    if KERAS_3:
        return of_keras.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=3)
    return keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=3)


@check
def corners() -> dict[str, Any]:
    """Features of optimizers besides the elementwise update."""
    few: dict[str, Callable[[], list[Any]]] = {
        "clipped by global norm": lambda: compared(lambda: of_keras.SGD(0.1, global_clipnorm=0.05)),
        "clipped by norms": lambda: compared(lambda: of_keras.SGD(0.1, clipnorm=0.02)),
        "averages that overwrite": lambda: compared(
            lambda: of_keras.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)),
        "one rank overflows": lambda: compared(
            loss_scale, change=lambda rank, step: float("inf") if step == 2 and rank == 1 else 1.0),
        "sparse": lambda: compared(lambda: of_keras.Adagrad(0.1), build=words, one=KERAS_3),
    }
    more: dict[str, Callable[[], list[Any]]] = {
        "clipped by value": lambda: compared(lambda: of_keras.Adam(0.01, clipvalue=0.01)),
        "decay but of biases": lambda: compared(without_decay_of_biases),
        "decay, compiled": lambda: compared(without_decay_of_biases, compile_update=True),
        "clipped, compiled": lambda: compared(lambda: of_keras.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
                                              compile_update=True),
        "two passes": lambda: compared(OPTIMIZERS["Adam"], one=False, backward_passes_per_step=2),
        "two passes, eager": lambda: compared(OPTIMIZERS["Adam"], one=False, backward_passes_per_step=2, eager=True),
        "eager": lambda: compared(OPTIMIZERS["Adam"], eager=True),
        "loss scale": lambda: compared(loss_scale),
        "loss scale, eager": lambda: compared(loss_scale, eager=True),
        "float16 travels": lambda: compared(OPTIMIZERS["momentum"], one=False, compression=hvd.Compression.fp16),
        "predivided": lambda: compared(OPTIMIZERS["momentum"], gradient_predivide_factor=2.0),
        "Adasum": lambda: compared(OPTIMIZERS["momentum"], one=False, op=hvd.Adasum),
        "two groups": lambda: compared(OPTIMIZERS["momentum"], groups=2),
        "a layer without gradients": lambda: compared(OPTIMIZERS["Adam"], frozen=1),
        "float64": lambda: compared(OPTIMIZERS["Adam"], build=lambda: net(dtype="float64")),
        "a constraint": lambda: compared(OPTIMIZERS["Adam"], build=lambda: net(kernel_constraint="unit_norm")),
        "sparse, Adam": lambda: compared(lambda: of_keras.Adam(0.01), build=words, one=KERAS_3),
        "sparse, clipped": lambda: compared(lambda: of_keras.SGD(0.1, global_clipnorm=0.05), build=words, one=False),
        "sparse as dense": lambda: compared(lambda: of_keras.Adagrad(0.1), build=words, one=False,
                                            sparse_as_dense=True),
        "derived": lambda: compared(derived),
        "with its own step": lambda: compared(with_its_own_step),
        **({"gradients accumulated": lambda: compared(
            lambda: of_keras.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.05), one=False)}
           if KERAS_3 else {}),
    }
    return {name: make() for name, make in ({} if FEW else more | few).items()} or {
        name: make() for name, make in few.items()}


@check
def process_sets() -> list[float]:
    """Each pair of ranks shards its own update."""
    if hvd.size() < 4:
        return [0.0]
    pairs = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    mine = pairs[hvd.rank() % 2]
    weights = [trained(OPTIMIZERS["Adam"], shard_update=shared, process_set=mine)[0] for shared in (True, False)]
    for pair in reversed(pairs):
        hvd.remove_process_set(pair)
    return [distance(*weights)]


@check
def local_variables() -> list[Any]:
    """The update of a local variable is not sharded."""
    found = []
    for shared in (True, False):
        model = net()
        optimizer = hvd.DistributedOptimizer(of_keras.Adam(0.01), shard_update=shared)
        optimizer.register_local_var(model.layers[1].bias)
        model.compile(optimizer, "mse")
        x, y = batch(hvd.rank(), 0)
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
        found.append([np.array(each) for each in model.get_weights()])
    return [distance(*found)]


def fitted(shared: bool, epochs: int = 2, callbacks: Sequence[Any] = (), model: Any = None, **options: Any) -> Any:
    compiles = {name: options.pop(name) for name in ("jit_compile", "steps_per_execution", "run_eagerly")
                if name in options}
    if model is None:
        model = net()
        model.compile(hvd.DistributedOptimizer(of_keras.Adam(0.01), shard_update=shared, **options), "mse", **compiles)
    x, y = zip(*(batch(hvd.rank(), step) for step in range(STEPS)), strict=True)
    model.fit(tf.concat(x, 0), tf.concat(y, 0), batch_size=ROWS, epochs=epochs, verbose=0, shuffle=False,
              callbacks=list(callbacks))
    return model


@check
def ways_to_fit() -> dict[str, float]:
    """The ways in which `fit` can run steps."""
    ways: dict[str, dict[str, Any]] = {"plain": {}, "compiled update": {"compile_update": True}}
    if not FEW:
        ways |= {"several steps": {"steps_per_execution": 3}, "eager": {"run_eagerly": True},
                 "XLA": {"jit_compile": True}}
    found = {}
    for name, options in ways.items():
        with contextlib.suppress(hvd.UnsupportedError):  # not all engines support XLA
            models = [fitted(shared, **options) for shared in (True, False)]
            found[name] = distance(*([np.array(each) for each in model.get_weights()] for model in models))
    return found


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder shared by all ranks."""
    made = tempfile.TemporaryDirectory() if hvd.rank() == 0 else None
    name = hvd.broadcast_object(None if made is None else made.name)
    try:
        yield Path(name)
        hvd.barrier()
    finally:
        if made is not None:
            made.cleanup()


@check
def saved() -> dict[str, Any]:
    """Saved state is complete, and training resumes from it with and without sharding."""
    found: dict[str, Any] = {}
    with folder() as path:
        plain = fitted(False)
        saves = [hvd.callbacks.ModelCheckpoint(str(path / "own-{epoch}-{batch}.keras"), save_freq=3)]
        if hvd.rank() == 0:
            saves.append(keras.callbacks.ModelCheckpoint(str(path / "keras-{epoch}.keras")))
        read_by_own: list[str] = []

        class Own(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                try:
                    np.asarray(self.model.optimizer.variables[-1].numpy())
                    read_by_own.append("")
                except hvd.UsageError as error:
                    read_by_own.append(str(error))

        model = fitted(True, callbacks=[*saves, Own()])
        found["read by own"] = read_by_own
        states = [np.asarray(each.numpy()) for each in plain.optimizer.variables]
        if hvd.rank() == 0:
            found["without gathering"] = ""
            model.save(path / "end.keras")
            for name in ("end.keras", "keras-2.keras"):
                read = keras.models.load_model(path / name)
                found[name] = [distance(states, [np.asarray(each.numpy()) for each in read.optimizer.variables]),
                               type(read.optimizer).__module__.split(".")[0]]
            found["own"] = sorted(one.name for one in path.glob("own-*"))
        else:
            try:
                model.save(path / "wrong.keras")
            except hvd.UsageError as error:
                found["without gathering"] = str(error)
        hvd.barrier()
        weights = [np.array(each) for each in fitted(False, 1, model=plain).get_weights()]
        for shared in (True, False):
            read = hvd.load_model(path / "end.keras", shard_update=shared)
            again = fitted(shared, 1, model=read)
            found[f"resumed {shared}"] = distance(weights, [np.array(each) for each in again.get_weights()])
        hvd.barrier()
    return found


@check
def broadcast_from_one_rank() -> float:
    """The state that only the root has loaded reaches all ranks."""
    plain = fitted(False)
    values = [np.asarray(each.numpy()) for each in plain.optimizer.variables]
    model = net(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(of_keras.Adam(0.01), shard_update=True), "mse")
    model.optimizer.build(model.trainable_variables)
    if hvd.rank() == 0:
        model.set_weights(plain.get_weights())
        model.optimizer.set_weights(values)
    fitted(True, 1, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], model)
    fitted(False, 1, model=plain)
    return distance(*([np.array(each) for each in one.get_weights()] for one in (plain, model)))


@check
def swapped_averages() -> dict[str, Any]:
    """Keras 3's callback that evaluates with averaged weights: differences from the unsharded run."""
    found: dict[str, Any] = {}
    for name, on_epoch, make in (("SGD", False, lambda: of_keras.SGD(0.1, use_ema=True, ema_momentum=0.9)),
                                 ("at the end of an epoch", True, lambda: of_keras.Adam(0.01, use_ema=True)),
                                 ("whole variables", False, lambda: of_keras.Lamb(0.01, use_ema=True))):
        runs = []
        for shared in (True, False) if KERAS_3 else ():
            model = net()
            model.compile(hvd.DistributedOptimizer(make(), shard_update=shared), "mse")
            x, y = batch(hvd.rank(), 0)
            logs = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False, validation_data=(x, y),
                             callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)]).history
            evaluated = model.evaluate(x, y, verbose=0)
            runs.append([np.array(each) for each in (logs["val_loss"], evaluated, *model.get_weights())])
        found[name] = distance(*runs) if runs else 0.0
    return found


@check
def memory() -> list[float]:
    """The bytes of the optimizer's state on this rank, as a fraction of the total."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Embedding(20_000, 64), *(keras.layers.Dense(64) for _ in range(4))])
    model.build((None, 4))
    whole, shared = of_keras.Adam(), hvd.DistributedOptimizer(of_keras.Adam(), shard_update=True)
    sizes = []
    for optimizer in (whole, shared):
        optimizer.build(model.trainable_variables)
        sizes.append(sum(each.numpy().nbytes for each in optimizer._variables))
    return [sizes[1] / sizes[0]]


@check
def refused() -> list[str]:
    """Errors of unknown optimizers, and of features that would save only a part of the state."""

    class Own(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras ships no types
        def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None: ...

    texts = []
    for name, optimizer, wanted in (("unknown", lambda: Own(0.1, name="own") if KERAS_3 else Own("own"), True),
                                    ("wrong", of_keras.SGD, "rows")):
        try:
            hvd.DistributedOptimizer(optimizer(), shard_update=wanted)
            texts.append(name)
        except hvd.HvkerasError as error:
            texts.append(str(error))
    model, of_a_set = net(), net()
    model.compile(hvd.DistributedOptimizer(of_keras.Adam(), shard_update=True), "mse")
    model.optimizer.build(model.trainable_variables)
    everyone = hvd.ProcessSet(range(hvd.size()))
    of_a_set.compile(hvd.DistributedOptimizer(of_keras.Adam(), shard_update=True, process_set=everyone), "mse")
    for keep in (lambda: tf.train.Checkpoint(model=model).write("never"),
                 lambda: hvd.elastic.TensorFlowKerasState(of_a_set)):
        try:
            keep()
            texts.append("kept")
        except hvd.UnsupportedError as error:
            texts.append(str(error))
    return texts


if __name__ == "__main__":
    run_checks(hvd.init, hvd.shutdown)
