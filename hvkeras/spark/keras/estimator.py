"""`KerasEstimator`: trains a Keras model on a DataFrame, on ranks in the tasks of a Spark job."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pyspark import keyword_only
from pyspark.ml import Estimator

from hvkeras.errors import UsageError, explain
from hvkeras.spark.common.backend import Backend, SparkBackend
from hvkeras.spark.common.data import Prepared, found_in, prepared
from hvkeras.spark.common.params import Parameter, PickledParams, with_parameters
from hvkeras.spark.common.pickling import family_of, model_of, own_objects, packed
from hvkeras.spark.common.store import Store
from hvkeras.spark.jobs import say_ignored
from hvkeras.spark.keras.model import KerasModel
from hvkeras.spark.keras.training import FitOrder, train

if TYPE_CHECKING:
    from hvkeras.typing import Callback, Model, OptimizerLike

_READERS = "Parquet is read by pyarrow, in the rank's own process"
_IGNORED = {
    "data_module": _READERS, "train_reader_num_workers": _READERS, "val_reader_num_workers": _READERS,
    "reader_pool_type": _READERS, "mp_start_method": "Spark's workers start the ranks",
    "compress_sparse_cols": "sparse vectors are written as arrays",
    "transformation_edit_fields": "what transformation_fn returns says its types",
    "transformation_removed_fields": "columns that are not trained on are not read",
    "continuous_cols": "Horovod made no use of it either", "categorical_cols": "Horovod made no use of it either",
}

PARAMETERS = (
    Parameter("num_proc", "NumProc", "The number of ranks."),
    Parameter("data_module", "DataModule", "Accepted for compatibility with Horovod."),
    Parameter("model", "Model", "The Keras model."),
    Parameter("backend", "Backend", "Where ranks run: a `SparkBackend`."),
    Parameter("store", "Store", "Where data, checkpoints and logs are."),
    Parameter("custom_objects", "CustomObjects", "Classes or functions by name that Keras needs to load the model."),
    Parameter("optimizer", "Optimizer", "The optimizer; that of the compiled model by default."),
    Parameter("loss", "Loss", "The loss or losses; those of the compiled model by default."),
    Parameter("loss_weights", "LossWeights", "The weights of several losses."),
    Parameter("sample_weight_col", "SampleWeightCol", "The column of samples' weights."),
    Parameter("gradient_compression", "GradientCompression", "One of `hvd.Compression`."),
    Parameter("metrics", "Metrics", "The metrics."),
    Parameter("feature_cols", "FeatureCols", "The columns of the model's inputs."),
    Parameter("label_cols", "LabelCols", "The columns of its outputs."),
    Parameter("continuous_cols", "ContinuousCols", "Accepted for compatibility with Horovod."),
    Parameter("categorical_cols", "CategoricalCols", "Accepted for compatibility with Horovod."),
    Parameter("validation", "Validation", "A share of the rows, or a column that marks them."),
    Parameter("callbacks", "Callbacks", "Keras callbacks of all ranks.", []),
    Parameter("batch_size", "BatchSize", "The rows of a step, on each rank.", 32),
    Parameter("val_batch_size", "ValBatchSize", "The same in validation; batch_size by default."),
    Parameter("epochs", "Epochs", "The number of epochs.", 1),
    Parameter("verbose", "Verbose", "Keras's verbose on rank 0.", 1),
    Parameter("random_seed", "RandomSeed", "The seed of split, shuffling and layers."),
    Parameter("shuffle_buffer_size", "ShufflingBufferSize", "The rows among which batches are drawn."),
    Parameter("shuffle", "Shuffle", "Whether rows are shuffled in each epoch.", True),
    Parameter("partitions_per_process", "PartitionsPerProcess", "The files of data for each rank.", 10),
    Parameter("run_id", "RunId", "The run: one that has a checkpoint in the store goes on from it."),
    Parameter("train_steps_per_epoch", "TrainStepsPerEpoch", "The steps of an epoch; all rows by default."),
    Parameter("validation_steps_per_epoch", "ValidationStepsPerEpoch", "The same in validation."),
    Parameter("transformation_fn", "TransformationFn", "Called with a pandas DataFrame of the rows that were read."),
    Parameter("transformation_edit_fields", "TransformationEditFields", "Accepted for compatibility with Horovod."),
    Parameter("transformation_removed_fields", "TransformationRemovedFields", "Accepted for compatibility."),
    Parameter("train_reader_num_workers", "TrainReaderNumWorker", "Accepted for compatibility with Horovod."),
    Parameter("val_reader_num_workers", "ValReaderNumWorker", "Accepted for compatibility with Horovod."),
    Parameter("reader_pool_type", "ReaderPoolType", "Accepted for compatibility with Horovod.", "thread"),
    Parameter("label_shapes", "LabelShapes", "The shape of each label."),
    Parameter("checkpoint_callback", "CheckpointCallback", "A ModelCheckpoint instead of that of the best model."),
    Parameter("inmemory_cache_all", "InMemoryCacheAll", "Whether each rank keeps its rows in memory.", False),
    Parameter("backend_env", "BackendEnv", "Further variables of the ranks."),
    Parameter("use_gpu", "UseGpu", "Whether ranks use GPUs.", True),
    Parameter("mp_start_method", "MpStartMethod", "Accepted for compatibility with Horovod."),
    Parameter("backward_passes_per_step", "BackwardPassesPerStep", "Steps whose gradients are added up.", 1),
    Parameter("compress_sparse_cols", "CompressSparseCols", "Accepted for compatibility with Horovod.", False),
)


@with_parameters(*PARAMETERS)
class KerasEstimator(PickledParams, Estimator):  # type: ignore[misc]
    """Trains a Keras model on a DataFrame, with all ranks of a Spark job.

    `fit` writes the columns to Parquet files in the store, each rank reads its even share of the rows, and the best
    model comes back as a `KerasModel`. Metrics, early stops and the averages of gradients are those of all ranks, as
    everywhere in hvkeras. Each parameter has a getter and a setter, as in Horovod: `getBatchSize()`,
    `setBatchSize(64)`.

    Example:
        estimator = KerasEstimator(
            num_proc=4, store=Store.create("/shared/experiments"), model=model, optimizer=keras.optimizers.Adam(),
            loss="sparse_categorical_crossentropy", metrics=["accuracy"], feature_cols=["features"],
            label_cols=["label"], validation=0.1, batch_size=64, epochs=10)
        trained = estimator.fit(df)
        trained.transform(df).select("label", "label__output")

    Args:
        num_proc: The number of ranks; by default, Spark's default parallelism.
        data_module: Accepted for compatibility with Horovod: Parquet is read by pyarrow.
        model: The model.
        backend: Where ranks run, instead of `num_proc`: a `SparkBackend`.
        store: A `Store` that the driver and all ranks can reach.
        custom_objects: Classes or functions by name that Keras needs to load the model, if it cannot find them.
        optimizer: The optimizer; that of the compiled model by default. `fit` distributes it.
        loss: The loss, or one for each output; those of the compiled model by default.
        loss_weights: The weight of each loss.
        sample_weight_col: The column of samples' weights.
        gradient_compression: One of `hvd.Compression`.
        metrics: The metrics.
        feature_cols: The columns of the inputs: one for each, or several that make up the only input. Numbers, lists of
            numbers or vectors; rows take the shape of the input.
        label_cols: The column of each output.
        continuous_cols: Accepted for compatibility with Horovod.
        categorical_cols: Accepted for compatibility with Horovod.
        validation: The share of rows that are held out for validation, or a column that is true or positive in them.
        callbacks: Keras callbacks of all ranks.
        batch_size: The rows of a step, on each rank; 32 by default.
        val_batch_size: The same in validation.
        epochs: The number of epochs; 1 by default.
        verbose: 0 for no output, 1 or 2 for a line for each epoch on rank 0; 1 by default.
        random_seed: The seed of the split, of shuffling and of layers such as Dropout.
        shuffle_buffer_size: The rows among which batches are drawn; as many as take 256 MiB by default.
        shuffle: Whether rows are shuffled in each epoch.
        partitions_per_process: The Parquet files for each rank; 10 by default.
        run_id: The name of the run. If the store has a checkpoint of it, training goes on from that.
        train_steps_per_epoch: The steps of an epoch; by default, each row is trained on once.
        validation_steps_per_epoch: The same in validation.
        transformation_fn: Called on ranks with a pandas DataFrame of rows that were read; returns one with as many
            rows.
        train_reader_num_workers: Accepted for compatibility with Horovod.
        val_reader_num_workers: Accepted for compatibility with Horovod.
        reader_pool_type: Accepted for compatibility with Horovod.
        label_shapes: The shape of a row of each label.
        checkpoint_callback: A `ModelCheckpoint` that chooses which model is kept; by default, that of the best
            validation loss, or loss.
        inmemory_cache_all: Whether each rank reads its rows once, and keeps them in memory.
        backend_env: Further variables of the ranks.
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
    ) -> None:  # `keyword_only` keeps what was passed in `_input_kwargs`
        super().__init__()
        self._setDefault(**{row.name: row.default for row in PARAMETERS})
        self.setParams(**{name: value for name, value in self._input_kwargs.items() if value is not None})

    def fit(self, df: Any, params: Any = None) -> KerasModel:
        """Trains on a DataFrame.

        Args:
            df: The DataFrame.
            params: Parameters that replace those of this estimator, by `Param`; a list of them trains a list of models.

        Returns:
            The trained model.

        Raises:
            UsageError: A parameter is missing or wrong, or does not fit to the DataFrame.
            MachineError: Spark has not started the ranks in time.
            PeerError: Training failed on some rank.
        """
        made: KerasModel = super().fit(df, params)
        return made

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: object = None) -> KerasModel:
        """Trains on Parquet data that are in the store already.

        They are in `store.get_train_data_path()`, and optionally in `store.get_val_data_path()`.

        Args:
            params: Parameters that replace those of this estimator, by `Param`.
            dataset_idx: What tells several data sets of a store from each other.

        Returns:
            The trained model.

        Raises:
            UsageError: There are no such data, or a parameter is missing or wrong.
        """
        estimator: KerasEstimator = self.copy(params) if params else self
        return estimator._train(found_in(estimator._store(), dataset_idx))

    def _fit(self, df: Any) -> KerasModel:
        columns = [*self._columns("feature_cols"), *self._columns("label_cols")]
        weights = self.getSampleWeightCol()
        partitions = self._backend().num_processes() * self.getPartitionsPerProcess()
        with prepared(df, self._store(), [*columns, *([weights] if weights else [])], self.getValidation(), partitions,
                      self.getRandomSeed()) as found:
            return self._train(found)

    def _train(self, data: Prepared) -> KerasModel:
        """Trains on data in the store."""
        say_ignored("KerasEstimator", **{
            name: (None if self.getOrDefault(name) == self._defaultParamMap[self.getParam(name)]
                   else self.getOrDefault(name), why) for name, why in _IGNORED.items()})
        store, model, run_id = self._store(), self.getModel(), self.getRunId() or f"keras_{uuid.uuid4().hex[:12]}"
        family = family_of(model)
        if not family:
            raise UsageError(explain("The model must be one of Keras", "model=keras.Sequential(...)",
                                     model=type(model)))
        objects = self._objects(model)
        known = {**own_objects(model, objects["loss"], objects["metrics"]), **(self.getCustomObjects() or {})}
        plan = FitOrder(
            family=family, store=store, run_id=run_id, train_path=data.train_path, val_path=data.val_path,
            feature_cols=self._columns("feature_cols"), label_cols=self._columns("label_cols"),
            sample_weight_col=self.getSampleWeightCol(), label_shapes=self.getLabelShapes(),
            batch_size=self.getBatchSize(), val_batch_size=self.getValBatchSize() or self.getBatchSize(),
            epochs=self.getEpochs(), verbose=self.getVerbose(), seed=self.getRandomSeed(), shuffle=self.getShuffle(),
            pool=self.getShufflingBufferSize(), train_steps=self.getTrainStepsPerEpoch(),
            val_steps=self.getValidationStepsPerEpoch(), in_memory=self.getInMemoryCacheAll(),
            custom_objects=known, passes_per_step=self.getBackwardPassesPerStep(),
            objects=packed(objects))
        env = {**(self.getBackendEnv() or {}), **({} if self.getUseGpu() else {"CUDA_VISIBLE_DEVICES": ""})}
        history, trained = cast("Any", self._backend().run(train, args=(plan,), env=env)[0])
        made: KerasModel = KerasModel(
            history=history, model=model_of(trained, family, plan.custom_objects), feature_columns=plan.feature_cols,
            label_columns=plan.label_cols, custom_objects=plan.custom_objects, run_id=run_id,
            _metadata=dict(data.kinds))
        return made

    def _objects(self, model: Any) -> dict[str, Any]:
        """Returns what ranks compile and train with."""
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
            raise UsageError(explain("KerasEstimator takes num_proc or a backend", "leave one of them out",
                                     num_proc=self.getNumProc(), backend=backend))
        return cast(Backend, backend) if backend is not None else SparkBackend(self.getNumProc(), verbose=1)
