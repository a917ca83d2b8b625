"""Hooks where Keras reduces the losses of a batch, which see the weights of masks and how samples are combined."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hvkeras.compat.families import KERAS
from hvkeras.compat.hooks import hook

_MEANS = ("auto", "mean", "sum_over_batch_size")


def hook_losses(family: str, step: Callable[..., Any], around: Callable[..., Any], weigh: Callable[[Any, Any], Any],
                combine: Callable[[Any, str, Any, Any], Any]) -> None:
    """Hooks the losses of one Keras.

    Args:
        family: The Keras to hook.
        step: `step(original, model, *args, **kwargs)` wraps Keras's own `train_step`.
        around: Wraps `compute_loss` in the same way.
        weigh: Takes the weights that a mask leads to in a mean over unmasked values, and the mask; returns the weights
            to use.
        combine: Takes a reduced loss, the name of its reduction, the sample weights (None where they do not matter),
            and the values that were reduced; returns the loss to use. It is not called for losses that are scalars
            before the reduction.
    """
    hook(sys.modules[family].Model, "train_step", step)
    hook(sys.modules[family].Model, "compute_loss", around)

    def reduced(original: Callable[..., Any], values: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(values, *args, **kwargs)
        if values.shape.rank == 0:
            return loss
        reduction = kwargs.get("reduction", args[-1] if args else "sum_over_batch_size")
        weights = kwargs.get("sample_weight", args[0] if len(args) > 1 else None)
        return combine(loss, "none" if reduction is None else str(reduction), weights, values)

    if family == KERAS:
        from keras.src.losses import loss as losses

        def masked(original: Callable[..., Any], sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
            weights = original(sample_weight, mask, dtype, reduction)
            return weights if mask is None or reduction not in _MEANS else weigh(weights, mask)

        hook(losses, "apply_mask", masked)
        hook(losses, "reduce_values", reduced)
        return
    from tf_keras.src.utils import losses_utils

    def valid(original: Callable[..., Any], losses: Any, sw: Any, mask: Any, reduction: Any) -> Any:
        weights = original(losses, sw, mask, reduction)
        return weights if mask is None or reduction not in _MEANS else weigh(weights, mask)

    hook(losses_utils, "apply_valid_mask", valid)
    hook(losses_utils, "reduce_weighted_loss", reduced)
