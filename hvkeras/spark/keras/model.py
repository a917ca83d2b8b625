"""`KerasModel`: a trained Keras model that predicts on DataFrames."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark import keyword_only
from pyspark.ml import Model as SparkModel

from hvkeras.errors import UsageError, explain
from hvkeras.spark.common.data import VECTOR
from hvkeras.spark.common.params import Parameter, PickledParams, with_parameters
from hvkeras.spark.common.pickling import family_of, model_file, model_of, own_objects, packed, unpacked
from hvkeras.spark.common.reader import shaped

if TYPE_CHECKING:
    from hvkeras.typing import Model

PARAMETERS = (
    Parameter("history", "History", "The losses and metrics of each epoch."),
    Parameter("model", "Model", "The Keras model."),
    Parameter("feature_columns", "FeatureColumns", "The columns of the model's inputs."),
    Parameter("label_columns", "LabelColumns", "The label column of each output."),
    Parameter("custom_objects", "CustomObjects", "Custom classes and functions of the model by name."),
    Parameter("run_id", "RunId", "The name of the training run."),
    Parameter("_metadata", "_Metadata", "The kind of each column: scalar, array or vector."),
    Parameter("_floatx", "_Floatx", "Accepted for compatibility with Horovod."),
    Parameter("output_cols", "OutputCols", "The columns of predictions; by default <label>__output."),
)
_loaded: dict[str, Any] = {}  # the last model of this Python worker, by a unique key


@with_parameters(*PARAMETERS)
class KerasModel(PickledParams, SparkModel):  # type: ignore[misc]
    """Spark ML model that predicts with a trained Keras model, as `KerasEstimator.fit` returns it.

    Example:
        trained = estimator.fit(df)
        trained.transform(df).select("label", "label__output")
        trained.write().overwrite().save("/shared/trained")
        keras_model = KerasModel.load("/shared/trained").getModel()

    Args:
        history: The losses and metrics of each epoch.
        model: The Keras model.
        feature_columns: The columns of the model's inputs.
        label_columns: The label column of each output.
        custom_objects: Custom classes and functions of the model by name.
        run_id: The name of the training run.
        _metadata: The kind of each column: scalar, array or vector.
        _floatx: Accepted for compatibility with Horovod.
    """

    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(
        self, *, history: Mapping[str, Sequence[float]] | None = None, model: Model | None = None,
        feature_columns: Sequence[str] | None = None, label_columns: Sequence[str] | None = None,
        custom_objects: Mapping[str, Any] | None = None, run_id: str | None = None,
        _metadata: Mapping[str, str] | None = None, _floatx: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(**{row.name: row.default for row in PARAMETERS})
        self.setParams(**{name: value for name, value in self._input_kwargs.items() if value is not None})

    def setLabelColoumns(self, value: Sequence[str]) -> KerasModel:  # noqa: N802 - Horovod's name, and its spelling
        """Set `label_columns`."""
        return self._set(label_columns=value)  # type: ignore[no-any-return]

    def transform(self, df: Any, params: Mapping[Any, Any] | None = None) -> Any:
        """Add a column of predictions for each output.

        Args:
            df: The DataFrame.
            params: Parameters that override those of this model, by `Param`.

        Returns:
            The DataFrame with these columns; nothing is computed before it is used.

        Raises:
            UsageError: A column is missing.
        """
        return super().transform(df, dict(params) if params else None)

    def _transform(self, df: Any) -> Any:
        """Add a column for each output: a number for labels that are numbers, otherwise an array or a vector."""
        from pyspark.ml.functions import array_to_vector, vector_to_array
        from pyspark.sql import functions

        model, features, labels = self.getModel(), list(self.getFeatureColumns()), list(self.getLabelColumns())
        outputs = list(self.getOrDefault("output_cols") or [f"{label}__output" for label in labels])
        if len(outputs) != len(labels):
            raise UsageError(explain("There must be an output column for each label column", "setOutputCols([...])",
                                     output_cols=outputs, label_columns=labels))
        missing = [name for name in features if name not in df.columns]
        if missing:
            raise UsageError(explain("The DataFrame must have the columns that the model was trained on",
                                     "the columns are " + ", ".join(df.columns), column=missing[0]))
        kinds: Mapping[str, str] = self.getOrDefault("_metadata") or {}
        shapes = _output_shapes(model, len(outputs))
        scalars = [math.prod(shape) == 1 and kinds.get(label, "scalar") == "scalar"
                   for label, shape in zip(labels, shapes, strict=True)]
        columns = [vector_to_array(functions.col(name), dtype="float32")
                   if type(df.schema[name].dataType).__name__ == "VectorUDT" else functions.col(name)
                   for name in features]
        struct = f"{outputs[0]} of hvkeras"
        result = df.withColumn(struct, _predictor(df, model, self.getCustomObjects() or {}, scalars)(*columns))
        for index, (label, output) in enumerate(zip(labels, outputs, strict=True)):
            column = functions.col(f"`{struct}`")[f"output_{index}"]
            result = result.withColumn(output, array_to_vector(column) if kinds.get(label) == VECTOR else column)
        return result.drop(struct)


def _output_shapes(model: Any, count: int) -> list[tuple[int, ...]]:
    shape = model.output_shape
    shapes = list(shape.values()) if isinstance(shape, dict) else shape if isinstance(shape, list) else [shape]
    if len(shapes) != count:
        raise UsageError(explain("The model must have an output for each label column", "setLabelColumns([...])",
                                 outputs=len(shapes), label_columns=count))
    return [tuple(size or 0 for size in each[1:]) for each in shapes]


def _predictor(df: Any, model: Any, custom_objects: Mapping[str, Any], scalars: Sequence[bool]) -> Any:
    """Return the pandas UDF that predicts; each Python worker loads the model once."""
    import pandas as pd
    from pyspark.sql.functions import pandas_udf
    from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType

    custom = {**own_objects(model), **custom_objects}
    broadcast = df.sparkSession.sparkContext.broadcast(packed((model_file(model), family_of(model), custom)))
    key = uuid.uuid4().hex
    names = [f"output_{index}" for index in range(len(scalars))]
    schema = StructType([StructField(name, DoubleType() if scalar else ArrayType(FloatType()))
                         for name, scalar in zip(names, scalars, strict=True)])

    def predict(batches: Any) -> Any:
        for batch in batches:
            columns = [_array_of(column) for column in (batch if isinstance(batch, tuple) else (batch,))]
            outputs = (predictions(_model_of(key, broadcast), columns) if len(columns[0])
                       else [np.zeros([0, 1])] * len(names))
            yield pd.DataFrame({name: output.reshape(-1).astype("float64") if scalar
                                else list(output.reshape(len(output), -1).astype("float32"))
                                for name, output, scalar in zip(names, outputs, scalars, strict=True)})

    # Spark derives the kind of UDF from the type hints, which postponed evaluation has turned into strings.
    predict.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": Iterator[pd.DataFrame]}
    return pandas_udf(predict, schema)


def _array_of(column: Any) -> Any:
    return np.stack(list(column)) if column.dtype == object and len(column) else column.to_numpy()


def _model_of(key: str, broadcast: Any) -> Any:
    if key not in _loaded:
        import tensorflow as tf

        with contextlib.suppress(RuntimeError):  # TensorFlow is initialized already; otherwise, predict on the CPU
            tf.config.set_visible_devices([], "GPU")
        _loaded.clear()
        data, family, custom = unpacked(broadcast.value)
        _loaded[key] = model_of(data, family, custom, compiled=False)
    return _loaded[key]


def predictions(model: Any, features: Sequence[Any]) -> list[Any]:
    """Return the predictions of a Keras model: an array for each output.

    Args:
        model: The Keras model.
        features: An array of shape `[rows, ...]` for each column.
    """
    shapes = [tuple(each.shape)[1:] for each in getattr(model, "inputs", None) or ()]
    if len(shapes) == 1 and len(features) > 1:
        features = [np.concatenate([feature.reshape(len(feature), -1) for feature in features], axis=1)]
    if len(shapes) == len(features):
        features = [shaped("features", feature, shape) for feature, shape in zip(features, shapes, strict=True)]
    found = model.predict_on_batch(features[0] if len(features) == 1 else list(features))
    found = list(found.values()) if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else [found]
    return [np.asarray(output) for output in found]
