"""`MetricAverageCallback`: average the logs of other callbacks over the ranks."""

from __future__ import annotations

import math
from typing import Any

from hvkeras.callbacks.base import KerasCallback, is_chief
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.host.console import format_ranks, prints_at, say
from hvkeras.job.session import current_session
from hvkeras.training.added_logs import as_number
from hvkeras.training.fit_hooks import exact_logs, shared_by
from hvkeras.typing import Logs


class MetricAverageCallback(KerasCallback):
    """Callback that averages the numbers in an epoch's logs over the ranks.

    Keras's loss and metrics are exact and equal on every rank without this callback. It averages the values that
    earlier callbacks in the list have added to the logs, and gives every rank the same keys. Non-numeric values are
    unchanged.

    Example:
        model.fit(dataset, callbacks=[Measure(), hvd.callbacks.MetricAverageCallback(),
                                      keras.callbacks.EarlyStopping("measured")])

    Args:
        device: Accepted for compatibility with Horovod.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._warned: set[str] = set()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Average the logs in place, for the callbacks that follow."""
        current_session()
        process_set = shared_by(self.model)
        if process_set is None:
            return
        own_numbers = ((key, as_number(value)) for key, value in (logs or {}).items())
        exact = exact_logs(self.model)
        mine = {key: value for key, value in own_numbers if value is not None and key not in exact}
        everyone = allgather_object(mine, name=f"the logs of {type(self).__name__}, which every rank needs",
                                    process_set=process_set)
        by_rank = dict(zip(process_set.ranks, everyone, strict=True))
        for key in dict.fromkeys(key for found in by_rank.values() for key in found):
            values = [found[key] for found in by_rank.values() if key in found]
            if len(values) < len(by_rank):
                self._warn_missing(key, [rank for rank, found in by_rank.items() if key not in found])
            if logs is not None and (key in mine or key not in logs):
                logs[key] = _mean(values)

    def _warn_missing(self, key: str, ranks: list[int]) -> None:
        settings = current_session().settings
        if key not in self._warned and is_chief(self.model) and prints_at(settings, "WARNING"):
            self._warned.add(key)
            say(f"MetricAverageCallback: {key!r} is not a number in the logs of {format_ranks(ranks)}; its mean is"
                " taken over the other ranks")


def _mean(values: list[Any]) -> Any:
    # The mean of equal values is exact.
    return values[0] if all(value == values[0] for value in values) else math.fsum(values) / len(values)
