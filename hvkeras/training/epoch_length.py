"""The number of steps in an epoch of `fit`, on which all ranks agree before the first step.

Every step contains collectives, so a rank with more batches than the others would wait forever. Each rank reports facts
about its data, and `decide` derives the same decision from them on every rank. Data of unknown length ends at the same
step on all ranks: before each step, the ranks exchange over the control channel whether they have a batch.
`FitRun.data_ready` exchanges the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvkeras.compat import fit_data
from hvkeras.data.consistency import differing, format_marks
from hvkeras.errors import PeerError, UnsupportedError, UsageError, explain
from hvkeras.host.console import prints_at, say, some_of
from hvkeras.job.session import current_session
from hvkeras.training.model_description import Arguments

DATA = ("x", "y", "sample_weight", "validation_data")  # the arguments of fit that hold data
CAUSE_WITHIN = 5.0  # seconds for the control server to name a stalled rank before the others time out


@dataclass(frozen=True)
class FitFacts:
    """Facts about the `fit` of one rank, for the other ranks.

    Attributes:
        steps: `steps_per_epoch` as passed, or None.
        batches: The number of batches in one pass over the data; None if unknown, -1 if infinite.
        last_rows: The number of rows in the last batch, or None.
        fingerprint: The fingerprint of arrays; None for other data. If all ranks get the same batches, by argument.
        timers: The number of callbacks that gather the times of all ranks.
        number: The index of this `fit` among the calls of this rank.
        unbuilt: Why the model has no weights to broadcast before the first step; "" if it has.
        compiled: The arguments of `compile`, see `hvkeras.training.model_description`.
        model: The digest of the model's layers, see `hvkeras.training.model_description`.
        saves: Whether a callback may save the model on this rank.
        by_rows: Whether `hvd.shard` has assigned whole elements, so that ranks have different numbers of rows in a
            step.
        may_change: Whether the number of batches may change between epochs.
        files: The paths that Keras's own callbacks write to, see `hvkeras.training.shared_files`.
        callbacks: The callbacks that may change the model, see `hvkeras.training.fit_record`.
    """

    steps: int | None
    batches: int | None
    last_rows: int | None = None
    epochs: int = 1
    initial_epoch: int = 0
    validates: bool = False
    fingerprint: Any = None
    timers: int = 0
    number: int = 0
    unbuilt: str = ""
    compiled: Arguments = ()
    model: str = ""
    saves: bool = False
    by_rows: bool = False
    may_change: bool = False
    files: Sequence[tuple[str, str]] = ()
    callbacks: Sequence[str] = ()


@dataclass(frozen=True)
class Length:
    """Number of batches of one rank at the beginning of an epoch, if it may have changed.

    Attributes:
        of_all: The number of batches over all ranks, of data that `hvd.shard` has assigned; None for other data.
        renews: Whether the rank reads its data again in each epoch.
    """

    batches: int
    of_all: int | None = None
    renews: bool = True


@dataclass(frozen=True)
class Decision:
    """Decision that all ranks follow.

    Attributes:
        steps: The `steps_per_epoch` for all ranks, or None.
        batches: The number of batches per epoch if it may differ from a rank's own; None otherwise.
        common_end: Whether all ranks stop when the first one has no more data, which they check before each step.
        joined: Whether ranks that run out of batches continue with zero weight.
    """

    steps: int | None = None
    batches: int | None = None
    common_end: bool = False
    joined: bool = False
    warnings: tuple[str, ...] = ()


def decide(ranks: Sequence[int], everyone: Sequence[FitFacts], policy: str, same_data: bool = False) -> Decision:
    """Derive the decision from the facts of all ranks.

    Args:
        ranks: The global ranks that train together.
        everyone: Their facts, in the same order.
        policy: How to treat batches that only some ranks have: `trim`, `join` or `error`.
        same_data: Whether all ranks must have the same data.

    Raises:
        UsageError: The ranks cannot train together.
    """
    for name, requirement in (("epochs", "run the same number of epochs"),
                              ("initial_epoch", "start with the same epoch"),
                              ("validates", "run validation, or none")):
        _require_equal(ranks, [getattr(facts, name) for facts in everyone], name, requirement)
    _require_batches(ranks, [facts.batches for facts in everyone])
    if same_data:
        _require_same_data(ranks, everyone)
        return Decision()
    warnings = _about_weights(ranks, everyone) + _about_data(ranks, everyone)
    given = [facts.steps for facts in everyone if facts.steps is not None]
    batches = [facts.batches for facts in everyone]
    if len({(facts.steps, facts.batches) for facts in everyone}) == 1 and batches[0] is not None:
        return Decision(warnings=warnings)
    if given:
        enough = all(count == -1 for count in batches)
        if len({facts.steps for facts in everyone}) > 1:
            steps = [_number(facts.steps) for facts in everyone]
            warnings += (_uneven_warning(ranks, steps, "steps per epoch", min(given)),)
        return Decision(steps=min(given), common_end=not enough, warnings=warnings)
    if any(count is None or count < 0 for count in batches):
        return Decision(common_end=True, warnings=warnings)
    return _decide_uneven(ranks, [count for count in batches if count is not None], policy, warnings)


def _decide_uneven(ranks: Sequence[int], batches: Sequence[int], policy: str, warnings: tuple[str, ...],
              unit: str = "epoch") -> Decision:
    least, most = min(batches), max(batches)
    if policy == "error":
        few, many = ranks[batches.index(least)], ranks[batches.index(most)]
        raise UsageError(explain(f"All ranks must have the same number of batches per {unit} (HVKERAS_UNEVEN=error)",
                                 "hvd.shard(data) splits the data in equal parts",
                                 **{f"rank_{few}": least, f"rank_{many}": most}))
    joined = policy == "join"
    end = least if policy == "trim" else None
    text = _uneven_warning(ranks, [str(count) for count in batches], f"batches per {unit}", end, unit)
    return Decision(batches=most if joined else least, joined=joined, warnings=(*warnings, text))


def require_same_data_to_share(ranks: Sequence[int], lengths: Sequence[Length]) -> None:
    """Check that the numbers of batches of data that `hvd.shard` has assigned have changed alike on all ranks.

    Args:
        ranks: The global ranks that train together.
        lengths: Their lengths, in the same order.

    Raises:
        UsageError: They differ.
    """
    for rank, length in zip(ranks, lengths, strict=True):
        if length.of_all != lengths[0].of_all:
            raise UsageError(explain("All ranks must have the same data to share, but the numbers of their batches have"
                                     " changed in different ways", "change the data in the same way on every rank,"
                                     " in their on_epoch_end", **{f"rank_{ranks[0]}": lengths[0].of_all,
                                                                  f"rank_{rank}": length.of_all}))


def decide_again(ranks: Sequence[int], lengths: Sequence[Length], before: Decision, policy: str,
                 by_steps: bool = False) -> Decision:
    """Derive the decision for the following epochs, after numbers of batches have changed.

    Args:
        ranks: The global ranks that train together.
        lengths: Their lengths, in the same order.
        policy: How to treat batches that only some ranks have, as in `decide`.
        by_steps: Whether the user gave `steps_per_epoch`.

    Returns:
        The decision; `before` if Keras itself handles the new numbers.

    Raises:
        UsageError: The ranks cannot train together.
    """
    batches = [length.batches for length in lengths]
    _require_batches(ranks, batches)
    if len(set(batches)) == 1 and before.batches is None:
        return before
    not_renewing = next((rank for rank, length in zip(ranks, lengths, strict=True) if not length.renews), None)
    if not_renewing is not None:
        raise UsageError(explain("Numbers of batches can change between epochs only if all ranks read their data again"
                                 " in each epoch", "pass the same kind of data on every rank", **{
                                     f"rank_{rank}": number for rank, number in zip(ranks, batches, strict=True)}))
    if len(set(batches)) == 1:
        return replace(before, batches=batches[0])
    if by_steps:
        policy = "error" if policy == "error" else "trim"
    changed = _decide_uneven(ranks, batches, policy, (), "pass over the data" if by_steps else "epoch")
    warnings = tuple(f"numbers of batches have changed since the last epoch, and {text}" for text in changed.warnings)
    return replace(before, batches=changed.batches, joined=changed.joined, warnings=warnings)


def _require_same_data(ranks: Sequence[int], everyone: Sequence[FitFacts]) -> None:
    """Check that all ranks have the same data, of which each computes a part."""
    first = everyone[0]
    for rank, facts in zip(ranks, everyone, strict=True):
        own = facts.fingerprint
        name = next((name for name in DATA if not _is_same(first.fingerprint.get(name), own.get(name))), "")
        if name:
            raise UsageError(explain(
                f"All ranks must have the same data, but {name} differs", "seed what makes it: an unseeded"
                " numpy.random.default_rng() and other entropy of the operating system differ between processes",
                **{f"rank_{ranks[0]}": format_marks(first.fingerprint.get(name)),
                   f"rank_{rank}": format_marks(facts.fingerprint.get(name))}))
        if (facts.steps, facts.batches) != (first.steps, first.batches):
            raise UsageError(explain("All ranks must have the same data, but numbers of batches differ",
                                     "make the data in the same way on every rank", **{
                                         f"rank_{ranks[0]}": first.batches, f"rank_{rank}": facts.batches}))


def _is_same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return bool(one == other)
    return bool(one[0] == other[0]) and not differing(one[1], other[1])


def _require_batches(ranks: Sequence[int], batches: Sequence[int | None]) -> None:
    empty = [rank for rank, count in zip(ranks, batches, strict=True) if count == 0]
    if empty:
        raise UsageError(explain("Each rank needs at least one batch to train on", "give it data: hvd.shard(data)"
                                 " splits the same data over all ranks in equal parts",
                                 **{f"rank_{empty[0]}": "0 batches"}))


def _require_equal(ranks: Sequence[int], values: Sequence[Any], name: str, requirement: str) -> None:
    other = next((index for index, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        argument = name
        if name == "validates":
            argument, values = "validation_data", ["given" if value else "none" for value in values]
        raise UsageError(explain(
            f"All ranks must {requirement} in fit", f"pass the same {argument} on every rank",
            **{f"rank_{ranks[0]}": values[0], f"rank_{ranks[other]}": values[other]}))


def _about_weights(ranks: Sequence[int], everyone: Sequence[FitFacts]) -> tuple[str, ...]:
    rank, why = next(((rank, facts.unbuilt) for rank, facts in zip(ranks, everyone, strict=True) if facts.unbuilt),
                     (None, ""))
    if not why:
        return ()
    text = ("the model creates its weights in the first step, and they are broadcast only after it: until then the"
            " ranks train different models, unless they were seeded alike; call model.build(shape) or the model"
            f" itself on a batch before fit, as it could not be built from its data's shapes (on rank {rank}, {why})")
    return (text,)


def _about_data(ranks: Sequence[int], everyone: Sequence[FitFacts]) -> tuple[str, ...]:
    first = everyone[0]
    if first.fingerprint is not None and all(facts.fingerprint == first.fingerprint for facts in everyone):
        return (f"all {len(ranks)} ranks train on the same data; hvd.shard(data) gives each its own part",)
    rows = [facts.last_rows for facts in everyone]
    same_steps = len({facts.batches for facts in everyone}) == 1 and first.batches not in (None, -1)
    if same_steps and None not in rows and len(set(rows)) > 1:
        sizes = some_of([f"{row} on rank {rank}" for rank, row in zip(ranks, rows, strict=True)])
        text = (f"the last batch has different numbers of samples ({sizes}), but all ranks' gradients count the same;"
                " hvd.shard(data) gives equal parts")
        return (text,)
    return ()


def _uneven_warning(ranks: Sequence[int], numbers: Sequence[str], what: str, end: int | None,
                    unit: str = "epoch") -> str:
    counts = some_of([f"{number} on rank {rank}" for rank, number in zip(ranks, numbers, strict=True)])
    join = ", HVKERAS_UNEVEN=join trains on all" if unit == "epoch" else ""
    consequence = (
        f"every {unit} ends after {end} on all ranks, and the rest is not trained on; hvd.shard(data) gives equal"
        f" parts{join}" if end is not None else
        "ranks that have no more batches continue with zero weight until all are done")
    return f"the ranks have different numbers of {what} ({counts}): {consequence}"


def _number(value: int | None) -> str:
    return "no limit" if value is None else str(value)


class CommonEnd:
    """End of data of unknown length, at the same step on all ranks.

    Args:
        fit: The index of this `fit` in the job.
    """

    def __init__(self, fit: int) -> None:
        # The ranks communicate only between the start and the end of training. Before training, Keras reads the first
        # batch, but not on all ranks. TensorFlow prefetches, so a rank may request a batch that is never used.
        self.armed = False
        self._fit, self._passes, self._reported = fit, 0, False

    def wrap(self, dataset: Any) -> Any:
        """Return a dataset that ends at the first batch that any rank does not have."""
        spec = dataset.element_spec

        def packed(*element: Any) -> Any:
            return element if isinstance(spec, tuple) else element[0]

        last = tf.data.Dataset.from_tensors((False, tf.nest.map_structure(_empty, spec)))
        marked = dataset.map(lambda *element: (True, packed(*element))).concatenate(last)
        agreed = marked.enumerate().take_while(lambda number, pair: tf.ensure_shape(
            tf.numpy_function(self._all_have_batch, [number, pair[0]], tf.bool), []))
        return agreed.map(lambda _, pair: pair[1])

    def _all_have_batch(self, number: Any, has_batch: Any) -> Any:
        """Return whether all ranks have the batch with this number in this pass."""
        if not self.armed:
            return has_batch
        if number == 0:
            self._passes += 1
        session = current_session()
        if session.control is None:
            return has_batch
        timeout = gather_timeout(session.settings.stall_shutdown)
        try:
            batch = f"batch {number + 1} of epoch {self._passes} of fit {self._fit}"
            have = session.control.gather(batch, bool(has_batch), timeout, given_up=lambda: not self.armed)
        except PeerError:
            if session.control.cause is not None:
                raise
            raise PeerError(explain(f"All ranks must reach batch {number + 1} of epoch {self._passes} within"
                                    f" {timeout:g} s", "check the other ranks, or raise"
                                    " HVKERAS_STALL_SHUTDOWN",
                                    rank=session.topology.rank)) from None
        if have and not all(have) and any(have) and not self._reported:
            self._reported = True
            if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
                done, more = ([rank for rank, has in enumerate(have) if has is which] for which in (False, True))
                say(f"ranks {done} have no batch after the first {number}, ranks {more} have: the epoch ends there on"
                    " all ranks, and the rest is not trained on")
        return all(have) if have else has_batch


def gather_timeout(stall_shutdown: float) -> float:
    """Return the timeout in seconds for other ranks in `fit`: long enough for the server to name a late rank."""
    return stall_shutdown + CAUSE_WITHIN if stall_shutdown else float("inf")


def _empty(spec: Any) -> Any:
    """Return a value of a dataset's element type, with size 0 in unknown dimensions."""
    def shape(given: Any) -> list[int]:
        return [size or 0 for size in given.as_list()] if given.rank is not None else [0]

    if isinstance(spec, tf.TensorSpec):
        return tf.fill(shape(spec.shape), tf.constant("" if spec.dtype == tf.string else 0, spec.dtype))
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.sparse.from_dense(tf.zeros(shape(spec.shape), spec.dtype))
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.ragged.constant([], dtype=spec.dtype, ragged_rank=spec.ragged_rank,
                                   inner_shape=tuple(size or 0 for size in spec.shape[spec.ragged_rank + 1 :]),
                                   row_splits_dtype=spec.row_splits_dtype)
    if isinstance(spec, tf.OptionalSpec):  # Keras's for a generator that yields None
        return fit_data.empty_optional(spec)
    if isinstance(spec, tf.NoneTensorSpec):
        return None
    raise UnsupportedError(explain("Data of unknown length must be made of tensors, dense, sparse or ragged, or None",
                                   "set its length: dataset.apply(tf.data.experimental.assert_cardinality(batches))",
                                   element_spec=spec))
