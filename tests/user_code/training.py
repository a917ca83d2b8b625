"""Code as users write it: `make lint` holds it against mypy and pyright, and nothing runs it.

`assert_type` says what a checker must see, and a `type: ignore` stands where it must complain: one without a complaint
is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import hvkeras as hvd
import hvkeras.keras as hvd_keras
import hvkeras.tensorflow as hvd_tensorflow
from hvkeras.tensorflow.compression import Compressor
from hvkeras.typing import (
    ArrayOrTensor,
    CallbackLike,
    DistributedGradientTape,
    History,
    InputContext,
    Model,
    Operation,
    Strategy,
    Tensor,
    TensorLike,
)

if TYPE_CHECKING:
    from typing_extensions import assert_type


class Optimizer:
    """An optimizer whose class a checker knows, whether Keras is installed beside it or not."""

    def apply_gradients(self, grads_and_vars: object) -> None:
        """Applies gradients."""


@hvd.register_statistic
class Normalization:
    """A user's own layer."""


class Tuner:
    """A tuner whose class a checker knows, where Keras Tuner is not installed."""


def build() -> keras.Model:
    normalization = hvd.register_statistic(Normalization())
    assert_type(normalization, Normalization)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), normalization, hvd.SyncBatchNormalization()])


def training_with_fit(x: NDArray[np.float32], y: NDArray[np.int64]) -> None:
    hvd.init()
    x, y = hvd.shard((x, y))
    model = build()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()), compression=hvd.Compression.fp16)
    model.compile(optimizer=optimizer, loss="mse", metrics=["accuracy"])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()))
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=3),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.9**epoch, start_epoch=3),
        hvd.callbacks.ModelCheckpoint("{epoch}.keras", save_best_only=True),
        hvd.callbacks.BestModelCheckpoint(filepath="best.keras"),
        hvd.callbacks.BackupAndRestore("backup", save_freq=100),
        hvd.callbacks.TensorBoard("logs", profile_batch=(10, 20)),
        keras.callbacks.EarlyStopping(),
        *hvd.rank0_callbacks([keras.callbacks.CSVLogger("log.csv")]),
    ]
    model.fit(x, y, verbose=hvd.verbose(), callbacks=callbacks)  # pyright: ignore[reportArgumentType] - or any number
    annotated: list[keras.callbacks.Callback] = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(hvd.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(32)), callbacks=annotated)
    model.fit(hvd.shard(tf.data.Dataset.from_tensors((x, y)), by="elements"), callbacks=annotated)
    with hvd.alone():
        model.evaluate(x, y)
    probabilities = hvd.predict(model, x)
    print(probabilities.argmax(-1), hvd.rank(), hvd.global_process_set.size())
    hvd.adapt(keras.layers.Normalization(), x)
    hvd.load_model("best.keras").fit(x, y)
    assert_type(hvd.DistributedTuner(Tuner()), Tuner)


def training_with_a_loop(model: keras.Model, loss_of: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> None:
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss)

    print(step(tf.zeros([1, 8]), tf.zeros([1, 4])))
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, 0)
    partial = hvd.PartialDistributedOptimizer(optimizer, local_layers=model.layers[:1])
    partial.apply_gradients([])


def with_tensorflow(value: float) -> tf.Tensor:
    mean = hvd.allreduce(tf.constant(value), op=hvd.Sum, process_set=hvd.add_process_set([0, 1]))
    assert_type(mean, Tensor)
    assert_type(mean / hvd.size() + 1, Tensor)
    assert_type(mean[..., 0] > 0, Tensor)
    print(float(mean), mean.numpy().tolist(), mean.shape, mean.dtype, f"{mean}")
    summed: tf.Tensor = tf.reduce_sum(mean)
    return hvd.allreduce(summed, name="sum")


def collectives(tensor: TensorLike, tensors: list[tf.Tensor], array: NDArray[np.float32]) -> None:
    assert_type(hvd.allreduce(tensor), Tensor)
    assert_type(hvd.allreduce(3), Tensor)
    assert_type(hvd.allreduce([1.0, 2.0], op=hvd.Max), Tensor)
    assert_type(hvd.allreduce(array), Tensor)
    assert_type(hvd.allreduce(tf.Variable(tf.zeros([]))), Tensor)
    assert_type(hvd.allreduce(tf.cast(array, tf.float64) * 2), Tensor)
    assert_type(hvd.allreduce(tf.IndexedSlices(tf.zeros([2]), tf.range(2))), Tensor)
    assert_type(hvd.allgather([hvd.rank()]), Tensor)
    assert_type(hvd.broadcast(array, root_rank=0), Tensor)
    assert_type(hvd.grouped_allreduce(tensors), list[Tensor])
    assert_type(hvd.alltoall(array), Tensor)
    assert_type(hvd.alltoall(array, splits=[1, 2]), tuple[Tensor, Tensor])
    assert_type(hvd.reducescatter(array), Tensor)
    assert_type(hvd.rank_op(), Tensor)
    assert_type(hvd.barrier(), Operation | None)
    assert_type(hvd.join(), int)
    assert_type(hvd_tensorflow.allreduce(array), Tensor)
    assert_type(hvd_keras.allreduce(array), ArrayOrTensor)
    print(float(hvd_keras.allreduce(1.0)) / 2, np.mean(hvd_keras.allgather(array)))


def objects(settings: dict[str, int]) -> None:
    assert_type(hvd.broadcast_object(settings, root_rank=0), dict[str, int])
    assert_type(hvd.broadcast_object(settings if hvd.rank() == 0 else None), dict[str, int])
    assert_type(hvd.allgather_object(settings), list[dict[str, int]])
    assert_type(hvd.run(build_nothing, args=(3,), np=2), list[str])


def build_nothing(number: int) -> str:
    return str(number)


def results(tape: tf.GradientTape, data: tuple[NDArray[np.float32], NDArray[np.int64]]) -> None:
    assert_type(hvd.DistributedOptimizer(Optimizer()), Optimizer)
    assert_type(hvd_keras.DistributedOptimizer(Optimizer()), Optimizer)
    assert_type(hvd_tensorflow.DistributedOptimizer(Optimizer()), Optimizer)
    assert_type(hvd.DistributedGradientTape(tape), DistributedGradientTape)
    assert_type(hvd.shard(data), tuple[NDArray[np.float32], NDArray[np.int64]])
    assert_type(hvd.strategy("mirrored"), Strategy)
    assert_type(hvd.load_model("model.keras", custom_optimizers=[keras.optimizers.Adam]), Model)
    with hvd.strategy("multi_worker_mirrored").scope():
        build()


def dataset_of(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return tf.data.Dataset.range(10).shard(context.num_input_pipelines, context.input_pipeline_id)


def with_parameter_servers(as_declared: Callable[[InputContext], tf.data.Dataset]) -> None:
    history = hvd.parameter_server.train(build, dataset_of, epochs=2, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert_type(history, History)
    history.model.save("model.keras")
    hvd.parameter_server.train(build, as_declared)


@hvd.elastic.run
def elastically(state: hvd.elastic.TensorFlowKerasState, epochs: int) -> float:
    state.commit()
    return float(epochs)


def elastic_training(model: keras.Model) -> None:
    state = hvd.elastic.TensorFlowKerasState(model, keras.optimizers.Adam(), epoch=0)
    assert_type(elastically(state, 3), float)
    kept: list[CallbackLike] = [hvd.elastic.CommitStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
    print(kept)


class HalfPrecision(Compressor):
    """A compressor of one's own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        return tensor * 2


class Logging(hvd.callbacks.MetricAverageCallback):
    """A callback that derives from one of hvkeras."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        print(self.model.name, logs)


def mistakes(array: NDArray[np.float32]) -> None:
    hvd.DistributedOptimizer(Optimizer(), compression=HalfPrecision)
    hvd.allreduce(array, compression="fp16")  # type: ignore[arg-type]
    hvd.allreduce(None)  # type: ignore[arg-type]
    hvd.allreduce(array, opp=hvd.Sum)  # type: ignore[call-arg]
    hvd.callbacks.BroadcastGlobalVariablesCallback()  # type: ignore[call-arg]
    hvd.broadcast_variables([1, 2], root_rank=0)  # type: ignore[list-item]
    hvd.allreduced(array)  # type: ignore[attr-defined]
