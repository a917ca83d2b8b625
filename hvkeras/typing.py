# mypy: disable-error-code="empty-body"
# ruff: noqa: D102 - the methods are those of TensorFlow and Keras
"""Types for the signatures of hvkeras, since neither TensorFlow nor Keras ships any.

Names that end in `Like` are protocols of arguments, with the members that a function needs. Classes of TensorFlow,
Keras 3 and tf_keras implement them, and other classes may do so.

The other names are the types of results and base classes. For a type checker, each is a subclass of TensorFlow's or
Keras's class with that name, so results can be passed to functions that need a `tf.Tensor` or a `keras.Model`. At run
time they are unused protocols: functions return objects of TensorFlow and Keras, and nothing is imported here.

Example:
    from hvkeras.typing import Tensor, TensorLike

    def mean_over_ranks(loss: TensorLike) -> Tensor:
        return hvd.allreduce(loss)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tensorflow import DType, TensorShape
    from tensorflow import GradientTape as _GradientTape
    from tensorflow import Operation as _Operation
    from tensorflow import Tensor as _Tensor

    _Untyped = Any  # a subclass of it is compatible with any other class
else:
    _GradientTape = _Operation = _Tensor = _Untyped = Protocol

__all__ = [
    "AdaptableLike", "ArrayOrTensor", "Callback", "CallbackLike", "CompressorLike", "Data", "DatasetLike",
    "DistributedGradientTape", "GradientTapeLike", "History", "InputContext", "LayerLike", "Logs", "Model", "ModelLike",
    "Operation", "OptimizerLike", "PathLike", "Strategy", "Tensor", "TensorLike", "VariableLike",
]


# Types of arguments.


class HasShape(Protocol):
    """Tensors, variables, `tf.IndexedSlices`, and arrays of any library."""

    @property
    def shape(self) -> Any:
        """The static shape."""


TensorLike: TypeAlias = HasShape | complex | str | bytes | Sequence["TensorLike"]
"""Arguments of `tf.convert_to_tensor`, and `tf.IndexedSlices`."""

PathLike: TypeAlias = str | os.PathLike[str]
"""A file system path."""

Logs: TypeAlias = dict[str, Any]
"""Logs of Keras for callbacks: numbers by name, which callbacks may change."""

Data: TypeAlias = object
"""Data for `fit` and `predict`: arrays, structures of arrays, a `tf.data.Dataset`, a `PyDataset` or a `Sequence`."""


class VariableLike(Protocol):
    """A variable of TensorFlow or Keras."""

    @property
    def dtype(self) -> Any:
        """The dtype: a `tf.DType`, or its name in Keras."""

    @property
    def shape(self) -> Any:
        """The static shape."""

    def assign(self, value: Any, /) -> Any:
        """Set the value."""


class OptimizerLike(Protocol):
    """An optimizer of Keras 3, tf_keras or TensorFlow 1."""

    def apply_gradients(self, grads_and_vars: Any, /) -> Any:
        """Apply gradients, as pairs of a gradient and its variable."""


class LayerLike(Protocol):
    """A layer of Keras 3 or tf_keras."""

    @property
    def trainable_weights(self) -> Any:
        """The layer's trainable variables."""


class AdaptableLike(Protocol):
    """A layer, or a `FeatureSpace`, that adapts to data before training."""

    def adapt(self, data: Any, /) -> Any:
        """Compute the state from data."""


class ModelLike(Protocol):
    """A model of Keras 3 or tf_keras."""

    @property
    def trainable_variables(self) -> Any:
        """The trainable variables of all layers."""

    def predict(self, x: Any, /) -> Any:
        """Return predictions."""


class CallbackLike(Protocol):
    """A callback of Keras 3 or tf_keras."""

    def set_model(self, model: Any, /) -> Any:
        """Set the model."""

    def on_epoch_end(self, epoch: Any, logs: Any = ..., /) -> Any:
        """Handle the end of an epoch."""


class GradientTapeLike(Protocol):
    """A `tf.GradientTape`."""

    def watch(self, tensor: Any, /) -> Any:
        """Record operations on a tensor."""

    def gradient(self, target: Any, sources: Any, /) -> Any:
        """Compute gradients."""


class DatasetLike(Protocol):
    """A `tf.data.Dataset`."""

    @property
    def element_spec(self) -> Any:
        """The types of an element."""

    def __iter__(self) -> Iterator[Any]: ...


class CompressorLike(Protocol):
    """A compressor: one of `hvkeras.Compression`, or another class or object with its two methods."""

    def compress(self, tensor: Any, /) -> tuple[Any, Any]:
        """Return the tensor to send, and a context for `decompress`."""

    def decompress(self, tensor: Any, ctx: Any, /) -> Any:
        """Return the tensor in its original form."""


OptimizerT = TypeVar("OptimizerT", bound=OptimizerLike)
VariableT = TypeVar("VariableT", bound=VariableLike)
CallbackT = TypeVar("CallbackT", bound=CallbackLike)


# Types of results, and base classes.


class ArrayOrTensor(Protocol):
    """Common members of tensors and NumPy's arrays and numbers."""

    @property
    def dtype(self) -> Any:
        """The dtype."""

    @property
    def shape(self) -> Any:
        """The shape."""

    def __array__(self) -> NDArray[Any]: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __float__(self) -> float: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __abs__(self) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __rtruediv__(self, other: Any, /) -> Any: ...
    def __pow__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...


class Tensor(_Tensor):  # type: ignore[misc]  # TensorFlow ships no types
    """A `tf.Tensor`."""

    @property
    def dtype(self) -> DType:
        """The dtype."""

    @property
    def shape(self) -> TensorShape:
        """The static shape; within a graph, dimensions may be unknown."""

    def numpy(self) -> NDArray[Any]:
        """The value as an array, or as a NumPy number if it is a scalar; only in eager mode."""

    def __array__(self, dtype: Any = ...) -> NDArray[Any]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Tensor]: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __float__(self) -> float: ...
    def __index__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Tensor: ...
    def __neg__(self) -> Tensor: ...
    def __abs__(self) -> Tensor: ...
    def __invert__(self) -> Tensor: ...
    def __add__(self, other: TensorLike, /) -> Tensor: ...
    def __radd__(self, other: TensorLike, /) -> Tensor: ...
    def __sub__(self, other: TensorLike, /) -> Tensor: ...
    def __rsub__(self, other: TensorLike, /) -> Tensor: ...
    def __mul__(self, other: TensorLike, /) -> Tensor: ...
    def __rmul__(self, other: TensorLike, /) -> Tensor: ...
    def __truediv__(self, other: TensorLike, /) -> Tensor: ...
    def __rtruediv__(self, other: TensorLike, /) -> Tensor: ...
    def __floordiv__(self, other: TensorLike, /) -> Tensor: ...
    def __rfloordiv__(self, other: TensorLike, /) -> Tensor: ...
    def __mod__(self, other: TensorLike, /) -> Tensor: ...
    def __rmod__(self, other: TensorLike, /) -> Tensor: ...
    def __pow__(self, other: TensorLike, /) -> Tensor: ...
    def __rpow__(self, other: TensorLike, /) -> Tensor: ...
    def __matmul__(self, other: TensorLike, /) -> Tensor: ...
    def __rmatmul__(self, other: TensorLike, /) -> Tensor: ...
    def __and__(self, other: TensorLike, /) -> Tensor: ...
    def __or__(self, other: TensorLike, /) -> Tensor: ...
    def __lt__(self, other: TensorLike, /) -> Tensor: ...
    def __le__(self, other: TensorLike, /) -> Tensor: ...
    def __gt__(self, other: TensorLike, /) -> Tensor: ...
    def __ge__(self, other: TensorLike, /) -> Tensor: ...


class Operation(_Operation):  # type: ignore[misc]
    """A `tf.Operation` of a graph or a session."""


class DistributedGradientTape(_GradientTape):  # type: ignore[misc]
    """A `tf.GradientTape` whose gradients are reduced over all ranks."""

    process_set: Any
    scale_local_gradients: bool

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of a source and its gradient: those that stay on this rank, and those that are reduced."""

    def register_local_source(self, source: VariableLike) -> None:
        """Exclude the gradient of a variable from reduction."""

    def keep_local(self, layers: Sequence[LayerLike]) -> None:
        """Exclude the gradients of layers from reduction."""


class Model(_Untyped):  # type: ignore[misc]
    """A `keras.Model`."""


class Callback(_Untyped):  # type: ignore[misc]
    """A `keras.callbacks.Callback`."""

    model: Model
    params: dict[str, Any]

    def set_params(self, params: dict[str, Any]) -> None: ...
    def set_model(self, model: ModelLike) -> None: ...
    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None: ...
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None: ...
    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_train_begin(self, logs: Logs | None = None) -> None: ...
    def on_train_end(self, logs: Logs | None = None) -> None: ...
    def on_test_begin(self, logs: Logs | None = None) -> None: ...
    def on_test_end(self, logs: Logs | None = None) -> None: ...
    def on_predict_begin(self, logs: Logs | None = None) -> None: ...
    def on_predict_end(self, logs: Logs | None = None) -> None: ...


class History(Callback, _Untyped):  # type: ignore[misc]
    """A `keras.callbacks.History`."""

    model: Model
    epoch: list[int]
    history: dict[str, list[Any]]


class Strategy(_Untyped):  # type: ignore[misc]
    """A `tf.distribute.Strategy`."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are combined."""

    def scope(self) -> AbstractContextManager[Any]:
        """The context in which models and variables are created."""


class InputContext(_Untyped):  # type: ignore[misc]
    """A `tf.distribute.InputContext`."""

    @property
    def num_input_pipelines(self) -> int:
        """The number of workers."""

    @property
    def input_pipeline_id(self) -> int:
        """The index of the worker."""
