"""Distributed optimizers and tapes that keep the gradients of selected layers local to each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from hvkeras.collectives.compression import Compression
from hvkeras.collectives.operations import Average
from hvkeras.errors import UsageError, explain
from hvkeras.gradients.distributed import Distributed
from hvkeras.gradients.optimizer import DistributedOptimizer
from hvkeras.gradients.tape import DistributedGradientTape
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.typing import CompressorLike, GradientTapeLike, LayerLike, OptimizerT, VariableLike
from hvkeras.typing import DistributedGradientTape as Tape


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's public name
    optimizer: OptimizerT, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average,
    groups: int | Sequence[Sequence[VariableLike]] | None = None, process_set: ProcessSet = global_process_set,
    local_layers: LayerLike | Iterable[LayerLike] | None = None, scale_local_gradients: bool = True,
    compile_update: bool | str = "auto", shard_update: bool | str = "auto",
) -> OptimizerT:
    """Makes an optimizer reduce its gradients over all ranks, except those of local layers.

    Example:
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[model.get_layer("mine")])

    Args:
        optimizer: As for `DistributedOptimizer`, like all parameters except `local_layers`.
        name: See `DistributedOptimizer`.
        device_dense: See `DistributedOptimizer`.
        device_sparse: See `DistributedOptimizer`.
        compression: See `DistributedOptimizer`.
        sparse_as_dense: See `DistributedOptimizer`.
        gradient_predivide_factor: See `DistributedOptimizer`.
        op: See `DistributedOptimizer`.
        groups: See `DistributedOptimizer`.
        process_set: See `DistributedOptimizer`.
        local_layers: One or several layers. They may be built later, but before the first step.
        scale_local_gradients: Whether the gradients of local layers are divided by the number of ranks.
        compile_update: See `DistributedOptimizer`.
        shard_update: See `DistributedOptimizer`; the state of local layers stays on each rank.

    Returns:
        The optimizer.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `DistributedOptimizer`, or `local_layers` contains something other than a layer.
        UnsupportedError: As for `DistributedOptimizer`.
    """
    layers = _layers(local_layers)
    distributed = DistributedOptimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients, compile_update=compile_update,
        shard_update=shard_update)
    cast(Distributed, distributed).keep_local(layers)
    return distributed


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's public name
    gradtape: GradientTapeLike, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none, sparse_as_dense: bool = False, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: int | Sequence[Sequence[VariableLike]] | None = None, process_set: ProcessSet = global_process_set,
    local_layers: LayerLike | Iterable[LayerLike] | None = None, scale_local_gradients: bool = True,
) -> Tape:
    """Makes a gradient tape reduce its gradients over all ranks, except those of local layers.

    Example:
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[:1])

    Args:
        gradtape: As for `DistributedGradientTape`, like all parameters except `local_layers`.
        device_dense: See `DistributedGradientTape`.
        device_sparse: See `DistributedGradientTape`.
        compression: See `DistributedGradientTape`.
        sparse_as_dense: See `DistributedGradientTape`.
        op: See `DistributedGradientTape`.
        gradient_predivide_factor: See `DistributedGradientTape`.
        num_groups: See `DistributedGradientTape`.
        groups: See `DistributedGradientTape`.
        process_set: See `DistributedGradientTape`.
        local_layers: One or several layers. They may be built later, but before gradients are computed.
        scale_local_gradients: Whether the gradients of local layers are divided by the number of ranks.

    Returns:
        The tape.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `DistributedGradientTape`, or `local_layers` contains something other than a layer.
    """
    layers = _layers(local_layers)
    tape = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
                                   gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)
    tape.keep_local(layers)
    return tape


def _layers(given: Any) -> list[Any]:
    layers = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    wrong = [layer for layer in layers if not hasattr(layer, "trainable_weights")]
    if wrong:
        raise UsageError(explain("local_layers must be a layer or a list of layers", received=wrong[0]))
    return layers
