"""`DistributedOptimizer`: a Keras optimizer that first reduces its gradients over all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.operations import Average
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients.automatic_xla import refuses_xla
from hvkeras.gradients.compiled_update import DENSE
from hvkeras.gradients.distributed import Distributed
from hvkeras.gradients.exchange import Exchange, checked_groups
from hvkeras.gradients.sharded import Sharded, begin_averages, swap_averages
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.state import current_job, is_initialized
from hvkeras.typing import CompressorLike, GradientTapeLike, OptimizerT, VariableLike

MINIMIZES = "_hvkeras_minimizes"  # the attribute of an optimizer of tf_keras while it trains by `minimize`


def DistributedOptimizer(  # noqa: N802 - Horovod's public name
    optimizer: OptimizerT, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, num_groups: int = 0,
    groups: int | Sequence[Sequence[VariableLike]] | None = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True, compile_update: bool | str = "auto", shard_update: bool | str = "auto",
) -> OptimizerT:
    """Makes an optimizer reduce its gradients over all ranks, before clipping, loss scaling and weight decay.

    The function changes the class of the given optimizer in place, so that it keeps its state, and returns it. The
    optimizer is saved as a plain Keras optimizer; `hvkeras.load_model` wraps it again.

    Example:
        hvd.init()
        optimizer = keras.optimizers.SGD(0.01 * hvd.size())
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")

    Args:
        optimizer: Any optimizer of Keras 3 or tf_keras, built or not, including a `LossScaleOptimizer`.
        name: The optimizer's name in messages; by default the name of its class. The same on every rank.
        device_dense: The device for dense gradients; chosen by TensorFlow by default.
        device_sparse: The device for sparse gradients.
        compression: How gradients are compressed: `Compression.none`, `.fp16`, `.bf16` or a `Compressor`.
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
        compile_update: Whether XLA compiles the update of the weights within the step: on CPUs one pass over them
            instead of one for each operation of the optimizer, with the same results but for the last bits. "auto"
            does where that pays, or what HVKERAS_COMPILE_UPDATE says. The same on every rank.
        shard_update: Whether each rank keeps and updates a part of the optimizer's state, which takes 1/N of its memory
            and time on N ranks (Xu et al. 2020; ZeRO stage 1). The state is gathered to be saved, see
            `gather_optimizer`. True works for the optimizers of Keras and classes derived from them. For others, say
            what the update of an element needs: "elements" if no other element of its variable, or "variables" if
            these, and nothing of other variables. "auto" does what HVKERAS_SHARD_UPDATE says, by default not. The
            same on every rank.

    Returns:
        The optimizer, now with the method `register_local_var(var)`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: `optimizer` is not an optimizer or is already distributed, or another argument is invalid.
        UnsupportedError: Keras runs on a backend other than TensorFlow, or ranks cannot share the update of this
            optimizer.
    """
    current_job()
    if compat.family_of(optimizer) is None:
        raise UsageError(explain("DistributedOptimizer takes an optimizer of Keras 3 or tf_keras",
                                 "pass an instance such as keras.optimizers.Adam()", optimizer=optimizer))
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
    exchange = Exchange(
        name or type(compat.inner_optimizer(optimizer) or optimizer).__name__, op, compression, sparse_as_dense,
        gradient_predivide_factor, checked_groups(num_groups, groups), process_set, scale_local_gradients,
        device_dense, device_sparse,
    )
    passes = (backward_passes_per_step, average_aggregated_gradients)
    compiles = "auto" if compile_update == "auto" else bool(compile_update)
    if kind and (inner := compat.inner_optimizer(optimizer)) is not None:
        distribute(inner, exchange, passes, compiles, kind)  # which has the state; the outer one stays as it is
        return optimizer
    distributed: OptimizerT = distribute(optimizer, exchange, passes, compiles, kind)
    return distributed


def _kind_of_sharding(optimizer: Any, wanted: bool | str) -> str:
    """Returns what the update of an optimizer is split into; "" if ranks do not share it."""
    if wanted not in ("auto", True, False, "elements", "variables"):
        raise UsageError(explain('shard_update must be "auto", True, False, "elements" or "variables"',
                                 shard_update=wanted))
    if not (current_job().settings.shard_update if wanted == "auto" else wanted):
        return ""
    part = compat.inner_optimizer(optimizer) or optimizer
    name = type(part).__name__
    if compat.family_of(part) == compat.TF_KERAS_LEGACY:
        raise UnsupportedError(explain("Ranks share the update of optimizers of Keras 3 and current ones of tf_keras,"
                                       " not of legacy ones", "tf_keras.optimizers has a current one of the same name",
                                       optimizer=name))
    if isinstance(wanted, str) and wanted != "auto":
        return wanted
    kind = compat.kind_of_update(type(part))
    if not kind:
        raise UnsupportedError(explain(
            "Ranks can share the update of an optimizer if it is known what an element's update needs",
            'pass shard_update="elements" if the update of an element needs no other element, or "variables" if it'
            " needs other elements of the same variable, but no other variables", optimizer=name))
    return kind


class _DistributedKeras(Distributed):
    """The hook into optimizers of Keras 3."""

    def compute_gradients(self, loss: Any, var_list: Sequence[VariableLike],
                          tape: GradientTapeLike | None = None) -> list[tuple[Any, Any]]:
        """Computes and reduces gradients, for loops that change them before they are applied.

        The following call of `apply_gradients` does not reduce them again, and with `backward_passes_per_step` applies
        them only when an update is due.

        Args:
            loss: A tensor, or a function that returns one.
            var_list: The variables.
            tape: The tape that has recorded the loss; a function needs none.

        Returns:
            Pairs of a gradient and its variable.
        """
        return self._hvkeras_reduce_computed(compat.gradients_of(loss, var_list, tape))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduces the gradients over the ranks, then applies them."""
        finish = super().apply  # type: ignore[misc]  # the optimizer's
        if compat.is_summed(self):
            return finish(grads, trainable_variables)
        variables = list(self._hvkeras_trained() if trainable_variables is None else trainable_variables)
        return self._hvkeras_step(lambda reduced, over=variables: finish(reduced, over), self, list(grads), variables)

    def _hvkeras_dense_update(self) -> Callable[[list[Any]], Any] | None:
        plain = getattr(super(), "_distributed_tf_update_step", None)
        contains_others = compat.inner_optimizer(self) is not None or hasattr(self, "_inner_optimizers")
        if plain is None or contains_others or not compat.is_of_keras(self._hvkeras_plain):
            return None  # a user's optimizer may count on being called for all variables, in their order
        return lambda pairs: plain(tf.distribute.get_strategy(), pairs, self.learning_rate)  # type: ignore[attr-defined]

    def _hvkeras_update_of_one(self) -> Callable[[Any, Any], None] | None:
        update, decay = self._hvkeras_dense_update(), getattr(super(), "_apply_weight_decay", None)
        if update is None or decay is None or not compat.updates_one_by_one(self, self._hvkeras_plain):
            return None

        def update_of_one(gradient: Any, variable: Any) -> None:
            decay([variable])
            update([(gradient, variable)])

        return update_of_one

    def _apply_weight_decay(self, variables: Any) -> None:
        """Decays variables as Keras does, except for those that compiled functions decay as they update them."""
        if (part := self.__dict__.get(DENSE)) is not None and part.decays:
            variables = [variable for variable in variables if compat.variable_key(variable) not in part.keys]
        super()._apply_weight_decay(variables)  # type: ignore[misc]  # the optimizer's

    def _distributed_tf_update_step(self, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        """Updates variables as Keras does, except for those whose dense gradients compiled functions apply."""
        pairs = list(grads_and_vars)
        if (part := self.__dict__.get(DENSE)) is not None:
            gradients = {compat.variable_key(variable): gradient for gradient, variable in pairs}
            part.update(*(gradients[key] for key in part.keys))
            pairs = [pair for pair in pairs if compat.variable_key(pair[1]) not in part.keys]
        super()._distributed_tf_update_step(distribution, pairs, learning_rate)  # type: ignore[misc]  # the optimizer's


class _DistributedTfKeras(Distributed):
    """The hook into optimizers of tf_keras, both legacy and current."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduces the gradients over the ranks, then applies them."""
        finish = super().apply_gradients  # type: ignore[misc]  # the optimizer's
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if compat.is_summed(self) or (compat.reduces_elsewhere(kwargs)
                                      and self._hvkeras_ahead().find(variables) is None):
            return finish(pairs, *args, **kwargs)
        return self._hvkeras_step(
            lambda reduced, over=variables: finish(list(zip(reduced, over, strict=True)), *args, **kwargs), self,
            [gradient for gradient, _ in pairs], variables)

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as ever: the step that applies the gradients also reduces them."""
        with compat.attribute(self, MINIMIZES, True):
            return super().minimize(*args, **kwargs)  # type: ignore[misc]  # the optimizer's

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[Any]:
        """Computes and reduces gradients; within `minimize`, tf_keras calls this to compute them."""
        if MINIMIZES in self.__dict__:
            plain = super().compute_gradients  # type: ignore[misc]  # the optimizer's
            return self._hvkeras_reduce_computed(plain(loss, var_list, tape), by_step=True)
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> list[Any]:
        """Computes and reduces gradients, for training loops that call this method as in Horovod or tf_keras.

        The following call of `apply_gradients` does not reduce them again, and with `backward_passes_per_step` applies
        them only when an update is due.
        """
        plain = getattr(super(), "_compute_gradients", None)  # of legacy optimizers
        if plain is not None:
            pairs = plain(loss, var_list, grad_loss, tape)
        else:
            pairs = super().compute_gradients(compat.weighed_loss(loss, grad_loss, tape), var_list, tape)  # type: ignore[misc]  # the optimizer's
        return self._hvkeras_reduce_computed(pairs)

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[Any]:
        """Reduces gradients over the ranks, unless `_compute_gradients` has done so already."""
        if self._hvkeras_leaves_to_keras():
            plain = getattr(super(), "_aggregate_gradients", list)  # legacy optimizers have it, and call it in the step
            return list(plain(grads_and_vars))
        return self._hvkeras_reduce(list(grads_and_vars), computed=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the optimizer for the same variables and strategy; plain tf_keras fails to copy the strategy."""
        strategy = self.__dict__.get("_distribution_strategy")
        memo[id(strategy)] = strategy
        plain_deepcopy = getattr(super(), "__deepcopy__", None)
        if plain_deepcopy is not None:
            return plain_deepcopy(memo)
        function, arguments, state, *_ = self.__reduce_ex__(4)
        clone = function(*arguments)
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(state, memo))
        return clone


class _ShardedKeras(_DistributedKeras, Sharded):
    """The same, of which each rank keeps and updates a part."""


class _ShardedTfKeras(_DistributedTfKeras, Sharded):
    """The same, of which each rank keeps and updates a part."""


def distribute(optimizer: Any, exchange: Exchange, passes: tuple[int, bool] = (1, False),
               compile_update: bool | str = "auto", kind: str = "") -> Any:
    """Gives an optimizer its distributed class, without validating arguments."""
    family = compat.family_of(optimizer)
    plain = type(optimizer)
    mixin: type = ((_ShardedKeras if kind else _DistributedKeras) if family == compat.KERAS
                   else _ShardedTfKeras if kind else _DistributedTfKeras)
    attributes = {"_hvkeras_exchange": exchange, "_hvkeras_passes": passes, "_hvkeras_compile": compile_update,
                  "_hvkeras_kind": kind, "_hvkeras_plain": plain, "_hvkeras_rebuild": _REBUILD}
    compat.adopt_class(optimizer, compat.subclass_like(plain, mixin, attributes))
    install_hooks(str(family))
    if family != compat.KERAS:
        compat.hook_scaled_gradients()
    if kind:
        optimizer._hvkeras_share_built()
    return optimizer


def install_hooks(family: str) -> None:
    """Installs the hooks that distributed optimizers need in Keras; single-rank jobs need them only for recording.

    Args:
        family: The Keras family (Keras 3, tf_keras or legacy tf_keras).
    """
    job = current_job() if is_initialized() else None
    if job is not None and (job.topology.size > 1 or job.settings.record or job.settings.report):
        compat.hook_loss_scale(family, _reduce_before_loss_scale)
        if family == compat.KERAS:
            compat.hook_jit_compile(refuses_xla)
            compat.hook_averages_of_weights(swap_averages, begin_averages)


def distributed_part(optimizer: Any) -> Any:
    """Returns the optimizer or its inner optimizer (`LossScaleOptimizer`), whichever is distributed, else None."""
    for candidate in (optimizer, compat.inner_optimizer(optimizer)):
        if isinstance(candidate, Distributed):
            return candidate
    return None


def _rebuild(function: Callable[..., Any], arguments: tuple[Any, ...], exchange: Exchange,
             passes: tuple[int, bool], compile_update: bool | str, kind: str = "") -> Any:
    """Restores the distributed class of a copied or unpickled optimizer."""
    return distribute(function(*arguments), exchange, passes, compile_update, kind)


_REBUILD = staticmethod(_rebuild)


def _reduce_before_loss_scale(finish: Callable[[list[Any]], Any], optimizer: Any, gradients: Sequence[Any],
                              variables: Sequence[Any]) -> Any:
    """Reduces gradients before a `LossScaleOptimizer` decides whether to skip the step.

    The decision must be the same on all ranks: if one rank skipped alone, the others would wait in the reduction of the
    inner optimizer. The reduction therefore comes first.
    """
    inner = compat.inner_optimizer(optimizer)
    if isinstance(optimizer, Distributed) or not isinstance(inner, Distributed):
        return finish(list(gradients))
    return inner._hvkeras_step(finish, optimizer, gradients, variables)
