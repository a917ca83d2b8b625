"""`KerasEstimator`: trains a Keras model on a DataFrame, with one rank in each task of a Spark job."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pyspark import keyword_only
from pyspark.ml import Estimator

from hvkeras.errors import UsageError, explain
from hvkeras.spark.common.backend import Backend, SparkBackend
from hvkeras.spark.common.data import Prepared, find_data, prepared
from hvkeras.spark.common.params import Parameter, PickledParams, with_parameters
from hvkeras.spark.common.pickling import family_of, model_of, own_objects, packed
from hvkeras.spark.common.store import Store
from hvkeras.spark.jobs import say_ignored
from hvkeras.spark.keras.model import KerasModel
from hvkeras.spark.keras.training import FitOrder, train

if TYPE_CHECKING:
    from hvkeras.typing import Callback, Model, OptimizerLike

_READERS = "pyarrow reads Parquet in the rank's process"
_IGNORED = {
    "data_module": _READERS, "train_reader_num_workers": _READERS, "val_reader_num_workers": _READERS,
    "reader_pool_type": _READERS, "mp_start_method": "Spark's workers start the ranks",
    "compress_sparse_cols": "sparse vectors are written as arrays",
    "transformation_edit_fields": "the result of transformation_fn defines the types",
    "transformation_removed_fields": "columns that training does not need are not read",
    "continuous_cols": "Horovod does not use it either", "categorical_cols": "Horovod does not use it either",
}

PARAMETERS = (
    Parameter("num_proc", "NumProc", "The number of ranks."),
    Parameter("data_module", "DataModule", "Accepted for compatibility with Horovod."),
    Parameter("model", "Model", "The Keras model."),
    Parameter("backend", "Backend", "The backend that runs the ranks: a `SparkBackend`."),
    Parameter("store", "Store", "The store of data, checkpoints and logs."),
    Parameter("custom_objects", "CustomObjects", "Custom classes and functions of the model by name."),
    Parameter("optimizer", "Optimizer", "The optimizer; by default that of the compiled model."),
    Parameter("loss", "Loss", "The loss or losses; by default those of the compiled model."),
    Parameter("loss_weights", "LossWeights", "The weight of each loss."),
    Parameter("sample_weight_col", "SampleWeightCol", "The column of sample weights."),
    Parameter("gradient_compression", "GradientCompression", "One of `hvd.Compression`."),
    Parameter("metrics", "Metrics", "The metrics."),
    Parameter("feature_cols", "FeatureCols", "The columns of the model's inputs."),
    Parameter("label_cols", "LabelCols", "The columns of its outputs."),
    Parameter("continuous_cols", "ContinuousCols", "Accepted for compatibility with Horovod."),
    Parameter("categorical_cols", "CategoricalCols", "Accepted for compatibility with Horovod."),
    Parameter("validation", "Validation", "The fraction of validation rows, or a column that marks them."),
    Parameter("callbacks", "Callbacks", "Keras callbacks, which run on all ranks.", []),
    Parameter("batch_size", "BatchSize", "Rows per step on each rank.", 32),
    Parameter("val_batch_size", "ValBatchSize", "Rows per validation step on each rank; by default batch_size."),
    Parameter("epochs", "Epochs", "The number of epochs.", 1),
    Parameter("verbose", "Verbose", "The verbosity of Keras on rank 0.", 1),
    Parameter("random_seed", "RandomSeed", "The seed of the split, of shuffling and of layers."),
    Parameter("shuffle_buffer_size", "ShufflingBufferSize", "The number of rows in the shuffle buffer."),
    Parameter("shuffle", "Shuffle", "Whether rows are shuffled in each epoch.", True),
    Parameter("partitions_per_process", "PartitionsPerProcess", "Parquet files per rank.", 10),
    Parameter("run_id", "RunId", "The name of the run."),
    Parameter("train_steps_per_epoch", "TrainStepsPerEpoch", "Steps per epoch; by default, one pass over the data."),
    Parameter("validation_steps_per_epoch", "ValidationStepsPerEpoch", "Validation steps per epoch."),
    Parameter("transformation_fn", "TransformationFn", "A function that transforms a pandas DataFrame."),
    Parameter("transformation_edit_fields", "TransformationEditFields", "Accepted for compatibility with Horovod."),
    Parameter("transformation_removed_fields", "TransformationRemovedFields", "Accepted for compatibility."),
    Parameter("train_reader_num_workers", "TrainReaderNumWorker", "Accepted for compatibility with Horovod."),
    Parameter("val_reader_num_workers", "ValReaderNumWorker", "Accepted for compatibility with Horovod."),
    Parameter("reader_pool_type", "ReaderPoolType", "Accepted for compatibility with Horovod.", "thread"),
    Parameter("label_shapes", "LabelShapes", "The shape of each label."),
    Parameter("checkpoint_callback", "CheckpointCallback", "A ModelCheckpoint that selects the model to save."),
    Parameter("inmemory_cache_all", "InMemoryCacheAll", "Whether each rank caches its rows in memory.", False),
    Parameter("backend_env", "BackendEnv", "Additional environment variables of the ranks."),
    Parameter("use_gpu", "UseGpu", "Whether ranks use GPUs.", True),
    Parameter("mp_start_method", "MpStartMethod", "Accepted for compatibility with Horovod."),
    Parameter("backward_passes_per_step", "BackwardPassesPerStep", "Steps whose gradients are accumulated.", 1),
    Parameter("compress_sparse_cols", "CompressSparseCols", "Accepted for compatibility with Horovod.", False),
)


@with_parameters(*PARAMETERS)
class KerasEstimator(PickledParams, Estimator):  # type: ignore[misc]
    """Spark ML estimator that trains a Keras model on a DataFrame, on all ranks of a Spark job.

    `fit` writes the columns to Parquet files in the store, each rank reads an equal shard of the rows, and the best
    model is returned as a `KerasModel`. Gradients, metrics and early stopping are synchronized across ranks. Each
    parameter has a getter and a setter, as in Horovod: `getBatchSize()`, `setBatchSize(64)`.

    Example:
        estimator = KerasEstimator(
            num_proc=4, store=Store.create("/shared/experiments"), model=model, optimizer=keras.optimizers.Adam(),
            loss="sparse_categorical_crossentropy", metrics=["accuracy"], feature_cols=["features"],
            label_cols=["label"], validation=0.1, batch_size=64, epochs=10)
        trained = estimator.fit(df)
        trained.transform(df).select("label", "label__output")

    Args:
        num_proc: The number of ranks; by default, Spark's default parallelism.
        data_module: Accepted for compatibility with Horovod: pyarrow reads Parquet.
        model: The Keras model.
        backend: The backend that runs the ranks, instead of `num_proc`: a `SparkBackend`.
        store: A `Store` that the driver and all ranks can access.
        custom_objects: Custom classes and functions of the model by name, if Keras cannot find them.
        optimizer: The optimizer, which `fit` distributes; by default that of the compiled model.
        loss: The loss, or one for each output; by default those of the compiled model.
        loss_weights: The weight of each loss.
        sample_weight_col: The column of sample weights.
        gradient_compression: One of `hvd.Compression`.
        metrics: The metrics.
        feature_cols: The columns of the inputs: one for each input, or several that are concatenated to a single input.
            They hold numbers, lists of numbers or vectors, which are reshaped to the input's shape.
        label_cols: The label column of each output.
        continuous_cols: Accepted for compatibility with Horovod.
        categorical_cols: Accepted for compatibility with Horovod.
        validation: The fraction of rows held out for validation, or a column that is true or positive in them.
        callbacks: Keras callbacks, which run on all ranks.
        batch_size: Rows per step on each rank; 32 by default.
        val_batch_size: Rows per validation step on each rank; by default `batch_size`.
        epochs: The number of epochs; 1 by default.
        verbose: 0 for no output, 1 or 2 for one line per epoch on rank 0; 1 by default.
        random_seed: The seed of the split, of shuffling and of layers such as Dropout.
        shuffle_buffer_size: The number of rows in the shuffle buffer; by default as many as fit into 256 MiB.
        shuffle: Whether to shuffle rows in each epoch.
        partitions_per_process: Parquet files per rank; 10 by default.
        run_id: The name of the run. If the store has a checkpoint of the run, training resumes from it.
        train_steps_per_epoch: Steps per epoch; by default, one pass over the data.
        validation_steps_per_epoch: Validation steps per epoch; by default, one pass over the data.
        transformation_fn: Function that ranks apply to each pandas DataFrame of rows; it must keep the number of rows.
        train_reader_num_workers: Accepted for compatibility with Horovod.
        val_reader_num_workers: Accepted for compatibility with Horovod.
        reader_pool_type: Accepted for compatibility with Horovod.
        label_shapes: The shape of each label, without the batch dimension.
        checkpoint_callback: A `ModelCheckpoint` that selects the model to save; by default, the best validation loss
            decides, or the loss without validation.
        inmemory_cache_all: Whether each rank caches its rows in memory.
        backend_env: Additional environment variables of the ranks.
        use_gpu: Whether ranks use GPUs.
        mp_start_method: Accepted for compatibility with Horovod.
    """

    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(
        self, *, num_proc: int | None = None, data_module: Any = None, model: Model | None = None,
        backend: Backend | None = None, store: Store | None = None, custom_objects: Mapping[str, Any] | None = None,
        optimizer: OptimizerLike | None = None, loss: Any = None, loss_weights: Any = None,
        sample_weight_col: str | None = None, gradient_compression: Any = None, metrics: Any = None,
        feature_cols: Sequence[str] | None = None, label_cols: Sequence[str] | None = None,
        continuous_cols: Sequence[str] | None = None, categorical_cols: Sequence[str] | None = None,
        validation: float | str | None = None, callbacks: Sequence[Callback] | None = None,
        batch_size: int | None = None, val_batch_size: int | None = None, epochs: int | None = None,
        verbose: int | None = None, random_seed: int | None = None, shuffle_buffer_size: int | None = None,
        shuffle: bool = True, partitions_per_process: int | None = None, run_id: str | None = None,
        train_steps_per_epoch: int | None = None, validation_steps_per_epoch: int | None = None,
        transformation_fn: Callable[[Any], Any] | None = None, train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None, reader_pool_type: str = "thread",
        label_shapes: Sequence[Sequence[int]] | None = None, checkpoint_callback: Callback | None = None,
        inmemory_cache_all: bool = False, backend_env: Mapping[str, str] | None = None, use_gpu: bool = True,
        mp_start_method: str | None = None,
    ) -> None:  # `keyword_only` stores the passed arguments in `_input_kwargs`
        super().__init__()
        self._setDefault(**{row.name: row.default for row in PARAMETERS})
        self.setParams(**{name: value for name, value in self._input_kwargs.items() if value is not None})

    def fit(self, df: Any, params: Any = None) -> KerasModel:
        """Train on a DataFrame.

        Args:
            df: The DataFrame.
            params: Parameters that override those of this estimator, by `Param`; a list of such dicts returns a list of
                models.

        Returns:
            The trained model.

        Raises:
            UsageError: A parameter is missing or invalid, or does not match the DataFrame.
            MachineError: Spark did not start the ranks in time.
            PeerError: Training failed on some rank.
        """
        model: KerasModel = super().fit(df, params)
        return model

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: object = None) -> KerasModel:
        """Train on Parquet data that the store already contains.

        The data must be in `store.get_train_data_path()`, and optionally in `store.get_val_data_path()`.

        Args:
            params: Parameters that override those of this estimator, by `Param`.
            dataset_idx: The identifier of the dataset, if the store has several.

        Returns:
            The trained model.

        Raises:
            UsageError: The store has no such data, or a parameter is missing or invalid.
        """
        estimator: KerasEstimator = self.copy(params) if params else self
        return estimator._train(find_data(estimator._store(), dataset_idx))

    def _fit(self, df: Any) -> KerasModel:
        columns = [*self._columns("feature_cols"), *self._columns("label_cols")]
        weights = self.getSampleWeightCol()
        partitions = self._backend().num_processes() * self.getPartitionsPerProcess()
        with prepared(df, self._store(), [*columns, *([weights] if weights else [])], self.getValidation(), partitions,
                      self.getRandomSeed()) as found:
            return self._train(found)

    def _train(self, data: Prepared) -> KerasModel:
        say_ignored("KerasEstimator", **{
            name: (None if self.getOrDefault(name) == self._defaultParamMap[self.getParam(name)]
                   else self.getOrDefault(name), why) for name, why in _IGNORED.items()})
        store, model, run_id = self._store(), self.getModel(), self.getRunId() or f"keras_{uuid.uuid4().hex[:12]}"
        family = family_of(model)
        if not family:
            raise UsageError(explain("The model must be a Keras model", "model=keras.Sequential(...)",
                                     model=type(model)))
        objects = self._objects(model)
        custom = {**own_objects(model, objects["loss"], objects["metrics"]), **(self.getCustomObjects() or {})}
        plan = FitOrder(
            family=family, store=store, run_id=run_id, train_path=data.train_path, val_path=data.val_path,
            feature_cols=self._columns("feature_cols"), label_cols=self._columns("label_cols"),
            sample_weight_col=self.getSampleWeightCol(), label_shapes=self.getLabelShapes(),
            batch_size=self.getBatchSize(), val_batch_size=self.getValBatchSize() or self.getBatchSize(),
            epochs=self.getEpochs(), verbose=self.getVerbose(), seed=self.getRandomSeed(), shuffle=self.getShuffle(),
            pool=self.getShufflingBufferSize(), train_steps=self.getTrainStepsPerEpoch(),
            val_steps=self.getValidationStepsPerEpoch(), in_memory=self.getInMemoryCacheAll(),
            custom_objects=custom, passes_per_step=self.getBackwardPassesPerStep(),
            objects=packed(objects))
        env = {**(self.getBackendEnv() or {}), **({} if self.getUseGpu() else {"CUDA_VISIBLE_DEVICES": ""})}
        history, trained = cast("Any", self._backend().run(train, args=(plan,), env=env)[0])
        result: KerasModel = KerasModel(
            history=history, model=model_of(trained, family, plan.custom_objects), feature_columns=plan.feature_cols,
            label_columns=plan.label_cols, custom_objects=plan.custom_objects, run_id=run_id,
            _metadata=dict(data.kinds))
        return result

    def _objects(self, model: Any) -> dict[str, Any]:
        optimizer = self.getOptimizer() or getattr(model, "optimizer", None)
        loss = self.getLoss() if self.getLoss() is not None else getattr(model, "loss", None)
        for name, value in (("optimizer", optimizer), ("loss", loss)):
            if value is None:
                raise UsageError(explain(f"KerasEstimator needs the parameter {name}",
                                         f"pass {name}=..., or compile the model", **{name: None}))
        return {
            "model": model, "optimizer": optimizer, "loss": loss, "loss_weights": self.getLossWeights(),
            "metrics": self.getMetrics(), "compression": self.getGradientCompression(),
            "callbacks": list(self.getCallbacks() or ()), "checkpoint": self.getCheckpointCallback(),
            "transform": self.getTransformationFn(),
        }

    def _columns(self, name: str) -> list[str]:
        columns = self.getOrDefault(name)
        if not columns or isinstance(columns, str):
            raise UsageError(explain(f"KerasEstimator needs the parameter {name}, a list of columns",
                                     f'{name}=["..."]', **{name: columns}))
        return list(columns)

    def _store(self) -> Store:
        if not isinstance(self.getStore(), Store):
            raise UsageError(explain("KerasEstimator needs the parameter store",
                                     'store=Store.create("/a/folder/that/all/hosts/share")', store=self.getStore()))
        store: Store = self.getStore()
        return store

    def _backend(self) -> Backend:
        backend = self.getBackend()
        if backend is not None and self.getNumProc() is not None:
            raise UsageError(explain("KerasEstimator takes either num_proc or a backend", "leave one of them out",
                                     num_proc=self.getNumProc(), backend=backend))
        return cast(Backend, backend) if backend is not None else SparkBackend(self.getNumProc(), verbose=1)
