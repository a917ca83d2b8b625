"""`MirroredStrategyRunner`: trains with `tf.distribute` in the tasks of a Spark job.

It replaces the class of the package spark-tensorflow-distributor, supports Keras 3, and needs no configuration of
Spark's Python workers.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hvkeras.errors import UsageError, explain
from hvkeras.host.gpus import VISIBLE
from hvkeras.launcher.calls import pickled_call
from hvkeras.spark.jobs import exported, run_order
from hvkeras.spark.order import Gpus, Order
from hvkeras.spark.output import DriverOutput
from hvkeras.spark.session import configured, is_on, require_pyspark
from hvkeras.spark.task import visible_devices

ResultT = TypeVar("ResultT")
IGNORE_SSL = "tensorflow.spark.distributor.ignoreSsl"  # defined by spark-tensorflow-distributor


class MirroredStrategyRunner:
    """Runner of TensorFlow training functions on a Spark cluster, or in the driver.

    Example:
        def train(epochs):
            model = build()
            model.compile("adam", loss="mse")
            model.fit(dataset, epochs=epochs)

        MirroredStrategyRunner(num_slots=8).run(train, epochs=3)
        MirroredStrategyRunner(num_slots=4, use_gpu=False).run(train, epochs=3)

    Args:
        num_slots: The number of GPUs, or of Spark tasks if `use_gpu` is False.
        local_mode: Whether to run the function in the driver, with `tf.distribute.MirroredStrategy` on its GPUs.
        use_gpu: Whether to train on GPUs that Spark assigns to the tasks, or to the driver.
        gpu_resource_name: The name of the GPU resource in Spark.
        use_custom_strategy: Whether the function creates its own strategy. Otherwise it runs in the scope of
            `hvd.strategy("multi_worker_mirrored")`, a `tf.distribute.MultiWorkerMirroredStrategy` with which the job
            ends, and names the task, when a task is lost.

    Attributes:
        sc: The SparkContext.

    Raises:
        UsageError: An argument is invalid, Spark is not configured for GPUs, or Spark encrypts its connections.
            TensorFlow does not; tensorflow.spark.distributor.ignoreSsl=true accepts that.
        NotInstalledError: pyspark is not installed.
    """

    def __init__(self, *, num_slots: int, local_mode: bool = False, use_gpu: bool = True,
                 gpu_resource_name: str = "gpu", use_custom_strategy: bool = False) -> None:
        if not isinstance(num_slots, int) or num_slots <= 0:
            raise UsageError(explain("The number of slots must be positive", "num_slots=2", num_slots=num_slots))
        require_pyspark()
        from pyspark.sql import SparkSession

        self._slots, self._local_mode, self._use_gpu = num_slots, local_mode, use_gpu
        self._resource, self._custom = gpu_resource_name, use_custom_strategy
        self.sc: Any = SparkSession.builder.getOrCreate().sparkContext
        if local_mode:
            return
        if is_on(self.sc, "spark.ssl.enabled") and not is_on(self.sc, IGNORE_SSL):
            raise UsageError(explain("TensorFlow's connections between tasks are not encrypted, but Spark's are",
                                     f"set {IGNORE_SSL}=true in Spark's configuration to train anyway",
                                     **{"spark.ssl.enabled": "true"}))
        self.get_num_tasks()

    def get_num_tasks(self) -> int:
        """Return the number of Spark tasks: as many as are needed for all GPUs, or one for each slot without GPUs.

        Raises:
            UsageError: Spark is not configured to assign an integral number of GPUs to each task.
        """
        if not self._use_gpu:
            return self._slots
        key = f"spark.task.resource.{self._resource}.amount"
        amount = configured(self.sc, key)
        if not amount.isdecimal() or int(amount) < 1:
            raise UsageError(explain("Spark must give each task a whole number of GPUs", f"set {key}=1, or pass"
                                     " use_gpu=False to train on CPUs", **{key: amount or None}))
        return math.ceil(self._slots / int(amount))

    def run(self, train_fn: Callable[..., ResultT], **kwargs: Any) -> ResultT:
        """Run the training function, and return the result of the first task.

        In each task, TF_CONFIG describes the cluster, and CUDA_VISIBLE_DEVICES selects the GPUs of the task. The
        function can use `pyspark.BarrierTaskContext`.

        Args:
            train_fn: The function; cloudpickle pickles it, unless it runs in the driver.
            **kwargs: Its arguments.

        Raises:
            UsageError: The function cannot be pickled, or Spark has too few GPUs.
            MachineError: Spark did not start the tasks in time.
            PeerError: The function failed in a task; the message contains its traceback.
        """
        if self._local_mode:
            return self._run_in_driver(train_fn, kwargs)
        tasks = self.get_num_tasks()
        call = pickled_call(train_fn, (), kwargs) if self._custom else pickled_call(_in_scope, (train_fn,), kwargs)
        counts = [self._slots // tasks + (task < self._slots % tasks) for task in range(tasks)]
        gpus = Gpus(self._resource, counts) if self._use_gpu else Gpus(hidden=True)
        order = Order(call, tasks, secrets.token_hex(32), exported(os.environ), gpus, by_host=False, tf_config=True,
                      one_result=True)
        result: ResultT = run_order(self.sc, order, output=DriverOutput())[0]
        return result

    def _run_in_driver(self, train_fn: Callable[..., ResultT], kwargs: dict[str, Any]) -> ResultT:
        assigned = {name: info.addresses for name, info in self.sc.resources.items()}
        gpus = Gpus(self._resource, [self._slots]) if self._use_gpu else Gpus(hidden=True)
        with _with_variable(VISIBLE, visible_devices(gpus, 0, assigned, os.environ)):
            if self._custom:
                return train_fn(**kwargs)
            import tensorflow as tf

            with tf.distribute.MirroredStrategy().scope():
                return train_fn(**kwargs)


def _in_scope(train_fn: Callable[..., ResultT], **kwargs: Any) -> ResultT:
    from hvkeras.startup import strategy  # noqa: PLC0415 - imports TensorFlow

    with strategy("multi_worker_mirrored").scope():
        return train_fn(**kwargs)


@contextlib.contextmanager
def _with_variable(name: str, value: str | None) -> Iterator[None]:
    previous = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if previous is not None:
            os.environ[name] = previous
