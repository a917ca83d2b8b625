"""Options of distributed optimizers and tapes: reduction of gradients, and updates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvkeras import compat
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.operations import Adasum, Average, Sum, operation_of
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session


def chosen_compression(compression: Any) -> Any:
    """Return the compressor of an optimizer or tape: the given one, or else that of HVKERAS_COMPRESSION."""
    chosen = current_session().settings.compression if compression is Compression.none else ""
    return getattr(Compression, chosen) if chosen else compression


@dataclass(frozen=True)
class ReductionOptions:
    """Options of the reduction of gradients; see `DistributedOptimizer`.

    Attributes:
        name: Name of the optimizer or tape, for messages and to distinguish reductions.
        op: Average, Sum or Adasum.
        compression: A compressor, such as `Compression.fp16`.
        sparse_as_dense: Whether `tf.IndexedSlices` are converted to dense tensors.
        gradient_predivide_factor: Average divides by this before the sum, and by size / this after it.
        groups: 0 for buckets by size; a number of groups; or lists of variables.
        process_set: The participating ranks; the gradients of other ranks stay unchanged.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        device_sparse: The device for `tf.IndexedSlices`.
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

    def __post_init__(self) -> None:
        operation_of(self.op)
        if self.op not in (Average, Sum, Adasum):
            raise UsageError(explain("op must be hvd.Average, hvd.Sum or hvd.Adasum", op=self.op))
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise UsageError(explain("gradient_predivide_factor splits an average in two, so it needs op=hvd.Average",
                                     gradient_predivide_factor=self.gradient_predivide_factor, op=self.op))
        if not self.gradient_predivide_factor > 0:
            raise UsageError(explain("gradient_predivide_factor must be positive",
                                     gradient_predivide_factor=self.gradient_predivide_factor))
        if not all(callable(getattr(self.compression, name, None)) for name in ("compress", "decompress")):
            raise UsageError(explain("compression must be one of hvd.Compression.none, .fp16, .bf16, .int8, or a"
                                     " Compressor", compression=self.compression))
        if self.compression is Compression.int8 and self.op == Adasum:
            raise UsageError(explain("Compression.int8 compresses sums and averages, not Adasum",
                                     "pass op=hvd.Average, or Compression.fp16", op=self.op))
        if not isinstance(self.process_set, ProcessSet):
            raise UsageError(explain("process_set must be a ProcessSet", process_set=self.process_set))


@dataclass(frozen=True)
class Options:
    """Options of a distributed optimizer. They are stored in its class, so that copies and `from_config` have them.

    Attributes:
        exchange: Options of the reduction of gradients.
        family: The Keras that it belongs to, see `hvkeras.compat.families`; "" for optimizers of TensorFlow 1.
        scales_loss: Whether it is a `LossScaleOptimizer`.
        passes: The number of backward passes per update.
        averages_passes: Whether the sum over passes is divided by their number.
        compile_update: Whether XLA compiles the update: "auto", True or False.
        shard_kind: Unit of the sharded update, "elements" or "variables"; "" if the update is not sharded.
    """

    exchange: ReductionOptions
    plain: type
    family: str = ""
    scales_loss: bool = False
    passes: int = 1
    averages_passes: bool = False
    compile_update: bool | str = "auto"
    shard_kind: str = ""

    def __post_init__(self) -> None:
        if self.shard_kind and self.exchange.compression is Compression.int8:
            raise UsageError(explain("Compression.int8 sums complete gradients, and shard_update=True only parts of"
                                     " them", "pass shard_update=False, or Compression.fp16"))


def checked_groups(num_groups: Any, groups: Any) -> Any:
    """Validate and merge Horovod's two parameters for groups.

    Args:
        num_groups: The older parameter: a number of groups, 0 for none.
        groups: None, a number of groups, or a list of lists of variables.

    Returns:
        0, a number of groups, or a tuple of frozensets of variable keys.

    Raises:
        UsageError: A parameter has any other value.
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


def checked_layers(local_layers: Any) -> list[Any]:
    """Return local layers as a list.

    Args:
        local_layers: A layer, an iterable of layers, or None.

    Raises:
        UsageError: It contains something other than a layer.
    """
    given = [] if local_layers is None else local_layers
    layers = list(given) if isinstance(given, Iterable) else [given]
    invalid = [layer for layer in layers if not hasattr(layer, "trainable_weights")]
    if invalid:
        raise UsageError(explain("local_layers must be a layer or a list of layers", received=invalid[0]))
    return layers
