"""`DistributedGradientTape`: a gradient tape whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.global_batch import require_own_batches
from hvkeras.collectives.operations import Average
from hvkeras.compat import graphs
from hvkeras.errors import UsageError, explain
from hvkeras.gradients import replicas
from hvkeras.gradients.options import ReductionOptions, checked_groups, checked_layers, chosen_compression
from hvkeras.gradients.reducer import GradientReducer
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import this_process
from hvkeras.typing import CompressorLike, GradientTapeLike, LayerLike, VariableLike
from hvkeras.typing import DistributedGradientTape as Tape


class LocalSources:
    """Keys of the variables whose gradients tapes of this process have not reduced: they differ between ranks."""

    def __init__(self) -> None:
        self.keys: set[Any] = set()


def local_sources() -> LocalSources:
    """Return the local sources of all tapes in this process."""
    return this_process().part(LocalSources)


class _DistributedTape:
    """Wrapper of a tape, which reduces the gradients that `gradient` returns."""

    def __init__(self, tape: Any, exchange: ReductionOptions) -> None:
        self._tape, self._exchange = tape, exchange
        self.process_set: ProcessSet = exchange.process_set
        self.scale_local_gradients: bool = exchange.scale_local_gradients
        self._local: set[Any] = set()
        self._local_layers: list[Any] = []

    def __enter__(self) -> _DistributedTape:  # noqa: PYI034 - Self came with Python 3.11
        self._tape.__enter__()
        return self

    def __exit__(self, *failure: object) -> Any:
        return self._tape.__exit__(*failure)

    @property  # type: ignore[misc]  # read-only
    def __class__(self) -> type:  # so that isinstance(tape, tf.GradientTape), as in Horovod
        return type(self._tape)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._tape), *vars(_DistributedTape), *vars(self)})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tape, name)

    def register_local_source(self, source: VariableLike) -> None:
        """Exclude the gradient of a variable from the reduction.

        Args:
            source: A variable that is later passed to `gradient`.
        """
        self._local.add(_key(source))
        local_sources().keys.add(_key(source))

    def keep_local(self, layers: Sequence[LayerLike]) -> None:
        """Exclude the gradients of layers from the reduction; the layers need not be built yet.

        Args:
            layers: Layers of the model.
        """
        self._local_layers.extend(layers)

    @graphs.without_autograph
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, unconnected_gradients: Any = None,
        use_generic_names: bool = False,  # noqa: ARG002 - Horovod's parameter
    ) -> Any:
        """Compute gradients like `tf.GradientTape.gradient`, and reduce them over the ranks.

        If another tape records this call or the enclosing function (for a gradient penalty, for instance), the
        results are themselves differentiable, with the gradients of `hvd.allreduce`.

        Args:
            target: The tensor or structure of tensors to differentiate.
            sources: A nested structure of variables and watched tensors.
            output_gradients: As for `tf.GradientTape.gradient`.
            unconnected_gradients: As for `tf.GradientTape.gradient`.
            use_generic_names: Accepted for compatibility with Horovod: ranks match gradients by their order.

        Returns:
            The reduced gradients, in the structure of `sources`.
        """
        unconnected = tf.UnconnectedGradients.NONE if unconnected_gradients is None else unconnected_gradients
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected)
        within = replicas.strategy_within_rank()
        if within is None and graphs.reducing_strategy() is not None:
            return gradients  # the strategy already reduces over all ranks
        flat, variables = tf.nest.flatten(gradients), sources_of(sources)
        local = self._local_keys()

        def over_ranks(rank_gradients: Sequence[Any]) -> list[Any]:
            return GradientReducer(self._exchange, local, differentiable=True).reduce(rank_gradients, variables)

        if within is None:
            reduced = over_ranks(flat)
        else:
            reduced = replicas.as_shares(replicas.reduce_over_both(flat, over_ranks))
        return tf.nest.pack_sequence_as(gradients, reduced)

    @graphs.without_autograph
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Compute gradients like `gradient`, separately for local sources and the others.

        Example:
            tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[:1])
            local, shared = tape.get_local_and_global_gradients(loss, model.trainable_variables)
            optimizer.apply_gradients((gradient, variable) for variable, gradient in local + shared)

        Args:
            target: As for `gradient`.
            sources: A list of variables and watched tensors.
            output_gradients: As for `gradient`.
            use_generic_names: As for `gradient`.
        """
        sources = list(sources)
        gradients = self.gradient(target, sources, output_gradients, use_generic_names=use_generic_names)
        local, pairs = self._local_keys(), list(zip(sources, gradients, strict=True))
        return ([pair for pair in pairs if _key(pair[0]) in local],
                [pair for pair in pairs if _key(pair[0]) not in local])

    def _local_keys(self) -> set[Any]:
        found = self._local | {_key(weight) for layer in self._local_layers for weight in layer.trainable_weights}
        local_sources().keys.update(found)
        return found


def sources_of(sources: Any) -> list[Any]:
    """Return the sources of a tape in order, with the variable interface that gradient reduction expects."""
    return [_Source(source, number) for number, source in enumerate(tf.nest.flatten(sources))]


class _Source:
    """A source of a tape, which may be a tensor, with the variable interface that gradient reduction expects."""

    def __init__(self, source: Any, number: int) -> None:
        self.source = source
        self._unique_id = _key(source)
        self.overwrite_with_gradient = compat.is_overwritten(source)
        self.name = compat.variable_name(source) if hasattr(source, "trainable") else f"source {number}"


def _key(source: Any) -> Any:
    return compat.variable_key(source) if hasattr(compat.as_tf_variable(source), "_unique_id") else id(source)


def DistributedGradientTape(  # noqa: N802 - Horovod's public name
    gradtape: GradientTapeLike, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none,
    sparse_as_dense: bool = False, op: int = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: int | Sequence[Sequence[VariableLike]] | None = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Tape:
    """Make a gradient tape reduce its gradients over all ranks.

    Example:
        with tf.GradientTape() as tape:
            loss = loss_of(model(x), y)
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    Args:
        gradtape: A `tf.GradientTape`, used or not, persistent or not.
        device_dense: The device for dense gradients; chosen by TensorFlow by default.
        device_sparse: The device for sparse gradients.
        compression: How gradients are compressed: `Compression.none`, `.fp16`, `.bf16`, `.int8` (between hosts) or a
            `Compressor`.
        sparse_as_dense: Whether sparse gradients are converted to dense tensors instead of gathered.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: With Average, gradients are divided by this factor before the sum, and by
            size / factor after it.
        num_groups: The older name of an integer `groups`.
        groups: None for buckets by size; a number of groups; or lists of variables to fuse.
        process_set: The ranks to reduce over. Other ranks may continue to train; their gradients stay unchanged.
        scale_local_gradients: Whether gradients of local sources (see `register_local_source`) are
            divided by the number of ranks.

    Returns:
        A tape that works like `gradtape`, with the additional methods `register_local_source(source)` and
        `get_local_and_global_gradients(target, sources)`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: `gradtape` is not a tape or is already distributed, or another argument is invalid.
    """
    require_own_batches("DistributedGradientTape")
    if isinstance(gradtape, _DistributedTape):
        raise UsageError(explain("A tape can be distributed only once",
                                 "remove one DistributedGradientTape() call", gradtape=gradtape))
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(explain("DistributedGradientTape takes a tf.GradientTape", gradtape=gradtape))
    exchange = ReductionOptions(
        "the tape", op, chosen_compression(compression), sparse_as_dense, gradient_predivide_factor,
        checked_groups(num_groups, groups), process_set, scale_local_gradients, device_dense, device_sparse,
    )
    return cast(Tape, _DistributedTape(gradtape, exchange))


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's public name
    gradtape: GradientTapeLike, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none, sparse_as_dense: bool = False, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: int | Sequence[Sequence[VariableLike]] | None = None, process_set: ProcessSet = global_process_set,
    local_layers: LayerLike | Iterable[LayerLike] | None = None, scale_local_gradients: bool = True,
) -> Tape:
    """Make a gradient tape reduce its gradients over all ranks, except those of local layers.

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
    layers = checked_layers(local_layers)
    tape = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
                                   gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)
    tape.keep_local(layers)
    return tape
