"""`DistributedOptimizer`: a Keras optimizer that first reduces its gradients over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from hvkeras import compat
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.global_batch import require_own_batches
from hvkeras.collectives.operations import Average, Sum
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients.optimizer_classes import distribute, distributed_part, state_of
from hvkeras.gradients.options import Options, ReductionOptions, checked_groups, checked_layers, chosen_compression
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session
from hvkeras.typing import CompressorLike, LayerLike, OptimizerT, VariableLike


def DistributedOptimizer(  # noqa: N802 - Horovod's public name
    optimizer: OptimizerT | str, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, num_groups: int = 0,
    groups: int | Sequence[Sequence[VariableLike]] | None = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True, compile_update: bool | str = "auto", shard_update: bool | str = "auto",
) -> OptimizerT:
    """Make an optimizer reduce its gradients over all ranks, before clipping, loss scaling and weight decay.

    Change the class of the given optimizer in place, so that it retains its state, and return it. The optimizer is
    saved as a plain Keras optimizer; `hvkeras.load_model` wraps it again.

    Example:
        hvd.init()
        optimizer = keras.optimizers.SGD(0.01 * hvd.size())
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")

    Args:
        optimizer: Any optimizer of Keras 3 or tf_keras, built or not, including a `LossScaleOptimizer`; or the name of
            one, as in `compile`.
        name: The optimizer's name in messages, by default the name of its class. The same on every rank.
        device_dense: The device for dense gradients; chosen by TensorFlow by default.
        device_sparse: The device for sparse gradients.
        compression: How gradients are compressed: `Compression.none`, `.fp16`, `.bf16`, `.int8` (between hosts) or a
            `Compressor`.
        sparse_as_dense: Whether sparse gradients (of embeddings) are converted to dense tensors instead of gathered.
        gradient_predivide_factor: With Average, gradients are divided by this factor before the sum, and by
            size / factor after it. This protects float16 from overflow.
        op: `Average`, `Sum` or `Adasum`.
        backward_passes_per_step: The number of passes whose gradients are summed locally before one reduction and
            update. `iterations` counts passes, as in Horovod.
        average_aggregated_gradients: Whether that sum is divided by the number of passes.
        num_groups: The older name of an integer `groups`.
        groups: None for buckets by size; a number of groups; or lists of variables to fuse.
        process_set: The ranks to reduce over. Other ranks may continue to train; their gradients stay unchanged.
        scale_local_gradients: Whether gradients of local variables (see `register_local_var`) are
            divided by the number of ranks.
        compile_update: Whether XLA compiles the update of the weights within the step. On CPUs, this replaces one pass
            over the weights for each operation of the optimizer by a single pass. Results differ only in the last bits.
            "auto" uses HVKERAS_COMPILE_UPDATE, by default to compile where it pays. The same on every rank.
        shard_update: Whether each rank holds and updates only a part of the optimizer's state, which divides its memory
            and time by the number of ranks (Xu et al. 2020; ZeRO stage 1). The state must be gathered to be saved, see
            `gather_optimizer`. True works for Keras's optimizers and subclasses of them. For other optimizers, pass
            "elements" if the update of an element depends on no other element, or "variables" if it depends on other
            elements of the same variable only. "auto" uses HVKERAS_SHARD_UPDATE, by default False. The same on every
            rank.

    Returns:
        The optimizer, with the additional method `register_local_var(var)`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: `optimizer` is not an optimizer or is already distributed, or another argument is invalid.
        UnsupportedError: Keras runs on a backend other than TensorFlow, or the update of this optimizer cannot be
            sharded.
    """
    require_own_batches("DistributedOptimizer")
    if isinstance(optimizer, str):
        optimizer = cast("OptimizerT", compat.default_keras().optimizers.get(optimizer))
    compat.require_no_horovod(optimizer)
    if compat.family_of(optimizer) is None:
        raise UsageError(explain("DistributedOptimizer takes an optimizer of Keras 3 or tf_keras",
                                 "pass an instance such as keras.optimizers.Adam(), or a name such as \"adam\"",
                                 optimizer=optimizer))
    if compat.family_of(optimizer) == compat.KERAS and compat.foreign_backend():
        raise UnsupportedError(explain("Keras must run on TensorFlow", "set KERAS_BACKEND=tensorflow",
                                       backend=compat.foreign_backend()))
    if distributed_part(optimizer) is not None:
        raise UsageError(explain("An optimizer can be distributed only once", "remove one DistributedOptimizer() call",
                                 optimizer=type(optimizer).__name__))
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise UsageError(explain("backward_passes_per_step must be a positive integer",
                                 backward_passes_per_step=backward_passes_per_step))
    if compile_update not in ("auto", True, False):
        raise UsageError(explain('compile_update must be "auto", True or False', compile_update=compile_update))
    kind = _kind_of_sharding(optimizer, shard_update)
    target = optimizer
    if kind and (inner := compat.inner_optimizer(optimizer)) is not None:
        target = inner  # it has the state
    exchange = ReductionOptions(
        name or type(compat.inner_optimizer(optimizer) or optimizer).__name__, op, chosen_compression(compression),
        sparse_as_dense, gradient_predivide_factor, checked_groups(num_groups, groups), process_set,
        scale_local_gradients, device_dense, device_sparse,
    )
    distribute(target, Options(
        exchange, type(target), str(compat.family_of(target)), compat.inner_optimizer(target) is not None,
        backward_passes_per_step, average_aggregated_gradients,
        "auto" if compile_update == "auto" else bool(compile_update), kind,
    ))
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's public name
    optimizer: OptimizerT, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average,
    groups: int | Sequence[Sequence[VariableLike]] | None = None, process_set: ProcessSet = global_process_set,
    local_layers: LayerLike | Iterable[LayerLike] | None = None, scale_local_gradients: bool = True,
    compile_update: bool | str = "auto", shard_update: bool | str = "auto",
) -> OptimizerT:
    """Make an optimizer reduce its gradients over all ranks, except those of local layers.

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
        shard_update: See `DistributedOptimizer`; the state of local layers is not sharded.

    Returns:
        The optimizer.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `DistributedOptimizer`, or `local_layers` contains something other than a layer.
        UnsupportedError: As for `DistributedOptimizer`.
    """
    layers = checked_layers(local_layers)
    distributed = DistributedOptimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients, compile_update=compile_update,
        shard_update=shard_update)
    part = distributed_part(distributed)
    assert part is not None
    part.layers.extend(layers)
    return distributed


def sum_over_ranks(optimizer: Any) -> None:
    """Make an optimizer of Keras 3 sum up its gradients over all ranks, if it does not yet.

    Args:
        optimizer: The optimizer of a model whose batches are those of all ranks; see `hvkeras.global_batch`.
    """
    if distributed_part(optimizer) is not None:
        return
    inner = compat.inner_optimizer(optimizer)
    exchange = ReductionOptions(type(inner or optimizer).__name__, Sum, chosen_compression(Compression.none))
    distribute(optimizer, Options(exchange, type(optimizer), str(compat.family_of(optimizer)), inner is not None))


def gather_optimizer(model_or_optimizer: Any, to: Sequence[int] = (0,)) -> None:
    """Gather the state of an optimizer with `shard_update=True`, so that it can be read or saved.

    All ranks must call this function at the same step. `fit` calls it before callbacks that save, and at its end. The
    gathered state is valid until the next step, which discards it. For other optimizers, the function does nothing.

    Example:
        for step, batch in enumerate(dataset):
            train_step(batch)
            if step % 1000 == 0:
                hvd.gather_optimizer(model)
                if hvd.rank() == 0:
                    model.save("model.keras")

    Args:
        model_or_optimizer: A compiled model, or an optimizer.
        to: The global ranks that receive the complete state, in host memory.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: A rank does not participate in the sharded update.
    """
    current_session()
    state = state_of(getattr(model_or_optimizer, "optimizer", model_or_optimizer))
    if state is not None:
        state.gather(to)


def _kind_of_sharding(optimizer: Any, wanted: bool | str) -> str:
    """Return the unit of the sharded update, "elements" or "variables"; "" if the update is not sharded."""
    if wanted not in ("auto", True, False, "elements", "variables"):
        raise UsageError(explain('shard_update must be "auto", True, False, "elements" or "variables"',
                                 shard_update=wanted))
    if not (current_session().settings.shard_update if wanted == "auto" else wanted):
        return ""
    part = compat.inner_optimizer(optimizer) or optimizer
    name = type(part).__name__
    if compat.family_of(part) == compat.TF_KERAS_LEGACY:
        raise UnsupportedError(explain("shard_update=True supports optimizers of Keras 3 and current optimizers of"
                                       " tf_keras, not legacy ones", "use the current optimizer of the same name in"
                                       " tf_keras.optimizers", optimizer=name))
    if isinstance(wanted, str) and wanted != "auto":
        return wanted
    kind = compat.kind_of_update(type(part))
    if not kind:
        raise UnsupportedError(explain(
            "shard_update=True supports optimizers whose update is known to depend on single elements or variables",
            'pass shard_update="elements" if the update of an element needs no other element, or "variables" if it'
            " needs other elements of the same variable, but no other variables", optimizer=name))
    return kind
