"""Base class of the callbacks, and the chief: the process that prints and writes for all workers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.host.console import prints_at
from hvkeras.job.session import current_session, is_initialized
from hvkeras.settings import Settings
from hvkeras.training.fit_hooks import shared_by

if TYPE_CHECKING:
    from hvkeras.typing import Callback as _Callback
else:
    _Callback = compat.default_keras().callbacks.Callback


class KerasCallback(_Callback):
    """Keras callback with the additional attribute of Horovod's callbacks."""

    @property
    def backend(self) -> Any:
        """Module `tf.keras.backend`, with which classes derived from Horovod's callbacks access variables."""
        return tf.keras.backend


def spanning_strategy(model: Any) -> Any:
    """Return the multi-worker `tf.distribute` strategy of a model; None if it has none."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy if strategy is not None and graphs.spans_workers(strategy) else None


def is_chief(model: Any) -> bool:
    """Return whether this process is the chief of a model: the strategy's chief, or usually rank 0."""
    strategy = spanning_strategy(model)
    if strategy is not None:
        return bool(strategy.extended.should_checkpoint)
    if not is_initialized():
        return True
    process_set = shared_by(model)
    return current_session().topology.rank == (0 if process_set is None else process_set.ranks[0])


def should_print(model: Any, level: str = "WARNING") -> bool:
    """Return whether this process is the chief and prints messages of that level."""
    return is_chief(model) and prints_at(current_session().settings if is_initialized() else Settings(), level)
