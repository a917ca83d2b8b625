"""What is known of a model's last `fit` when its ranks use it again."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvkeras.host.console import format_ranks

# Callbacks of Keras that change weights, and those that only change the learning rate.
_CHANGE_WEIGHTS = frozenset({"EarlyStopping", "SwapEMAWeights"})
_CHANGE_RATES = frozenset({"LearningRateScheduler", "ReduceLROnPlateau"})
# Those that change nothing of a model while it trains. BackupAndRestore does so before the first step.
_CHANGE_NOTHING = frozenset({
    "BackupAndRestore", "BaseLogger", "CSVLogger", "History", "ModelCheckpoint", "ProgbarLogger", "RemoteMonitor",
    "TensorBoard", "TerminateOnNaN",
})


@dataclass
class FitRecord:
    """What is known of a model's last `fit` when ranks use the model again.

    Attributes:
        local: The keys of variables that may differ between ranks.
        partial: The callbacks that only some ranks had and that may have changed the model, with these ranks.
        trained: Whether there was a `fit`.
        warned: Whether this rank has printed that the ranks hold different state.
        logs: The logs that need not be compared any more, and whether they differ between ranks, see
            `hvkeras.training.added_logs`.
    """

    local: Collection[Any] = frozenset()
    partial: Mapping[str, Sequence[int]] = field(default_factory=dict)
    trained: bool = False
    warned: bool = False
    logs: dict[str, bool] = field(default_factory=dict)

    def cause(self, of_rates: bool = False) -> tuple[str, str]:
        """Return the callbacks that may be the cause of different weights or learning rates, and the hint; or "".

        Callbacks of Keras that are known to change these come before others, which may only print.
        """
        known, others = (_CHANGE_RATES, ()) if of_rates else (_CHANGE_WEIGHTS, _CHANGE_RATES)
        found = [name for name in self.partial if name in known] or [
            name for name in self.partial if name not in others]
        if not found:
            name = next((name for name, differs in self.logs.items() if differs), "")
            return (f"a callback that decides by {name!r}, a number of its own on each rank" if name else "",
                    "place hvd.callbacks.MetricAverageCallback() before it" if name else "")
        ranks = self.partial[found[0]]
        names = [name for name in found if self.partial[name] == ranks]
        what = "a callback" if len(names) == 1 else "callbacks"
        return (f"{' or '.join(names)}, {what} that only {format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}",
                f"pass {' and '.join(names)} to fit on every rank")


class FitRecords:
    """Records of models that this process has trained."""

    def __init__(self) -> None:
        self._records: weakref.WeakKeyDictionary[Any, FitRecord] = weakref.WeakKeyDictionary()

    def of(self, model: Any) -> FitRecord:
        """Return the record of a model; an empty one before its first `fit`."""
        return self._records.setdefault(model, FitRecord())

    def begin(self, model: Any) -> FitRecord:
        """Begin the record of another `fit`."""
        self._records[model] = FitRecord(trained=True, logs=self.of(model).logs)
        return self._records[model]


def names_of_changing(callbacks: Sequence[Any]) -> list[str]:
    """Return the classes of those callbacks that may change weights or the learning rate."""
    return [type(callback).__name__ for callback in callbacks
            if type(callback).__name__ not in _CHANGE_NOTHING and getattr(callback, "restore_best_weights", True)]


def partial_callbacks(ranks: Sequence[int], everyone: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Return the callbacks that only some ranks have, with these ranks.

    Args:
        ranks: The global ranks that train together.
        everyone: The names of their callbacks, in the same order.
    """
    found = {name: [rank for rank, names in zip(ranks, everyone, strict=True) if name in names]
             for names in everyone for name in names}
    return {name: having for name, having in found.items() if len(having) < len(ranks)}
