"""Callbacks that hvkeras adds to `fit`, `evaluate` and `predict`: one before all others, one after them.

Neither has a hook for the end of a batch: with such a hook, Keras would wait for the logs of each step instead of
calling callbacks asynchronously.
"""

from __future__ import annotations

import functools
from typing import Any

from hvkeras import compat
from hvkeras.control import activity
from hvkeras.training.fit_account import FitAccount
from hvkeras.training.fit_run import FitRun, shares_update


class _AddedCallback:
    """Base class of the callbacks in this module."""

    _supports_tf_logs = True  # tf_keras need not convert logs for it


class _ActivityCallback(_AddedCallback):
    """Callback that reports the position of this rank, and gathers state that the following callbacks may save.

    Args:
        run: The call of `fit` whose ranks share the optimizer's state, or None.
    """

    def __init__(self, run: FitRun | None) -> None:
        super().__init__()
        self._run = run

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        activity.begin_steps()

    on_test_begin = on_predict_begin = on_train_begin

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        activity.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        activity.begin_step(batch)

    on_test_batch_begin = on_predict_batch_begin = on_train_batch_begin

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        activity.end_epoch()
        if self._run is not None:
            self._run.gather_state(at_end=False)

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        activity.end_steps()
        if self._run is not None:
            self._run.gather_state(at_end=True)


class _FitCallback(_AddedCallback):
    """Callback that counts samples and forwards the events of `fit` to its run."""

    def __init__(self, run: FitRun | None, account: FitAccount | None) -> None:
        super().__init__()
        self._run, self._account = run, account
        self._last = 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        if self._run is not None:
            self._run.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        if self._account is not None:
            self._account.begin_epoch()
        if self._run is not None:
            self._run.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        self._last = batch
        if self._account is not None:
            self._account.begin_step(batch)
        if self._run is not None:
            self._run.before_step(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._account is not None:
            self._account.end_epoch()
        if self._run is not None:
            self._run.epoch_end(epoch, self._last + compat.steps_per_execution(self._run.model), logs)

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        if self._run is not None:
            self._run.compare_at_end()
            self._run.end()


def with_hook_callbacks(model: Any, given: Any, run: FitRun | None = None, account: FitAccount | None = None) -> Any:
    """Return callbacks as `fit` takes them, with those of this module before and after them.

    Args:
        given: The callbacks, as `fit` takes them: None, one, several, or Keras's list of them.
        run: The call of `fit`, if ranks share it; else None.
        account: The account of its samples, if any.
    """
    activity_callback, fit_callback = _classes(compat.callback_class(model))
    first = [activity_callback(run if run is not None and shares_update(model) else None)]
    last = [fit_callback(run, account)] if run is not None or account is not None else []
    if all(base.__name__ != "CallbackList" for base in type(given).__mro__):
        own = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
        return [*first, *own, *last]
    # Validation in fit reuses the callbacks of fit.
    if last or not any(isinstance(one, _AddedCallback) for one in given.callbacks):
        given.callbacks[:] = [*first, *(one for one in given.callbacks if not isinstance(one, _AddedCallback)), *last]
    return given


@functools.cache
def _classes(base: Any) -> tuple[Any, Any]:
    # Both Keras 3 and tf_keras may be in use, each with its own base class of callbacks.
    return tuple(type(cls.__name__[1:], (cls, base), {"__module__": __name__})  # type: ignore[return-value]
                 for cls in (_ActivityCallback, _FitCallback))
