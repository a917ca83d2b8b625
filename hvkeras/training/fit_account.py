"""One call of `fit` that counts the samples trained on, so that an epoch resumes after a membership change.

The data of `fit` are assigned again in each pass (`hvkeras.data.resharding`). An epoch that resumes begins with the
step after the last completed one.
"""

from __future__ import annotations

from typing import Any

from hvkeras import compat
from hvkeras.data.accounts import Account, keeps_accounts
from hvkeras.data.resharding import Data, accounted, resharded
from hvkeras.host.console import prints_at, say
from hvkeras.job.session import current_session

_UNSUPPORTED = ("validation_split", "steps_per_epoch")


class FitAccount:
    """One call of `fit` whose data `hvd.shard` has assigned."""

    def __init__(self, model: Any, data: Data) -> None:
        self.model: Any = model
        self.account: Account = data.account
        self._data = data
        self._is_counted = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `fit` to replace."""
        if self._data.dataset is None:
            return {}
        return {"x": self._data.dataset, "y": None, "sample_weight": None, "batch_size": None, "shuffle": False}

    def data_ready(self, data: Any) -> None:
        """Set the number of steps in a complete pass, which `tf.data` does not know.

        `data` is as in `FitRun.data_ready`.
        """
        if not self._is_counted:
            self._is_counted = True
            steps = self.account.steps(self._data.batch, True, self._data.drops)
            data.change(lambda dataset: dataset, steps)
            data.batches = steps

    def begin_epoch(self) -> None:
        """Make the pass begin at the position of the account."""
        first = self.account.begin(self._data.batch, self._data.drops)
        skipped = compat.Done(0, first, _do_nothing, _do_nothing, reads=False)
        compat.passes().at_next(lambda _: skipped if first else None)

    def begin_step(self, step: int) -> None:
        """Count a step, given by its index within the epoch."""
        self.account.record_steps(step + compat.steps_per_execution(self.model))

    def end_epoch(self) -> None:
        """End an epoch and the pass over the data."""
        self.account.end()
        self._data.end_pass()


def account_for(model: Any, given: dict[str, Any]) -> FitAccount | None:
    """Return the account of a call of `fit`; None if membership is fixed or the data are not supported.

    Args:
        given: The arguments of `fit`, by name.
    """
    if not keeps_accounts():
        return None
    reason = next((f"fit has {name}" for name in _UNSUPPORTED if given[name]), "")
    data = None if reason else accounted(given["x"], given["y"], given["sample_weight"], given["batch_size"],
                                         bool(given["shuffle"]))
    if data is None:
        session = current_session()
        if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
            say("if the membership changes within an epoch, some of its samples will be repeated or skipped, because "
                + (reason or "hvd.shard has not assigned the data of fit, or they are shuffled or filtered after it"))
        return None
    compat.passes()
    return FitAccount(model, data)


def current_share(given: dict[str, Any]) -> dict[str, Any]:
    """Return those arguments of `fit` or `evaluate` that are evaluation data, as assigned to the current ranks.

    Args:
        given: Some of the arguments, by name.
    """
    return {name: resharded(data) for name, data in given.items()} if keeps_accounts() else {}


def _do_nothing() -> None:
    pass  # the data themselves begin at the position of the account
