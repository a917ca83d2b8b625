"""A driver that trains estimators on DataFrames: `python spark_estimator.py MASTER FOLDER [CHECK...]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession

from harness.checks import check, run_checks
from hvkeras.spark import KerasEstimator, KerasModel, SparkBackend, Store

FOLDER = Path(sys.argv[2])
ROWS = 203  # an odd number: no rank has as many as the other, nor any row group
spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").config(
    "spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "2").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
random = np.random.default_rng(0)
x = random.standard_normal((ROWS, 3))
frame = spark.createDataFrame(
    [(*map(float, row), float(row.sum()), int(row.sum() > 0), number) for number, row in enumerate(x)],
    ["a", "b", "c", "total", "sign", "number"])
assembled = VectorAssembler(inputCols=["a", "b", "c"], outputCol="features").transform(frame)


def network(outputs: int = 1, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs, **options)])


def estimator(**options: Any) -> KerasEstimator:
    given = {"num_proc": 2, "store": Store.create(FOLDER / "store"), "model": network(),
             "optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "feature_cols": ["features"],
             "label_cols": ["total"], "batch_size": 16, "epochs": 8, "verbose": 0, "random_seed": 3}
    given |= options
    return KerasEstimator(**{name: value for name, value in given.items() if value is not None})


class RowsSeen(keras.callbacks.Callback):
    """Notes which rows this rank has trained on: the model's metric gets their numbers as sample weights."""

    def on_train_end(self, logs=None):
        import hvkeras as hvd

        Path(FOLDER / f"steps.{hvd.rank()}").write_text(str(self.params["steps"]))


@check
def a_dataframe_becomes_a_model_that_predicts():
    trained = estimator(validation=0.2, metrics=["mae"]).fit(assembled)
    predicted = trained.transform(assembled)
    rows = predicted.select("total", "total__output").collect()
    left = sorted(path.name for path in (FOLDER / "store").iterdir())
    run = FOLDER / "store" / "runs" / trained.getRunId()
    return (trained.getHistory(), predicted.dtypes[-1], max(abs(row[0] - row[1]) for row in rows), left,
            sorted(path.name for path in run.iterdir()), type(trained.getModel().optimizer).__name__)


@check
def several_columns_make_up_an_input_and_uneven_rows_are_all_trained_on():
    trained = estimator(feature_cols=["a", "b", "c"], callbacks=[RowsSeen()], epochs=2, partitions_per_process=3,
                        inmemory_cache_all=True).fit(frame)
    steps = [int((FOLDER / f"steps.{rank}").read_text()) for rank in (0, 1)]
    return steps, trained.getHistory()["loss"]


@check
def a_column_may_mark_validation_and_weigh_samples():
    from pyspark.sql import functions

    held_out = functions.col("number") % 4 == 0
    weight = functions.when(held_out, 2.0).otherwise(0.0)
    marked = assembled.withColumn("held_out", held_out).withColumn("weight", weight)
    return estimator(validation="held_out", epochs=1, sample_weight_col="weight").fit(marked).getHistory()


@check
def classes_of_the_driver_and_probabilities_come_along():
    class Doubled(keras.layers.Layer):
        def call(self, inputs):
            return 2.0 * inputs

    def own_loss(labels, outputs):
        return keras.losses.sparse_categorical_crossentropy(labels, outputs)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), Doubled(), keras.layers.Dense(2, activation="softmax")])
    trained = estimator(model=model, loss=own_loss, metrics=["accuracy"], label_cols=["sign"],
                        optimizer=keras.optimizers.Adam(0.05), custom_objects={"own_loss": own_loss}).fit(assembled)
    rows = trained.transform(assembled).select("sign", "sign__output").collect()
    right = sum(int(np.argmax(row["sign__output"])) == row["sign"] for row in rows)
    return right / len(rows), trained.getHistory()["accuracy"][-1]


@check
def all_can_be_saved_and_loaded_also_in_a_pipeline():
    own = estimator(epochs=2, run_id="saved", metrics=[keras.metrics.MeanAbsoluteError()])
    own.write().overwrite().save(str(FOLDER / "estimator"))
    again = KerasEstimator.load(str(FOLDER / "estimator"))
    assert again.uid == own.uid and again.getBatchSize() == 16 and type(again.getOptimizer()).__name__ == "SGD"
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b", "c"], outputCol="features"), again]).fit(frame)
    pipeline.write().overwrite().save(str(FOLDER / "pipeline"))
    loaded = PipelineModel.load(str(FOLDER / "pipeline"))
    first, second = (one.transform(frame).select("total__output").collect() for one in (pipeline, loaded))
    loaded.stages[-1].write().overwrite().save(str(FOLDER / "model"))
    return first == second, KerasModel.load(str(FOLDER / "model")).getRunId(), len(first)


@check
def a_run_goes_on_from_its_checkpoint_and_data_may_be_there_already():
    store = Store.create(FOLDER / "own")
    from pyspark.ml.functions import vector_to_array

    assembled.withColumn("features", vector_to_array("features")).write.parquet(f"file://{store.get_train_data_path()}")
    own = estimator(store=store, run_id="twice", epochs=2)
    first = own.fit_on_parquet()
    second = own.fit_on_parquet({own.epochs: 1})
    return first.getHistory()["loss"], second.getHistory()["loss"]


@check
def two_outputs_train_on_two_labels():
    inputs = keras.Input((3,))
    keras.utils.set_random_seed(1)
    outputs = [keras.layers.Dense(1, name="total")(inputs), keras.layers.Dense(2, name="sign")(inputs)]
    model = keras.Model(inputs, outputs)
    loss = ["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
    trained = estimator(model=model, loss=loss, loss_weights=[1.0, 0.5], label_cols=["total", "sign"], epochs=2,
                        ).setBackwardPassesPerStep(1).fit(assembled)
    found = trained.setOutputCols(["t", "s"]).transform(assembled).select("t", "s").head()
    return sorted(trained.getHistory()), type(found[0]).__name__, len(found[1])


@check
def a_backend_a_transformation_and_what_is_ignored():
    def doubled(rows):
        rows["total"] = 2 * rows["total"]
        return rows

    backend = SparkBackend(num_proc=1, env={"HVKERAS_LOG_LEVEL": "ERROR"}, verbose=0)
    trained = estimator(num_proc=None, backend=backend, transformation_fn=doubled, reader_pool_type="process",
                        train_reader_num_workers=4, epochs=12).fit(assembled)
    rows = trained.transform(assembled).select("total", "total__output").collect()
    return max(abs(2 * row[0] - row[1]) for row in rows)


@check
def mistakes_are_told():
    found = []
    for options in ({"feature_cols": ["nothing"]}, {"store": None}, {"loss": None}, {"validation": 2.0},
                    {"feature_cols": ["pair"], "epochs": 1}):
        try:
            estimator(**options).fit(assembled.selectExpr("*", "array(1, 2) as pair"))
        except Exception as error:
            found.append([type(error).__name__, str(error)])
    holes = assembled.selectExpr("*", "if(number = 5, null, total) as holes")
    try:
        estimator(label_cols=["holes"], epochs=1).fit(holes)
    except Exception as error:
        found.append([type(error).__name__, str(error)])
    return found


if __name__ == "__main__":
    os.chdir(FOLDER)
    run_checks(after=spark.stop, chosen=sys.argv[3:])
