"""`TensorBoard`: the chief writes Keras's summaries and the times of all ranks; any rank can be profiled."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.callbacks import summaries
from hvkeras.callbacks.chief import leads, spanning_strategy
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.job.state import current_job, is_initialized
from hvkeras.profiling import collective_times
from hvkeras.profiling.rank_times import LATEST, Execution, RankTimes, figures

_Callback: Any = compat.default_keras().callbacks.Callback
_TensorBoard: Any = compat.default_keras().callbacks.TensorBoard

_USER = "TensorBoard"


class TensorBoard(_TensorBoard):  # type: ignore[misc]  # Keras ships no types
    """Keras's TensorBoard for several ranks.

    The chief alone writes what Keras's writes: rank 0, or the first of those that train the model together, or the
    strategy's chief. The times of each rank are a run of their own (`rank_0`, `rank_1`, ...), once an epoch:
    `ranks/step_time_ms`, `ranks/communication_ms` (time in collectives), and `ranks/wait_ms` (the part of that spent on
    waiting for other ranks). docs/tensorboard.md says what they are on each backend.

    Give it to all ranks. With `hvd.rank0_callbacks`, and under strategies of tf.distribute, the chief's times are the
    only ones.

    Example:
        model.fit(dataset, callbacks=[hvd.callbacks.TensorBoard("logs", profile_batch=(10, 20), profile_rank=1)])

    Args:
        log_dir: As for Keras's, like all that follow up to `embeddings_metadata`.
        histogram_freq: See there.
        write_graph: See there.
        write_images: See there.
        write_steps_per_second: See there.
        update_freq: See there.
        profile_batch: The step, or the first and last step, that `profile_rank` profiles.
        embeddings_freq: See there.
        embeddings_metadata: See there.
        profile_rank: Which rank profiles. If it is not the chief, it writes into `<log_dir>/rank_<profile_rank>`.
        rank_scalars: Whether the times of ranks are written.

    Raises:
        UsageError: There is no such rank.
        MachineError: When training begins: what is asked for needs the package tensorboard.
    """

    _should_trace: bool  # Keras's

    def __init__(
        self, log_dir: Any = "logs", histogram_freq: int = 0, write_graph: bool = True, write_images: bool = False,
        write_steps_per_second: bool = False, update_freq: Any = "epoch", profile_batch: Any = 0,
        embeddings_freq: int = 0, embeddings_metadata: Any = None, profile_rank: int = 0, rank_scalars: bool = True,
    ) -> None:
        super().__init__(log_dir=log_dir, histogram_freq=histogram_freq, write_graph=write_graph,
                         write_images=write_images, write_steps_per_second=write_steps_per_second,
                         update_freq=update_freq, profile_batch=profile_batch, embeddings_freq=embeddings_freq,
                         embeddings_metadata=embeddings_metadata)
        if not isinstance(profile_rank, int) or isinstance(profile_rank, bool) or profile_rank < 0:
            raise UsageError(explain("profile_rank must be the number of a rank", "pass profile_rank=0",
                                     profile_rank=profile_rank))
        self.profile_batch, self.profile_rank = profile_batch, profile_rank
        self.rank_scalars = rank_scalars
        self.gathers = False  # whether `fit` brings the times of all ranks here (`hvkeras.training.fit_run`)
        self._profiles = self._should_trace
        self._rank, self._chief = 0, True
        self._elsewhere: Any = None  # Keras's callback that profiles on a rank other than the chief
        self._executions: collections.deque[Execution] = collections.deque(maxlen=LATEST)
        self._traced = False
        self._began, self._first = 0.0, 0
        self._rank_writers: dict[int, Any] = {}

    @property
    def summary(self) -> Any:
        """Keras's way to `tf.summary`, whose numbers need the package tensorboard."""
        return tf.summary if summaries.has_tensorboard else summaries.Summaries()

    def set_model(self, model: Any) -> None:
        """Finds out which rank this is, and on the chief begins to write."""
        self._rank, size, self._chief = _place(model)
        if self._profiles and self.profile_rank >= size:
            raise UsageError(explain(f"profile_rank must be one of the {size} ranks", f"pass one of 0 to {size - 1}",
                                     profile_rank=self.profile_rank))
        self._should_trace = self._profiles and self._chief and self.profile_rank == self._rank
        self._elsewhere = None
        if self._chief:
            self._require_tensorboard()
            super().set_model(model)
            return
        _Callback.set_model(self, model)
        if self._profiles and self.profile_rank == self._rank:
            self._elsewhere = _TensorBoard(os.path.join(self.log_dir, f"rank_{self._rank}"), write_graph=False,
                                           profile_batch=self.profile_batch)
            # tf_keras sends what others than a strategy's chief write to a folder that it deletes.
            self._elsewhere._get_log_write_dir = lambda: self._elsewhere.log_dir
            self._elsewhere.set_model(model)

    def _require_tensorboard(self) -> None:
        wanted = [name for name in ("histogram_freq", "write_images", "embeddings_freq") if getattr(self, name)]
        in_keras_3 = hasattr(_TensorBoard, "summary")
        if summaries.has_tensorboard or (in_keras_3 and not wanted):
            return
        what = " and ".join(wanted) if in_keras_3 else "The TensorBoard callback of tf_keras"
        needs = "need" if len(wanted) > 1 and in_keras_3 else "needs"
        raise MachineError(explain(f"{what} {needs} the package tensorboard", "pip install tensorboard"))

    def on_train_begin(self, logs: Any = None) -> None:
        """Has the step traced anew, with stamps around its collectives."""
        self.gathers, self._traced = False, False
        if self.rank_scalars and is_initialized() and current_job().topology.size > 1:
            collective_times.start(_USER)
            if not getattr(self.model.train_function, "_hvkeras_stamps", False):
                compat.forget_train_function(self.model)
                self.model.make_train_function()
                self.model.train_function._hvkeras_stamps = True
        if self._chief:
            super().on_train_begin(logs)
        elif self._elsewhere is not None:
            self._elsewhere.on_train_begin()

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the files."""
        collective_times.stop(_USER)
        if self._chief:
            super().on_train_end(logs)
        elif self._elsewhere is not None:
            self._elsewhere.on_train_end()
        for writer in self._rank_writers.values():
            writer.close()
        self._rank_writers.clear()

    def _implements_train_batch_hooks(self) -> bool:
        """What tf_keras asks before it calls the two that follow."""
        return True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begins to measure a step."""
        if self._chief:
            super().on_train_batch_begin(batch, logs)
        elif self._elsewhere is not None:
            self._elsewhere.on_train_batch_begin(batch)
        self._first, self._began = batch, time.time()
        collective_times.set_in_step(True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ends it; the first one of all, in which TensorFlow traces, is not measured."""
        collective_times.set_in_step(False)
        if self._traced:
            self._executions.append(Execution(self._began, time.time(), self._first, batch))
        self._traced = True
        if self._chief:
            super().on_train_batch_end(batch, logs)
        elif self._elsewhere is not None:
            self._elsewhere.on_train_batch_end(batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forgets the times of the epoch before."""
        self._executions.clear()
        if self._chief:
            super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes Keras's summaries; the ranks' times, if they are the chief's alone."""
        if self._chief:
            super().on_epoch_end(epoch, logs)
            if self.rank_scalars and not self.gathers:
                self.write_rank_times(epoch, {self._rank: self.rank_times()})

    def on_test_begin(self, logs: Any = None) -> None:
        """Keras's, on the chief."""
        if self._chief:
            super().on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Keras's, on the chief."""
        if self._chief:
            super().on_test_end(logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keras's, on the chief."""
        if self._chief:
            super().on_test_batch_begin(batch, logs)

    def rank_times(self) -> RankTimes:
        """What this rank measured since the epoch began."""
        compiled = bool(getattr(self.model, "jit_compile", False))  # by XLA: only what is outside of it has stamps
        return RankTimes.of(list(self._executions), {} if compiled else collective_times.collected())

    def write_rank_times(self, epoch: int, everyone: Mapping[int, RankTimes]) -> None:
        """Writes the times of ranks, on the chief.

        Args:
            epoch: The place on the x axis.
            everyone: What each rank measured.
        """
        if not self._chief:
            return
        for rank, numbers in figures(everyone).items():
            if rank not in self._rank_writers:
                folder = os.path.join(self.log_dir, f"rank_{rank}")
                self._rank_writers[rank] = tf.summary.create_file_writer(folder)
            with self._rank_writers[rank].as_default(), tf.summary.record_if(True):
                for tag, value in numbers.items():
                    summaries.scalar(tag, value, step=epoch)
            self._rank_writers[rank].flush()


def _place(model: Any) -> tuple[int, int, bool]:
    """This process's rank, the number of ranks, and whether it writes for all."""
    strategy = spanning_strategy(model)
    if strategy is not None:
        resolver = strategy.cluster_resolver
        jobs = resolver.cluster_spec().as_dict()
        before = len(jobs.get("chief", ())) if resolver.task_type == "worker" else 0
        size = len(jobs.get("chief", ())) + len(jobs.get("worker", ()))
        return before + (resolver.task_id or 0), size, leads(model)
    if not is_initialized():
        return 0, 1, True
    topology = current_job().topology
    return topology.rank, topology.size, leads(model)
