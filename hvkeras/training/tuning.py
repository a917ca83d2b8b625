"""Keras Tuner on several ranks: rank 0 chooses the trials, and all ranks run them together."""

from __future__ import annotations

import json
import os
from typing import Any, TypeVar

from hvkeras.collectives.broadcasts import allgather_object, broadcast_object
from hvkeras.errors import UsageError, explain
from hvkeras.job.session import current_session

TunerT = TypeVar("TunerT")

_RUNNING, _COMPLETED = "RUNNING", "COMPLETED"  # Keras Tuner's status of a trial


def DistributedTuner(tuner: TunerT) -> TunerT:  # noqa: N802 - named like DistributedOptimizer
    """Make a tuner of Keras Tuner run a single search on all ranks, instead of one per rank.

    Rank 0 chooses each trial, and all ranks train it. A trial is completed if every rank completed it. If a rank is
    lost, the search ends, and the trial runs again when the search is resumed. Rank 0 uses the folder of the search.
    Every other rank has a subfolder `rank_<n>` for its own copies of checkpoints, so ranks need not share a file
    system. Only rank 0 prints the progress of the search.

    Call it on all ranks before `search`; all ranks also call `search`.

    Example:
        tuner = hvd.DistributedTuner(keras_tuner.RandomSearch(build, "val_accuracy", max_trials=10, directory="search"))
        tuner.search(x, y, validation_data=validation, epochs=5,
                     callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    Args:
        tuner: A tuner of Keras Tuner, of any class, whose models have a distributed optimizer.

    Returns:
        The same tuner.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The argument is not a tuner of Keras Tuner.
    """
    topology = current_session().topology
    oracle: Any = getattr(tuner, "oracle", None)
    if not all(callable(getattr(oracle, name, None)) for name in ("create_trial", "end_trial", "get_state")):
        raise UsageError(explain("DistributedTuner takes a tuner of Keras Tuner", "pass one, for example"
                                 " keras_tuner.RandomSearch(build, \"val_accuracy\")", tuner=type(tuner).__name__))
    if topology.size > 1 and not isinstance(getattr(oracle.create_trial, "__self__", None), _SharedSearch):
        _share(tuner, oracle, topology.rank == 0)
    return tuner


def _share(tuner: Any, oracle: Any, is_first: bool) -> None:
    # As JSON, like Keras Tuner: neither can be pickled.
    packed = [_pack(trial) for trial in oracle.trials.values()], json.dumps(oracle.get_state())
    trials, state = broadcast_object(packed, name="the state of the tuner")
    if not is_first:
        oracle.trials = {trial.trial_id: trial for trial in map(_unpack, trials)}
        oracle.set_state(json.loads(state))
        tuner.directory = os.path.join(tuner.directory, tuner.project_name)
        tuner.project_name = f"rank_{current_session().topology.rank}"
        oracle._set_project_dir(tuner.directory, tuner.project_name)
        for name in ("on_trial_begin", "on_trial_end"):  # hooks that print the progress
            setattr(oracle._display, name, lambda trial: None)  # noqa: ARG005
    search = _SharedSearch(oracle, is_first)
    oracle.create_trial, oracle.end_trial = search.create_trial, search.end_trial


class _SharedSearch:
    """Replacement for methods of a tuner's oracle, with the trials of rank 0."""

    def __init__(self, oracle: Any, is_first: bool) -> None:
        self._oracle, self._is_first = oracle, is_first
        self._create_trial, self._end_trial = oracle.create_trial, oracle.end_trial

    def create_trial(self, tuner_id: str) -> Any:
        mine = self._create_trial(tuner_id) if self._is_first else None
        packed = broadcast_object(_pack(mine) if self._is_first else None, name="the next trial of the tuner")
        if mine is not None:
            return mine
        trial, oracle = _unpack(packed), self._oracle
        if trial.status == _RUNNING:
            oracle.trials[trial.trial_id] = oracle.ongoing_trials[tuner_id] = trial
        return trial

    def end_trial(self, trial: Any) -> Any:
        """End a trial with the worst status of all ranks; raise first if a rank is lost."""
        everyone = allgather_object((trial.status, trial.message), name="the end of the tuner's trial")
        trial.status, trial.message = next((one for one in everyone if one[0] != _COMPLETED), everyone[0])
        return self._end_trial(trial)


def _pack(trial: Any) -> tuple[type, str]:
    return type(trial), json.dumps(trial.get_state())


def _unpack(packed: tuple[type, str]) -> Any:
    cls: Any = packed[0]
    return cls.from_state(json.loads(packed[1]))
