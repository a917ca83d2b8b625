"""`TensorBoard`: summaries of Keras and times of all ranks, written by the chief; any rank can be profiled.

Scalars are written without the package `tensorboard`, which TensorFlow 2.21 no longer installs.
"""

from __future__ import annotations

import importlib.util
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from hvkeras import compat
from hvkeras.callbacks.base import is_chief, spanning_strategy
from hvkeras.diagnostics import spans
from hvkeras.diagnostics.rank_times import LATEST, RankTimes, figures
from hvkeras.diagnostics.ring_buffer import PythonRing
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.job.session import changes, current_session, is_initialized
from hvkeras.typing import Logs, ModelLike, PathLike

_found = importlib.util.find_spec("tensorboard")
has_tensorboard = _found is not None and bool(_found.submodule_search_locations)  # not a script of that name


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> Any:
    """Write a scalar to the default writer, as `tf.summary.scalar` does, which needs `tensorboard`.

    Args:
        name: The tag.
        data: The number.
        step: The position on the x axis; by default that of the writer.
        description: Markdown that TensorBoard displays with it.

    Returns:
        True if there was a writer.
    """
    metadata = tf.compat.v1.SummaryMetadata(summary_description=description or "")
    metadata.plugin_data.plugin_name = "scalars"
    with tf.summary.experimental.summary_scope(name, "scalar_summary", values=[data, step]) as (tag, _):
        return tf.summary.write(tag, tf.cast(data, tf.float32), step=step, metadata=metadata)


class Summaries:
    """Replacement for `tf.summary` with another `scalar`."""

    scalar = staticmethod(scalar)

    def __getattr__(self, name: str) -> Any:
        return getattr(tf.summary, name)


if TYPE_CHECKING:
    from hvkeras.typing import Callback as _Callback

    class _TensorBoard(_Callback):
        """Type of Keras's class."""

        log_dir: PathLike
        histogram_freq: int
        write_graph: bool
        write_images: bool
        write_steps_per_second: bool
        update_freq: int | str
        embeddings_freq: int
        embeddings_metadata: PathLike | Mapping[str, PathLike] | None

        def __init__(
            self, log_dir: PathLike = "logs", histogram_freq: int = 0, write_graph: bool = True,
            write_images: bool = False, write_steps_per_second: bool = False,
            update_freq: int | Literal["batch", "epoch"] = "epoch", profile_batch: int | Sequence[int] = 0,
            embeddings_freq: int = 0, embeddings_metadata: PathLike | Mapping[str, PathLike] | None = None,
        ) -> None: ...
else:
    _Callback = compat.default_keras().callbacks.Callback
    _TensorBoard = compat.default_keras().callbacks.TensorBoard

_USER = "TensorBoard"
_timed: weakref.WeakSet[Any] = weakref.WeakSet()  # train functions that were traced while collectives were recorded


class TensorBoard(_TensorBoard):
    """Keras's TensorBoard callback for several ranks.

    Only the chief writes Keras's summaries: rank 0, the first of the ranks that train the model together, or the
    strategy's chief. The times of each rank form a separate run (`rank_0`, `rank_1`, ...), written once per epoch:
    `ranks/step_time_ms`, `ranks/communication_ms` (time in collectives), and `ranks/wait_ms` (the part of it spent
    waiting for other ranks). docs/tensorboard.md explains them for each backend.

    Pass the callback on all ranks. With `hvd.rank0_callbacks`, and under tf.distribute strategies, only the chief's
    times are written.

    Example:
        model.fit(dataset, callbacks=[hvd.callbacks.TensorBoard("logs", profile_batch=(10, 20), profile_rank=1)])

    Args:
        log_dir: As for Keras's callback.
        histogram_freq: As for Keras's callback.
        write_graph: As for Keras's callback.
        write_images: As for Keras's callback.
        write_steps_per_second: As for Keras's callback.
        update_freq: As for Keras's callback.
        profile_batch: The step, or the first and last step, to profile on `profile_rank`.
        embeddings_freq: As for Keras's callback.
        embeddings_metadata: As for Keras's callback.
        profile_rank: The rank to profile. If it is not the chief, it writes to `<log_dir>/rank_<profile_rank>`.
        rank_scalars: Whether to write the times of the ranks.

    Raises:
        UsageError: `profile_rank` is not a valid rank.
        MachineError: When training begins, a requested feature needs the package tensorboard.
    """

    _should_trace: bool  # Keras's

    def __init__(
        self, log_dir: PathLike = "logs", histogram_freq: int = 0, write_graph: bool = True,
        write_images: bool = False, write_steps_per_second: bool = False,
        update_freq: int | Literal["batch", "epoch"] = "epoch", profile_batch: int | Sequence[int] = 0,
        embeddings_freq: int = 0, embeddings_metadata: PathLike | Mapping[str, PathLike] | None = None,
        profile_rank: int = 0, rank_scalars: bool = True,
    ) -> None:
        super().__init__(log_dir=log_dir, histogram_freq=histogram_freq, write_graph=write_graph,
                         write_images=write_images, write_steps_per_second=write_steps_per_second,
                         update_freq=update_freq, profile_batch=profile_batch, embeddings_freq=embeddings_freq,
                         embeddings_metadata=embeddings_metadata)
        if not isinstance(profile_rank, int) or isinstance(profile_rank, bool) or profile_rank < 0:
            raise UsageError(explain("profile_rank must be the number of a rank", "pass profile_rank=0",
                                     profile_rank=profile_rank))
        self.profile_batch: int | Sequence[int] = profile_batch
        self.profile_rank: int = profile_rank
        self.rank_scalars = rank_scalars
        self.gathers: bool = False  # whether `fit` gathers the times of all ranks (`hvkeras.training.fit_run`)
        self._profiles = self._should_trace
        self._rank, self._chief = 0, True
        self._profiler: Any = None  # Keras's callback that profiles on a rank other than the chief
        self._executions = PythonRing(4, LATEST)
        self._has_traced = False
        self._step_start, self._first_step = 0.0, 0
        self._rank_writers: dict[int, Any] = {}
        self._written_changes = 0  # membership changes that are written

    @property
    def summary(self) -> object:
        """`tf.summary`, or a replacement without the package tensorboard, as Keras accesses it."""
        return tf.summary if has_tensorboard else Summaries()

    def set_model(self, model: ModelLike) -> None:
        """Determine the rank of this process, and start writing on the chief."""
        self._rank, size, self._chief = _rank_size_and_chief(model)
        if self._profiles and self.profile_rank >= size:
            raise UsageError(explain(f"profile_rank must be one of the {size} ranks", f"pass one of 0 to {size - 1}",
                                     profile_rank=self.profile_rank))
        self._should_trace = self._profiles and self._chief and self.profile_rank == self._rank
        self._profiler = None
        if self._chief:
            self._require_tensorboard()
            super().set_model(model)
            return
        _Callback.set_model(self, model)
        if self._profiles and self.profile_rank == self._rank:
            self._profiler = _TensorBoard(os.path.join(self.log_dir, f"rank_{self._rank}"), write_graph=False,
                                           profile_batch=self.profile_batch)
            # On workers other than a strategy's chief, tf_keras writes to a folder that it deletes.
            self._profiler._get_log_write_dir = lambda: self._profiler.log_dir
            self._profiler.set_model(model)

    def _require_tensorboard(self) -> None:
        wanted = [name for name in ("histogram_freq", "write_images", "embeddings_freq") if getattr(self, name)]
        in_keras_3 = hasattr(_TensorBoard, "summary")
        if has_tensorboard or (in_keras_3 and not wanted):
            return
        feature = " and ".join(wanted) if in_keras_3 else "The TensorBoard callback of tf_keras"
        needs = "need" if len(wanted) > 1 and in_keras_3 else "needs"
        raise MachineError(explain(f"{feature} {needs} the package tensorboard", "pip install tensorboard"))

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Make Keras retrace the step with recorded collectives."""
        self.gathers = False
        self._has_traced = False
        if self.rank_scalars and is_initialized() and current_session().topology.size > 1:
            spans.store().start(_USER)
            if self.model.train_function not in _timed:
                compat.forget_train_function(self.model)
                self.model.make_train_function()
                _timed.add(self.model.train_function)
        if self._chief:
            super().on_train_begin(logs)
        elif self._profiler is not None:
            self._profiler.on_train_begin()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the files."""
        spans.store().stop(_USER)
        if self._chief:
            super().on_train_end(logs)
        elif self._profiler is not None:
            self._profiler.on_train_end()
        for writer in self._rank_writers.values():
            writer.close()
        self._rank_writers.clear()

    def _implements_train_batch_hooks(self) -> bool:
        # tf_keras calls the following two methods only then.
        return True

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Start the measurement of a step."""
        if self._chief:
            super().on_train_batch_begin(batch, logs)
        elif self._profiler is not None:
            self._profiler.on_train_batch_begin(batch)
        self._first_step, self._step_start = batch, time.time()
        spans.store().set_in_step(True)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End the measurement; the first step, with tracing, is not measured."""
        spans.store().set_in_step(False)
        if self._has_traced:
            self._executions.append(self._step_start, time.time(), self._first_step, batch)
        self._has_traced = True
        if self._chief:
            super().on_train_batch_end(batch, logs)
        elif self._profiler is not None:
            self._profiler.on_train_batch_end(batch)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Discard the times of the previous epoch."""
        self._executions = PythonRing(4, LATEST)
        if self._chief:
            super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write Keras's summaries, and the chief's times if `fit` does not gather those of all ranks."""
        if self._chief:
            super().on_epoch_end(epoch, logs)
            self._write_changes(epoch)
            if self.rank_scalars and not self.gathers:
                self.write_rank_times(epoch, {self._rank: self.rank_times()})

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Call Keras's method on the chief."""
        if self._chief:
            super().on_test_begin(logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Call Keras's method on the chief."""
        if self._chief:
            super().on_test_end(logs)

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Call Keras's method on the chief."""
        if self._chief:
            super().on_test_batch_begin(batch, logs)

    def _write_changes(self, epoch: int) -> None:
        """Write the membership changes of an elastic job during the epoch, as seen by this process."""
        found = changes()[self._written_changes:]
        if not found:
            return
        self._written_changes += len(found)
        with tf.summary.create_file_writer(os.path.join(self.log_dir, "elastic")).as_default(), \
                tf.summary.record_if(True):
            scalar("elastic/ranks", found[-1].size, step=epoch)
            scalar("elastic/changes", self._written_changes, step=epoch)
            scalar("elastic/seconds_lost", sum(change.seconds for change in found), step=epoch)
            scalar("elastic/steps_repeated", sum(change.repeated or 0 for change in found), step=epoch)

    def rank_times(self) -> RankTimes:
        """Return the measurements of this rank since the epoch began."""
        compiled = bool(getattr(self.model, "jit_compile", False))  # only collectives outside XLA are recorded
        collectives = {} if compiled else {key: track.rows() for key, track in spans.store().collectives().items()}
        return RankTimes.of(self._executions.rows().table, collectives)

    def write_rank_times(self, epoch: int, everyone: Mapping[int, RankTimes]) -> None:
        """Write the times of the ranks, on the chief only.

        Args:
            epoch: The position on the x axis.
            everyone: The measurements of each rank.
        """
        if not self._chief:
            return
        for rank, numbers in figures(everyone).items():
            if rank not in self._rank_writers:
                folder = os.path.join(self.log_dir, f"rank_{rank}")
                self._rank_writers[rank] = tf.summary.create_file_writer(folder)
            with self._rank_writers[rank].as_default(), tf.summary.record_if(True):
                for tag, value in numbers.items():
                    scalar(tag, value, step=epoch)
            self._rank_writers[rank].flush()


def _rank_size_and_chief(model: Any) -> tuple[int, int, bool]:
    """Return the rank of this process, the number of ranks, and whether it is the chief."""
    strategy = spanning_strategy(model)
    if strategy is not None:
        resolver = strategy.cluster_resolver
        jobs = resolver.cluster_spec().as_dict()
        first_worker = len(jobs.get("chief", ())) if resolver.task_type == "worker" else 0
        size = len(jobs.get("chief", ())) + len(jobs.get("worker", ()))
        return first_worker + (resolver.task_id or 0), size, is_chief(model)
    if not is_initialized():
        return 0, 1, True
    topology = current_session().topology
    return topology.rank, topology.size, is_chief(model)
