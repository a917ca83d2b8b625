"""One call of `fit` that keeps account of the samples trained on, so that an epoch goes on after a change of ranks.

`fit` gets data that are assigned anew in each pass (`hvkeras.data.resharding`), and an epoch that goes on begins with
the step after the last one that was made.
"""

from __future__ import annotations

from typing import Any

from hvkeras import compat
from hvkeras.data.accounts import Account, keeps_accounts
from hvkeras.data.resharding import Data, accounted, resharded
from hvkeras.host.console import prints_at, say
from hvkeras.job.session import current_session

_WITHOUT = ("validation_split", "steps_per_epoch")


class FitAccount:
    """One call of `fit` whose data `hvd.shard` has assigned.

    Args:
        model: The model.
        data: The data.
    """

    def __init__(self, model: Any, data: Data) -> None:
        self.model: Any = model
        self.account: Account = data.account
        self._data = data
        self._is_counted = False

    def arguments(self) -> dict[str, Any]:
        """The arguments of `fit` that are replaced."""
        if self._data.dataset is None:
            return {}
        return {"x": self._data.dataset, "y": None, "sample_weight": None, "batch_size": None, "shuffle": False}

    def data_ready(self, data: Any) -> None:
        """Sets the number of steps in a whole pass, which `tf.data` does not know; `data` as in `FitRun.data_ready`."""
        if not self._is_counted:
            self._is_counted = True
            steps = self.account.steps(self._data.batch, True, self._data.drops)
            data.change(lambda dataset: dataset, steps)
            data.batches = steps

    def begin_epoch(self) -> None:
        """Makes the pass begin where the account says."""
        first = self.account.begin(self._data.batch, self._data.drops)
        done = compat.Done(0, first, _nothing, _nothing, reads=False)
        compat.passes().at_next(lambda _: done if first else None)

    def begin_step(self, step: int) -> None:
        """Counts a step, which is given by its number within the epoch."""
        self.account.note(step + compat.steps_per_execution(self.model))

    def end_epoch(self) -> None:
        """Ends an epoch, and the pass over the data."""
        self.account.end()
        self._data.end_pass()


def account_for(model: Any, given: dict[str, Any]) -> FitAccount | None:
    """Returns what keeps account of a call of `fit`; None in jobs whose ranks do not change, or if it is not possible.

    Args:
        model: The model.
        given: The arguments of `fit`, by name.
    """
    if not keeps_accounts():
        return None
    why = next((f"fit has {name}" for name in _WITHOUT if given[name]), "")
    data = None if why else accounted(given["x"], given["y"], given["sample_weight"], given["batch_size"],
                                      bool(given["shuffle"]))
    if data is None:
        session = current_session()
        if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
            say("when the ranks change within an epoch, samples of it will be repeated or left out, as "
                + (why or "hvd.shard has not assigned the data of fit, or they are shuffled or filtered after it"))
        return None
    compat.passes()
    return FitAccount(model, data)


def present_share(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `fit` or `evaluate` that are evaluation data, as assigned to the present ranks.

    Args:
        given: The arguments by name, some of them.
    """
    return {name: resharded(data) for name, data in given.items()} if keeps_accounts() else {}


def _nothing() -> None:
    """Does nothing: the data begin where the account says by themselves."""
