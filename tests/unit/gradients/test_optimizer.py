"""Distributed optimizers in one process: what they refuse, and what becomes of copies, configs and files."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hvkeras as hvd
from harness.processes import run_python
from hvkeras.gradients.optimizer_classes import distributed_part


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    yield
    hvd.shutdown()


def part_of(optimizer: Any) -> Any:
    """What makes an optimizer distributed."""
    part = distributed_part(optimizer)
    assert part is not None
    return part


def model_in(kind: Any, optimizer: Any) -> Any:
    layers = [kind.layers.Dense(3, activation="tanh"), kind.layers.Dense(1)]
    made = kind.Sequential([kind.Input((2,)), *layers])
    made.compile(optimizer, kind.losses.MeanSquaredError())
    return made


def fit(model: Any) -> Any:
    model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
    return model


KINDS = {
    "keras": (keras, keras.optimizers),
    "tf_keras": (tf_keras, tf_keras.optimizers),
    "legacy": (tf_keras, tf_keras.optimizers.legacy),
}


# Keras 2's legacy optimizers differ from tf_keras's in their class alone; `make test-soak` has them.
MARKS = {"tf_keras": pytest.mark.slow, "legacy": pytest.mark.nightly}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in KINDS])
def kind(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return KINDS[request.param]


def test_wrapping_keeps_state_name_and_config(kind: tuple[Any, Any]) -> None:
    family, optimizers = kind
    plain = optimizers.Adam(0.02, clipnorm=1.5)
    fit(model_in(family, plain))
    config, iterations = plain.get_config(), int(plain.iterations)
    wrapped = hvd.DistributedOptimizer(plain)
    assert wrapped is plain
    assert part_of(wrapped).optimizer is wrapped
    assert isinstance(wrapped, optimizers.Adam)
    assert type(wrapped).__name__ == "Adam"
    assert wrapped.get_config() == config
    assert int(wrapped.iterations) == iterations == 1


def test_configs_round_trip(kind: tuple[Any, Any]) -> None:
    family, optimizers = kind
    wrapped = hvd.DistributedOptimizer(optimizers.Adam(0.02), op=hvd.Sum)
    again = type(wrapped).from_config(wrapped.get_config())
    assert part_of(again).optimizer is again
    assert part_of(again).exchange.op == hvd.Sum
    plain = family.optimizers.deserialize(family.optimizers.serialize(wrapped))
    assert distributed_part(plain) is None
    assert plain.get_config() == wrapped.get_config()


def test_serialized_form_names_only_keras(kind: tuple[Any, Any]) -> None:
    family, optimizers = kind
    wrapped = hvd.DistributedOptimizer(optimizers.Adam(0.02, name="one"))
    assert family.optimizers.serialize(wrapped) == family.optimizers.serialize(optimizers.Adam(0.02, name="one"))


@pytest.mark.filterwarnings("ignore:Skipping variable loading")  # Keras 3 on copying a built optimizer
def test_copies_stay_distributed(kind: tuple[Any, Any]) -> None:
    family, optimizers = kind
    wrapped = hvd.DistributedOptimizer(optimizers.SGD(0.02, momentum=0.9), op=hvd.Sum)
    fresh = copy.deepcopy(wrapped)
    fit(model_in(family, wrapped))
    for each in (fresh, copy.deepcopy(wrapped)):
        assert part_of(each).optimizer is each
        assert part_of(each).exchange.op == hvd.Sum
        assert each.get_config() == wrapped.get_config()
    fit(model_in(family, fresh))


def test_equal_optimizers_have_one_class(kind: tuple[Any, Any]) -> None:
    _, optimizers = kind
    first, second = (hvd.DistributedOptimizer(optimizers.Adam(rate)) for rate in (0.1, 0.2))
    assert type(first) is type(second) is type(first.from_config(first.get_config())) is not optimizers.Adam
    others = [hvd.DistributedOptimizer(optimizers.Adam(), op=hvd.Sum), hvd.DistributedOptimizer(optimizers.SGD(0.1)),
              hvd.DistributedOptimizer(optimizers.Adam(), backward_passes_per_step=2)]
    assert len({type(each) for each in (first, *others)}) == 4


@pytest.mark.parametrize(("use", "text"), [
    (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=hvd.Compression.int8, op=hvd.Adasum),
     "compresses sums and averages, not Adasum"),
    (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=hvd.Compression.int8, shard_update=True),
     "shard_update=True only parts of them"),
    (lambda: hvd.allreduce(1.0, compression=hvd.Compression.int8), "gradients of optimizers and tapes"),
    (lambda: hvd.grouped_allreduce([1.0], compression=hvd.Compression.int8), "gradients of optimizers and tapes"),
    (lambda: hvd.reducescatter([1.0], compression=hvd.Compression.int8), "gradients of optimizers and tapes"),
], ids=["Adasum", "sharded update", "allreduce", "grouped allreduce", "reducescatter"])
def test_what_8_bits_cannot_be_combined_with(use: Any, text: str) -> None:
    with pytest.raises(hvd.UsageError, match=text):
        use()


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_pickled_keras_optimizers_stay_distributed() -> None:
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.02), compression=hvd.Compression.bf16)
    again = pickle.loads(pickle.dumps(wrapped))
    assert part_of(again).optimizer is again
    assert part_of(again).exchange.compression is hvd.Compression.bf16


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_accumulating_optimizers_can_be_copied(passes: int) -> None:
    wrapped = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
    fit(model_in(tf_keras, wrapped))
    fit(model_in(tf_keras, copy.deepcopy(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1),
                                                                  backward_passes_per_step=passes))))


@pytest.mark.slow
def test_clones_and_recompiled_models(kind: tuple[Any, Any]) -> None:
    family, optimizers = kind

    def build(rate: float) -> Any:  # as a tuner does, over and over
        return model_in(family, hvd.DistributedOptimizer(optimizers.Adam(rate)))

    trained = [fit(build(rate)) for rate in (0.1, 0.01)]
    clone = family.models.clone_model(trained[0])
    clone.compile(type(trained[0].optimizer).from_config(trained[0].optimizer.get_config()), "mse")
    fit(clone)
    assert part_of(clone.optimizer).optimizer is clone.optimizer


@pytest.mark.parametrize("ending", [".keras", ".h5", ""])
def test_saved_models_open_plain_and_load_model_wraps_them(
    ending: str, kind: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, optimizers = kind
    if family is keras and not ending:
        pytest.skip("Keras 3 has no SavedModel format")
    path = str(tmp_path / f"model{ending}")
    model = fit(model_in(family, hvd.DistributedOptimizer(optimizers.Adam(0.02))))
    save(model, path)
    plain = family.models.load_model(path)
    assert distributed_part(plain.optimizer) is None
    assert plain.optimizer.get_config() == model.optimizer.get_config()
    monkeypatch.setattr(tf, "keras", family)
    again = hvd.load_model(path, compression=hvd.Compression.fp16)
    assert part_of(again.optimizer).exchange.compression is hvd.Compression.fp16
    saved = [np.sum(weight) for weight in variables_of(plain.optimizer)]
    if family is not keras or ending != ".h5":  # see compat.repair_optimizer
        # Not every format of Keras 2 keeps the state.
        assert [np.sum(weight) for weight in variables_of(again.optimizer)] == saved
    else:
        assert [np.sum(weight) for weight in variables_of(again.optimizer)] == [
            np.sum(weight) for weight in variables_of(model.optimizer)]
    fit(again)


def test_a_custom_object_may_be_distributed_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(tf_keras.optimizers.SGD):
        pass

    path = str(tmp_path / "model.h5")
    save(fit(model_in(tf_keras, hvd.DistributedOptimizer(Mine(0.02)))), path)
    monkeypatch.setattr(tf, "keras", tf_keras)
    again = hvd.load_model(path, custom_objects={"Mine": lambda **given: hvd.DistributedOptimizer(Mine(**given))})
    assert part_of(again.optimizer).optimizer is again.optimizer
    fit(again)


def variables_of(optimizer: Any) -> Any:
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def save(model: Any, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of HDF5, and NumPy of Keras
        model.save(path)


@pytest.mark.slow
def test_saved_models_open_without_hvkeras(tmp_path: Path) -> None:
    path = str(tmp_path / "model.keras")
    save(fit(model_in(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)))), path)
    code = ("import sys; sys.modules['hvkeras'] = None; import keras; m = keras.models.load_model(sys.argv[1]);"
            " print(type(m.optimizer).__module__, int(m.optimizer.iterations))")
    found = run_python(code, path, cwd=tmp_path, isolated=True)
    assert found.stdout.split() == ["keras.src.optimizers.adam", "1"], found.stderr


def test_custom_optimizers_keep_their_registered_name() -> None:
    @keras.saving.register_keras_serializable(package="tests")
    class Own(keras.optimizers.SGD):  # type: ignore[misc]
        pass

    wrapped = hvd.DistributedOptimizer(Own(0.1))
    assert keras.optimizers.serialize(wrapped)["registered_name"] == "tests>Own"
    assert type(keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))) is Own


def test_one_process_trains_as_plain_keras_does(kind: tuple[Any, Any]) -> None:
    family, optimizers = kind
    weights = []
    for wrap in (hvd.DistributedOptimizer, lambda optimizer: optimizer):
        family.utils.set_random_seed(1)
        weights.append(fit(model_in(family, wrap(optimizers.Adam(0.02)))).get_weights())
    for one, other in zip(*weights, strict=True):
        assert np.array_equal(one, other)


def test_one_process_accumulates_passes(kind: tuple[Any, Any]) -> None:
    _, optimizers = kind
    variable = keras.Variable(np.zeros(2, "float32")) if optimizers is keras.optimizers else tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), backward_passes_per_step=2)
    found = []
    for _ in range(4):
        optimizer.apply_gradients([(tf.ones(2), variable)])
        found.append(float(np.asarray(variable)[0]))
    assert found == [0.0, -2.0, -2.0, -4.0]


def test_not_initialized() -> None:
    hvd.shutdown()
    with pytest.raises(hvd.NotInitializedError, match=r"call hvd.init\(\)"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(hvd.NotInitializedError):
        hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(hvd.NotInitializedError):
        hvd.allreduce(1.0)


@pytest.mark.parametrize("thing", [None, keras.optimizers.SGD, keras.losses.MeanSquaredError()])
def test_no_optimizer(thing: Any) -> None:
    with pytest.raises(hvd.UsageError, match="takes an optimizer of Keras 3 or tf_keras"):
        hvd.DistributedOptimizer(thing)


def test_wrapped_twice(kind: tuple[Any, Any]) -> None:
    wrapped = hvd.DistributedOptimizer(kind[1].SGD(0.1))
    with pytest.raises(hvd.UsageError, match="distributed only once"):
        hvd.DistributedOptimizer(wrapped)
    with pytest.raises(hvd.UsageError, match="distributed only once"):
        hvd.DistributedOptimizer(kind[0].mixed_precision.LossScaleOptimizer(wrapped))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Max}, "op must be hvd.Average, hvd.Sum or hvd.Adasum"),
        ({"op": 17}, "op must be one of"),
        ({"op": True}, "op must be one of"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=hvd.Average"),
        ({"gradient_predivide_factor": 0.0}, "must be positive"),
        ({"backward_passes_per_step": 0}, "must be a positive integer"),
        ({"groups": -1}, "groups must be"),
        ({"groups": ["kernel"]}, "groups must be"),
        ({"groups": [["kernel"]]}, "groups must be"),
        ({"compression": "fp16"}, "compression must be one of"),
        ({"process_set": [0]}, "must be a ProcessSet"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hvd.UsageError, match=message):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)


def test_tapes_refuse_what_they_are_not() -> None:
    with pytest.raises(hvd.UsageError, match=r"takes a tf.GradientTape"):
        hvd.DistributedGradientTape(None)
    with pytest.raises(hvd.UsageError, match="distributed only once"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))


@pytest.mark.slow
def test_a_strategy_of_several_replicas_reduces_itself(tmp_path: Path) -> None:
    code = """
import numpy as np, tensorflow as tf, keras
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import hvkeras as hvd
hvd.init("local")
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
@tf.function
def step():
    strategy.run(lambda: optimizer.apply_gradients([(tf.ones([1]), variable)]))
step()
print(variable.numpy()[0])
"""
    found = run_python(code, cwd=tmp_path, isolated=True)
    assert found.stdout.split() == ["-2.0"], found.stderr
