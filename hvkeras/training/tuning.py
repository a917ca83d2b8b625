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
    """Makes a tuner of Keras Tuner run one search on all ranks, instead of one on each.

    Rank 0 chooses each trial, and all ranks train it. A trial counts as completed if it was completed on every rank; if
    a rank is lost, the search ends, and the trial runs again when the search is resumed. Rank 0's folder is that of the
    search. Every other rank has a folder `rank_<n>` in it for its own copies of checkpoints, so ranks need not share a
    file system. Rank 0 alone prints the progress of the search.

    Call it on all ranks, before `search`. All ranks call `search` as well.

    Example:
        tuner = hvd.DistributedTuner(keras_tuner.RandomSearch(build, "val_accuracy", max_trials=10, directory="search"))
        tuner.search(x, y, validation_data=validation, epochs=5,
                     callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    Args:
        tuner: A tuner of Keras Tuner, of any class. The models that it builds have a distributed optimizer.

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


def _share(tuner: Any, oracle: Any, chooses: bool) -> None:
    # As Keras Tuner saves both: as JSON. Neither can be pickled.
    packed = [_packed(trial) for trial in oracle.trials.values()], json.dumps(oracle.get_state())
    trials, state = broadcast_object(packed, name="the state of the tuner")
    if not chooses:
        oracle.trials = {trial.trial_id: trial for trial in map(_unpacked, trials)}
        oracle.set_state(json.loads(state))
        tuner.directory = os.path.join(tuner.directory, tuner.project_name)
        tuner.project_name = f"rank_{current_session().topology.rank}"
        oracle._set_project_dir(tuner.directory, tuner.project_name)
        for name in ("on_trial_begin", "on_trial_end"):  # what prints the progress
            setattr(oracle._display, name, lambda trial: None)  # noqa: ARG005
    search = _SharedSearch(oracle, chooses)
    oracle.create_trial, oracle.end_trial = search.create_trial, search.end_trial


class _SharedSearch:
    """What the oracle of a tuner does instead of its own methods: trials are those of rank 0.

    Args:
        oracle: The oracle.
        chooses: Whether this is rank 0.
    """

    def __init__(self, oracle: Any, chooses: bool) -> None:
        self._oracle, self._chooses = oracle, chooses
        self._create, self._end = oracle.create_trial, oracle.end_trial

    def create_trial(self, tuner_id: str) -> Any:
        """Returns the next trial."""
        mine = self._create(tuner_id) if self._chooses else None
        packed = broadcast_object(_packed(mine) if self._chooses else None, name="the next trial of the tuner")
        if mine is not None:
            return mine
        trial, oracle = _unpacked(packed), self._oracle
        if trial.status == _RUNNING:
            oracle.trials[trial.trial_id] = oracle.ongoing_trials[tuner_id] = trial
        return trial

    def end_trial(self, trial: Any) -> Any:
        """Ends a trial as it ended on the rank where it went worst; raises first if another rank is gone."""
        everyone = allgather_object((trial.status, trial.message), name="the end of the tuner's trial")
        trial.status, trial.message = next((one for one in everyone if one[0] != _COMPLETED), everyone[0])
        return self._end(trial)


def _packed(trial: Any) -> tuple[type, str]:
    return type(trial), json.dumps(trial.get_state())


def _unpacked(packed: tuple[type, str]) -> Any:
    cls: Any = packed[0]
    return cls.from_state(json.loads(packed[1]))
