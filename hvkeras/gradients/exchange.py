"""How gradients are reduced: the parameters that optimizers and tapes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.operations import Adasum, Average, Scaling, Sum, operation_of
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet, global_process_set


@dataclass(frozen=True)
class Exchange:
    """How gradients are reduced.

    Attributes:
        name: The owner of the gradients, for messages and to distinguish exchanges.
        op: Average, Sum or Adasum.
        compression: How the gradients are compressed.
        sparse_as_dense: Whether `tf.IndexedSlices` are converted to dense tensors.
        gradient_predivide_factor: Average divides by this before the sum, and by size / this after it.
        groups: 0 for buckets by size, else a number of groups, or lists of variables.
        process_set: The participating ranks; the gradients of other ranks stay unchanged.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        device_dense: The device for dense gradients.
        device_sparse: The device for `tf.IndexedSlices`.
        update: What ranks must have in common about what follows the reduction; "" for nothing.
    """

    name: str
    op: int = Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: Any = 0
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    device_dense: str = ""
    device_sparse: str = ""
    update: str = ""

    def __post_init__(self) -> None:
        operation_of(self.op)
        if self.op not in (Average, Sum, Adasum):
            raise UsageError(explain("Gradients are combined by hvd.Average, hvd.Sum or hvd.Adasum", op=self.op))
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise UsageError(explain("gradient_predivide_factor splits an average in two, so it needs op=hvd.Average",
                                     gradient_predivide_factor=self.gradient_predivide_factor, op=self.op))
        if not self.gradient_predivide_factor > 0:
            raise UsageError(explain("gradient_predivide_factor must be positive",
                                     gradient_predivide_factor=self.gradient_predivide_factor))
        if not all(callable(getattr(self.compression, name, None)) for name in ("compress", "decompress")):
            raise UsageError(explain("compression must be one of hvd.Compression.none, .fp16, .bf16, or a Compressor",
                                     compression=self.compression))
        if not isinstance(self.process_set, ProcessSet):
            raise UsageError(explain("process_set must be a ProcessSet", process_set=self.process_set))

    def specs_of_results(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """What the reduced gradients will be.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None.
            variables: Their variables.

        Returns:
            A `tf.TensorSpec`, a `tf.IndexedSlicesSpec` or None for each.
        """
        becomes_dense = self.sparse_as_dense and len(self.process_set.members()) > 1 and self.process_set.included()

        def spec(gradient: Any, variable: Any) -> Any:
            if gradient is None:
                return None
            if isinstance(gradient, tf.IndexedSlices) and not becomes_dense:
                return tf.IndexedSlicesSpec(gradient.shape, gradient.dtype)
            given = tf.TensorShape(getattr(gradient, "shape", None))
            shape = given.merge_with(variable.shape) if given.is_compatible_with(variable.shape) else None
            return tf.TensorSpec(shape, getattr(gradient, "dtype", variable.dtype))

        return [spec(*pair) for pair in zip(gradients, variables, strict=True)]

    @property
    def scaling(self) -> Scaling:
        """The processing of each gradient before and after the sum."""
        factor = self.gradient_predivide_factor
        return Scaling(self.op, self.compression, 1.0 / factor, factor)


class Reducing:
    """What optimizers that reduce gradients say about it; mixed into a dynamic subclass of the optimizer's class."""

    _hvkeras_exchange: ClassVar[Exchange]

    @property
    def process_set(self) -> ProcessSet:
        """The ranks whose gradients are combined."""
        return self._hvkeras_exchange.process_set

    @property
    def scale_local_gradients(self) -> bool:
        """Whether gradients that stay on this rank are divided by the number of ranks."""
        return self._hvkeras_exchange.scale_local_gradients


def checked_groups(num_groups: Any, groups: Any) -> Any:
    """Unifies Horovod's two parameters for groups.

    Args:
        num_groups: The older parameter: a number of groups, 0 for none.
        groups: None, a number of groups, or a list of lists of variables.

    Returns:
        0, a number, or a tuple of frozensets of variable keys.

    Raises:
        UsageError: The parameters have any other value.
    """
    wanted = num_groups if groups is None else groups
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
        return wanted
    if isinstance(wanted, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in wanted):
        try:
            return tuple(frozenset(compat.variable_key(variable) for variable in group) for group in wanted)
        except AttributeError:
            pass
    raise UsageError(explain("groups must be a number of groups, not negative, or a list of lists of variables",
                             num_groups=num_groups, groups=groups))
