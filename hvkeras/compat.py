"""Everything that reaches into Keras beyond its public API, and all differences between its versions.

Three families of optimizers exist: Keras 3's, tf_keras's, and tf_keras's legacy ones
(`tf_keras.optimizers.legacy`). Each has one method through which every update goes (the seam):
`apply` in Keras 3, `apply_gradients` in tf_keras. Under mixed precision a `LossScaleOptimizer`
stands before it and decides there whether to skip the step, so that one is a seam as well.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

KERAS, TF_KERAS, TF_KERAS_LEGACY = "keras", "tf_keras", "tf_keras.legacy"


def default_keras() -> Any:
    """The Keras that `tf.keras` is: Keras 3, or tf_keras when `TF_USE_LEGACY_KERAS` says so."""
    if tf.keras.Model.__module__.startswith("tf_keras."):
        import tf_keras

        return tf_keras
    import keras

    return keras


def is_keras_3(keras: Any) -> bool:
    """Whether a Keras module is Keras 3 rather than tf_keras."""
    return str(keras.__name__) == "keras"


# Optimizers.


def family_of(optimizer: Any) -> str | None:
    """Which family an optimizer is of; None for anything else. Imports no Keras that is not there yet."""
    keras: Any = sys.modules.get("keras")
    tf_keras: Any = sys.modules.get("tf_keras")
    if hasattr(keras, "optimizers") and isinstance(optimizer, keras.optimizers.Optimizer):
        return KERAS
    if tf_keras is not None:
        if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
            return TF_KERAS_LEGACY
        if isinstance(optimizer, tf_keras.optimizers.Optimizer):
            return TF_KERAS
    return None


def foreign_backend() -> str | None:
    """The backend of Keras 3 if it is not TensorFlow."""
    keras: Any = sys.modules.get("keras")
    name = str(keras.backend.backend()) if hasattr(keras, "backend") else "tensorflow"
    return None if name == "tensorflow" else name


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a `LossScaleOptimizer`; None if it is not one."""
    if not any(cls.__name__.startswith("LossScaleOptimizer") for cls in type(optimizer).__mro__):
        return None
    return getattr(optimizer, "inner_optimizer", None)


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the optimizer's variables, unless they exist."""
    with tf.init_scope():
        if family_of(optimizer) == TF_KERAS_LEGACY:
            optimizer._create_all_weights(list(variables))
        elif not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            optimizer.build(list(variables))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """All variables of an optimizer: iterations, learning rate, slots and the loss scale."""
    found = optimizer.variables
    variables = list(found() if family_of(optimizer) == TF_KERAS_LEGACY else found)
    # What tf_keras keeps out of `variables`:
    loss_scale: Any = getattr(optimizer, "_loss_scale", None)
    if hasattr(loss_scale, "current_loss_scale"):
        variables += [loss_scale.current_loss_scale, loss_scale.counter]
    plain = inner_optimizer(optimizer) or optimizer
    others = plain.__dict__.get("_hyper", {"learning_rate": plain.__dict__.get("_learning_rate")})
    known = {id(variable) for variable in variables}
    return variables + [other for _, other in sorted(others.items())
                        if isinstance(other, tf.Variable) and id(other) not in known]


def advance_iterations(optimizer: Any) -> None:
    """Counts a step in which nothing is applied."""
    _counter(optimizer).assign_add(1)


def step_counter(optimizer: Any) -> int:
    """How many steps of training an optimizer has counted; passes that only accumulate count as well.

    Steps that a `LossScaleOptimizer` of Keras 3 skipped do not.
    """
    return int(value_of(_counter(optimizer)))


def _counter(optimizer: Any) -> Any:
    """The variable that counts an optimizer's steps."""
    optimizer = inner_optimizer(optimizer) or optimizer
    # In newer Keras 3 `iterations` is not the variable: it leaves out the passes of gradient_accumulation_steps.
    return getattr(optimizer, "_iterations", optimizer.iterations) if family_of(optimizer) == KERAS else (
        optimizer.iterations)


def learning_rate_source(optimizer: Any) -> Any:
    """What an optimizer takes its learning rate from: a variable, number, schedule or function; None for several."""
    optimizer = inner_optimizer(optimizer) or optimizer
    if hasattr(optimizer, "_inner_optimizers"):
        return None
    if family_of(optimizer) == TF_KERAS_LEGACY:
        return optimizer._hyper.get("learning_rate")
    return getattr(optimizer, "__dict__", {}).get("_learning_rate")


def learning_rate(optimizer: Any) -> float | None:
    """An optimizer's learning rate; None where it is not one number that can be set."""
    source = native(learning_rate_source(optimizer))
    if isinstance(source, tf.Variable):
        return float(value_of(source))
    return float(source) if isinstance(source, (int, float)) else None


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Sets the learning rate that `learning_rate` reads."""
    (inner_optimizer(optimizer) or optimizer).learning_rate = value


def as_learning_rate(optimizer: Any, value: float) -> float:
    """What becomes of a number in the optimizer's variable, which has fewer digits than Python's numbers."""
    source = native(learning_rate_source(optimizer))
    return float(source.dtype.as_numpy_dtype(value)) if isinstance(source, tf.Variable) else float(value)


def is_schedule(thing: Any) -> bool:
    """Whether this is a learning rate schedule of any Keras."""
    return any(cls.__name__ == "LearningRateSchedule" for cls in type(thing).__mro__)


def velocities(optimizer: Any) -> list[tf.Variable]:
    """The slots whose values are in proportion to the learning rate: the momenta of SGD and RMSprop.

    Other optimizers (Adam, Lion, Muon, ...) average gradients before the learning rate comes in.
    """
    optimizer = inner_optimizer(optimizer) or optimizer
    family = family_of(optimizer)
    if family == TF_KERAS_LEGACY:
        return [slots["momentum"] for slots in optimizer._slots.values() if "momentum" in slots
                and type(optimizer).__name__ in ("SGD", "RMSprop")]
    names = {"SGD": "momentums", "RMSprop": "_momentums"}
    known = [names[cls.__name__] for cls in type(optimizer).__mro__ if cls.__name__ in names]
    if not known or not optimizer.momentum:
        return []
    return [native(slot) for slot in getattr(optimizer, known[0], ()) if slot is not None]


def reduces_elsewhere(arguments: dict[str, Any]) -> bool:
    """Whether the caller of tf_keras's `apply_gradients` says that the gradients are reduced already."""
    return bool(arguments.get("skip_gradients_aggregation")) or not arguments.get("experimental_aggregate_gradients",
                                                                                 True)


@contextlib.contextmanager
def attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute for a while, past the `__setattr__` of optimizers."""
    before = instance.__dict__.get(name)
    instance.__dict__[name] = value
    try:
        yield
    finally:
        instance.__dict__[name] = before


# Dynamic subclasses.


def subclass_like(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    """Makes a subclass of `mixin` and `base` that is saved under the name of `base`."""
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    exported = {name: base.__dict__[name] for name in ("_keras_api_names", "_keras_api_names_v1")
                if name in base.__dict__}  # tf_keras looks its public names up there
    made: type = type(base)(base.__name__, (mixin, base), {**namespace, **exported, **attributes})
    for module, tables in _NAMES_BY_CLASS:
        if module in sys.modules:
            for table in tables:
                names = getattr(sys.modules[module], table, {})
                if base in names:
                    names[made] = names[base]
    return made


# Where Keras looks up the public name of a class that it saves. Without these the file would name
# Keras's private modules, which move between versions.
_NAMES_BY_CLASS = (
    ("keras.src.api_export", ("REGISTERED_OBJS_TO_NAMES",)),
    ("keras.src.saving.object_registration", ("GLOBAL_CUSTOM_NAMES",)),
    ("tf_keras.src.saving.object_registration", ("_GLOBAL_CUSTOM_NAMES",)),
)


def adopt_class(instance: Any, cls: type) -> None:
    """Makes an existing object an instance of a subclass, past the `__setattr__` of optimizers."""
    object.__setattr__(instance, "__class__", cls)


# Hooks into Keras's own classes, each set once.


def hook_loss_scale(family: str, around: Callable[..., Any]) -> None:
    """Puts `around(original, optimizer, gradients, variables)` before the finite check of `LossScaleOptimizer`.

    Args:
        family: Whose `LossScaleOptimizer`.
        around: Takes a function that finishes the step with the gradients it is given, the
            `LossScaleOptimizer`, the gradients and their variables.
    """
    if family == KERAS:
        import keras

        hook(keras.optimizers.LossScaleOptimizer, "apply", functools.partial(_keras_step, around))
        return
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    for cls in (loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3):
        hook(cls, "apply_gradients", functools.partial(_tf_keras_step, around))


def _keras_step(around: Callable[..., Any], original: Callable[..., Any], self: Any, grads: Any,
                trainable_variables: Any = None) -> Any:
    return around(lambda reduced: original(self, reduced, trainable_variables), self, grads,
                  self._trainable_variables if trainable_variables is None else trainable_variables)


def _tf_keras_step(around: Callable[..., Any], original: Callable[..., Any], self: Any, grads_and_vars: Any,
                   *args: Any, **kwargs: Any) -> Any:
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    if reduces_elsewhere(kwargs):
        return original(self, pairs, *args, **kwargs)
    return around(lambda reduced: original(self, list(zip(reduced, variables, strict=True)), *args, **kwargs), self,
                  [gradient for gradient, _ in pairs], variables)


def hook_jit_compile(refuse: Callable[[], bool]) -> None:
    """Makes Keras 3's `jit_compile="auto"` mean False while `refuse` says so."""
    import keras

    def resolve(original: Callable[..., Any], self: Any) -> Any:
        resolved = original(self)
        return False if resolved and refuse() else resolved

    hook(keras.Model, "_resolve_auto_jit_compile", resolve)


def hook_model_calls(around: Callable[..., Any]) -> None:
    """Puts `around(original, model, *args, **kwargs)` around every call of a model."""
    for family in loaded_families():
        hook(sys.modules[family].Model, "__call__", around)


def hook(cls: type, method: str, replacement: Callable[..., Any]) -> bool:
    """Puts `replacement(original, self, *args, **kwargs)` in the place of a method, once.

    Args:
        cls: The class; its subclasses are hooked with it unless they have a method of their own.
        method: The method's name.
        replacement: What runs instead; it calls `original(self, ...)` where it wants to.

    Returns:
        Whether the class has that method.
    """
    original = getattr(cls, method, None)
    if original is None:
        return False
    if not hasattr(original, "_hvkeras_hook"):

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, self, *args, **kwargs)

        hooked._hvkeras_hook = True  # type: ignore[attr-defined]
        _hooked.append((cls, method, cls.__dict__.get(method)))
        setattr(cls, method, hooked)
    return True


def hook_stop_training(family: str, agreed: Callable[[Any, bool], bool]) -> None:
    """Makes `model.stop_training` read `agreed(model, own)`, where `own` is what this rank has set."""

    def read(model: Any) -> bool:
        return agreed(model, bool(model.__dict__.get("stop_training", False)))

    def write(model: Any, value: bool) -> None:
        model.__dict__["stop_training"] = value

    cls = sys.modules[family].Model
    if not hasattr(cls.__dict__.get("stop_training"), "_hvkeras_hook"):
        # Assigning what an attribute reads already is dropped by TensorFlow, so instances may lack one of their own.
        _hooked.append((cls, "stop_training", False))
        cls.stop_training = _HookedAttribute(read, write)


class _HookedAttribute(property):
    _hvkeras_hook = True


def unhook_all() -> None:
    """Gives every hooked class back its own methods."""
    while _hooked:
        cls, method, own = _hooked.pop()
        if own is None:
            delattr(cls, method)  # it was inherited
        else:
            setattr(cls, method, own)


# Class, method, and what stood in the class itself; the latest last.
_hooked: list[tuple[type, str, Any]] = []


# Training: `fit`, `evaluate`, their logs and their data.


def loaded_families() -> list[str]:
    """The Kerases that this process has: the one that `tf.keras` is, and any other that is imported."""
    default_keras()
    return [name for name in (KERAS, TF_KERAS) if hasattr(sys.modules.get(name), "Model")]


@dataclass(frozen=True)
class TrainingHooks:
    """What stands around the training methods of a Keras model; each calls the original that it is given first.

    Attributes:
        fit: Around `fit`.
        evaluate: Around `evaluate`.
        reset_metrics: Around `reset_metrics`.
        logs: Around the method that makes the logs of an epoch or an evaluation from the metrics, outside of graphs.
        data: Called with a `KerasData` or `TfKerasData` whenever data is made ready to be iterated over.
        stop_training: Called with a model and what this rank set; says what `model.stop_training` is.
    """

    fit: Callable[..., Any]
    evaluate: Callable[..., Any]
    reset_metrics: Callable[..., Any]
    logs: Callable[..., Any]
    data: Callable[[Any], None]
    stop_training: Callable[[Any, bool], bool]


def hook_training(family: str, hooks: TrainingHooks) -> list[str]:
    """Sets the hooks for the models of one Keras.

    Returns:
        What this version of Keras lacks, in words; empty as a rule.
    """
    model = sys.modules[family].Model
    if family == KERAS:
        from keras.src.backend.tensorflow import trainer

        source, method = getattr(trainer, "TFEpochIterator", object), "__init__"
        seen_as: Any = KerasData
        logs = "_get_metrics_result_or_logs"
    else:
        from tf_keras.src.engine import data_adapter

        source, method = data_adapter.DataHandler, "_configure_dataset_and_inferred_steps"
        seen_as = TfKerasData
        logs = "_validate_and_get_metrics_result"

    def ready(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hooks.data(seen_as(self))

    hook_stop_training(family, hooks.stop_training)
    found = {name: hook(model, name, getattr(hooks, name)) for name in ("fit", "evaluate", "reset_metrics")}
    found["the logs of fit"] = hook(model, logs, hooks.logs)
    found["the data of fit"] = source is not object and hook(source, method, ready)
    return [what for what, there in found.items() if not there]


def bound_fit(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call of Keras's own `fit` by name, with their defaults."""
    owner = next(module for module in loaded_families() if isinstance(model, sys.modules[module].Model))
    bound = inspect.signature(sys.modules[owner].Model.fit).bind(model, *arguments, **named)
    bound.apply_defaults()
    return bound


def callback_class(model: Any) -> Any:
    """The base class of callbacks for a model."""
    owner = next(module for module in loaded_families() if isinstance(model, sys.modules[module].Model))
    return sys.modules[owner].callbacks.Callback


def steps_per_execution(model: Any) -> int:
    """How many steps of the model run in one call of its train function."""
    steps: Any = getattr(model, "steps_per_execution", None)
    steps = getattr(model, "_steps_per_execution", 1) if steps is None else steps
    return int(steps.numpy() if hasattr(steps, "numpy") else steps)


def forget_train_function(model: Any) -> None:
    """Makes Keras trace the training step anew."""
    model.train_function = None


class KerasData:
    """What Keras 3's `fit` or `evaluate` iterates over.

    Attributes:
        steps: `steps_per_epoch` as the user gave it, or None.
        batches: The batches that one pass over the data has; None if unknown, -1 if they never end.
        last_rows: The rows of the last batch; None if unknown.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.steps: int | None = iterator.steps_per_epoch
        adapter = iterator.data_adapter
        self.batches = _batches(adapter.num_batches, iterator._distributed_dataset)
        self.last_rows = _rows(lambda: adapter.partial_batch_size or adapter.batch_size)

    def change(self, dataset: Callable[[Any], Any], batches: int | None) -> None:
        """Replaces the data.

        Args:
            dataset: Makes the new dataset from the old one.
            batches: How many batches it has; None if unknown.
        """
        self._iterator._distributed_dataset = dataset(self._iterator._distributed_dataset)
        self._iterator.data_adapter = _Counted(self._iterator.data_adapter, batches)
        self._iterator._num_batches = batches

    def pass_by_pass(self, of_one_pass: Callable[[Any], Any], batches: int | None) -> None:
        """Changes what each pass over the data gives; parameters as for `change`."""
        self.change(of_one_pass, batches)

    def take_steps(self, steps: int) -> None:
        """Sets `steps_per_epoch`."""
        self._iterator.steps_per_epoch = steps


class TfKerasData:
    """What tf_keras's `fit` or `evaluate` iterates over; attributes as of `KerasData`."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        adapter = handler._adapter
        self.steps: int | None = handler._steps_per_epoch
        self.batches = _batches(adapter.get_size(), handler._dataset if adapter.get_size() is None else None)
        self.last_rows = _rows(lambda: adapter.partial_batch_size() or adapter.batch_size())

    def change(self, dataset: Callable[[Any], Any], batches: int | None) -> None:
        """Replaces the data; as of `KerasData`."""
        handler = self._handler
        handler._dataset = dataset(handler._dataset)
        if self.steps is None:
            handler._inferred_steps = batches
            handler._infer_steps = lambda *_: batches

    def pass_by_pass(self, of_one_pass: Callable[[Any], Any], batches: int | None) -> None:
        """Changes what each pass gives; data of arrays are one dataset that holds all passes."""
        passes = self.batches
        if self._handler._adapter.should_recreate_iterator() or not passes:
            self.change(of_one_pass, batches)
            return
        self.change(lambda dataset: dataset.window(passes).flat_map(
            lambda *parts: of_one_pass(_zipped(parts))), batches)

    def take_steps(self, steps: int) -> None:
        """Sets `steps_per_epoch`; as of `KerasData`."""
        self._handler._steps_per_epoch = self._handler._inferred_steps = steps


def _rows(ask: Callable[[], Any]) -> int | None:
    """The rows of the last batch, which many a data adapter cannot tell."""
    try:
        return ask() or None
    except (NotImplementedError, IndexError, TypeError, ValueError):
        return None


def _zipped(parts: Any) -> Any:
    """The dataset of elements whose components a window gives as datasets."""
    return tf.data.Dataset.zip(parts) if len(parts) > 1 or isinstance(parts[0], (tuple, dict)) else parts[0]


def _batches(counted: Any, dataset: Any) -> int | None:
    if counted is not None:
        return int(counted) if counted != float("inf") else -1
    cardinality = getattr(dataset, "cardinality", None)
    number = int(cardinality()) if cardinality is not None else int(tf.data.UNKNOWN_CARDINALITY)
    if number == tf.data.INFINITE_CARDINALITY:
        return -1
    return number if number >= 0 else None


class _Counted:
    """A data adapter of Keras 3 that has another number of batches."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def metric_groups(model: Any) -> list[list[Any]]:
    """The model's metrics in order; one list for each entry of `model.metrics`, empty where it is not built yet."""
    return [list(metric.metrics) if type(metric).__name__ == "CompileMetrics" else [metric] for metric in model.metrics]


def is_of_keras(cls: type) -> bool:
    """Whether Keras itself defines a class."""
    return cls.__module__.split(".")[0] in ("keras", "tf_keras")


def aggregation_of(variable: Any) -> str:
    """How a metric's variable says that replicas are merged: "sum" (the default), "mean", ..."""
    aggregation = getattr(variable, "aggregation", None)
    name = getattr(aggregation, "name", aggregation)  # an enum in TensorFlow, a string in Keras 3
    return str(name or "sum").lower()


# Models and variables.


def model_weights(model: Any) -> list[Any]:
    """The model's trainable and non-trainable weights: no metrics, no states of random seeds."""
    return list(model.weights)


def repair_optimizer(model: Any, filepath: Any) -> None:
    """Gives a model from a Keras 3 HDF5 file the optimizer state of the file.

    Keras builds that optimizer on an empty list of variables, so that `fit` fails for want of known
    ones, with or without hvkeras.
    """
    broken: Any = getattr(model, "optimizer", None)
    if family_of(broken) != KERAS or not broken.built or broken._trainable_variables or not model.trainable_variables:
        return
    import h5py  # type: ignore[import-untyped]
    from keras.src.legacy.saving import legacy_h5_format

    model.optimizer = type(broken).from_config(broken.get_config())
    model.optimizer.build(model.trainable_variables)
    with h5py.File(filepath, "r") as file:
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
        for variable, value in zip(model.optimizer.variables, values, strict=True):
            variable.assign(value[()])


def endings_of_saved(weights_only: bool) -> tuple[str, ...]:
    """How a path can end that Keras saves to: any way in tf_keras."""
    if default_keras().__name__ == TF_KERAS:
        return ("",)
    return (".weights.h5",) if weights_only else (".keras", ".h5")


def settle_direction(callback: Any) -> None:
    """Has a callback find out whether it looks for the least or the greatest value.

    Newer Keras 3 does so at the end of an epoch, and fails before that if it is to save after so many batches.
    """
    if getattr(callback, "monitor_op", True) is None and hasattr(callback, "_set_monitor_op"):
        callback._set_monitor_op()


def steps_by_itself(model: Any) -> bool:
    """Whether the model trains in Keras's own `train_step`, through `model.optimizer`."""
    return type(model).train_step.__module__.split(".")[0] in ("keras", "tf_keras")


def value_of(variable: Any) -> Any:
    """The value of a variable, as NumPy's; asked of tf_keras's session where eager execution was disabled."""
    variable = native(variable)
    if tf.executing_eagerly() or not isinstance(variable, tf.Variable):
        return variable.numpy() if isinstance(variable, tf.Variable) else variable
    return default_keras().backend.get_value(variable)


def multiply(variables: Sequence[tf.Variable], factor: float) -> None:
    """Multiplies variables in one call; by tf_keras's session where eager execution was disabled."""
    if tf.executing_eagerly():
        _multiply(list(variables), tf.constant(factor, tf.float64))
        return
    backend = default_keras().backend
    backend.batch_set_value([(one, value * value.dtype.type(factor)) for one, value in
                             zip(variables, backend.batch_get_value(list(variables)), strict=True)])


@tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
def _multiply(variables: list[tf.Variable], factor: Any) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))


def run_in_session(make: Callable[[], Any]) -> None:
    """Runs what has no value: at once, or by tf_keras's session where eager execution was disabled.

    Args:
        make: Acts in eager mode, and makes an operation elsewhere.
    """
    operation = make()
    if operation is not None:
        tf.compat.v1.keras.backend.get_session().run(operation)


def native(variable: Any) -> Any:
    """The `tf.Variable` of a Keras 3 variable; any other as it is."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def variable_key(variable: Any) -> Any:
    """What tells variables apart, the same for a Keras 3 variable and its `tf.Variable`."""
    return native(variable)._unique_id


def variable_name(variable: Any) -> str:
    """A variable's name for messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "unnamed variable")


# Batches loaded by Python: `PyDataset` of Keras 3, `Sequence` of tf_keras.


def batches_base(data: Any) -> Any:
    """The base class whose batches Keras loads: `PyDataset` or tf_keras's `Sequence`; None for other data."""
    keras: Any = sys.modules.get("keras")
    tf_keras: Any = sys.modules.get("tf_keras")
    if hasattr(keras, "utils") and isinstance(data, keras.utils.PyDataset):
        return keras.utils.PyDataset
    if hasattr(tf_keras, "utils") and isinstance(data, tf_keras.utils.Sequence):
        return tf_keras.utils.Sequence
    return None


def count_batches(data: Any) -> int | None:
    """How many batches a `PyDataset` or `Sequence` has; None if they never end."""
    found = data.num_batches if hasattr(data, "num_batches") else len(data)
    return None if found is None else int(found)


def loading_options(data: Any) -> dict[str, Any]:
    """How Keras 3 is to load a `PyDataset`, as its constructor takes it; tf_keras is told in `fit`."""
    names = ("workers", "use_multiprocessing", "max_queue_size")
    return {name: getattr(data, name) for name in names if hasattr(data, name)} if hasattr(data, "num_batches") else {}


def overrides(instance: Any, method: str) -> bool:
    """Whether the class of a `PyDataset` or `Sequence` has a method of its own in the place of Keras's."""
    base = batches_base(instance)
    return getattr(type(instance), method, None) is not getattr(base, method, None)


def hook_shuffle_of_batches(base: type, decide: Callable[[Any, bool], bool]) -> bool:
    """Puts `decide(data, shuffle)` before Keras's choice whether it loads the batches of `data` in random order.

    Args:
        base: `PyDataset` or `Sequence`, whichever the data are.
        decide: Takes the data and what the caller of `fit` said; returns what Keras is to do.

    Returns:
        Whether this Keras has the place for it.
    """
    name = base.__module__.split(".")[0]
    module, adapter = {"keras": ("keras.src.trainers.data_adapters.py_dataset_adapter", "PyDatasetAdapter"),
                       "tf_keras": ("tf_keras.src.engine.data_adapter", "KerasSequenceAdapter")}[name]

    def adapt(original: Callable[..., Any], self: Any, x: Any, *args: Any, shuffle: bool = False, **kwargs: Any) -> Any:
        return original(self, x, *args, shuffle=decide(x, shuffle), **kwargs)

    found = getattr(sys.modules.get(module), adapter, None)
    return found is not None and hook(found, "__init__", adapt)
