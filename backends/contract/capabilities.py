"""Clauses on the optional capabilities that a backend declares, and on restarting it within a process."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.backends.capabilities import CompiledByXla, HostsStrategies, RecordsTimes
from hvkeras.backends.contract.ranks import ContractRanks, NotTried, check, tensor, values
from hvkeras.backends.interface import Reduction


def _sum(ranks: ContractRanks, shape: list[int]) -> Any:
    return np.sum([values(rank, "float32", shape) for rank in ranks.all], axis=0)


def compiled(ranks: ContractRanks) -> None:
    """Check `CompiledByXla`: results, and counts of entries."""
    backend = ranks.backend
    if not isinstance(backend, CompiledByXla):
        raise NotTried("the backend does not inherit CompiledByXla")
    if backend.objection_to_xla:
        raise NotTried(backend.objection_to_xla)
    key = ranks.key()

    @tf.function(jit_compile=True, autograph=False)
    def reduce(mine: Any) -> Any:
        backend.enter(key)
        return backend.allreduce([mine], key + ".0", Reduction.SUM, ranks.all)[0]

    for number in range(1, 4):
        check(reduce(tensor(ranks.rank, "float32", [3])), _sum(ranks, [3]), "a compiled sum")
        if backend.entered(key) != number:
            raise AssertionError(f"entered() must count {number} runs. Received: {backend.entered(key)}.")


def recorded(ranks: ContractRanks) -> None:
    """Check `RecordsTimes`: one row for each run."""
    backend = ranks.backend
    if not isinstance(backend, RecordsTimes):
        raise NotTried("the backend does not inherit RecordsTimes")
    key, capacity = ranks.key(), 4
    accepted: list[bool] = []

    @tf.function(autograph=False)
    def reduce(mine: Any) -> Any:
        accepted.append(backend.keep_times(key, capacity))
        return backend.allreduce([mine], key, Reduction.SUM, ranks.all)[0]

    for _ in range(6):
        reduce(tensor(ranks.rank, "float32", [3]))
    if not all(accepted):
        raise NotTried("keep_times() does not record this collective")
    rows, first = backend.times(key, capacity)
    if rows.shape != (capacity, 2) or first != 2 or not (np.diff(rows.ravel()) >= 0).all():
        raise AssertionError(f"times() must return the latest {capacity} of 6 runs, in order. Received: {first},"
                             f" {rows}.")


def sessions(ranks: ContractRanks) -> None:
    """Check `objection_to_sessions`: without one, a session runs collectives."""
    if ranks.backend.objection_to_sessions:
        raise NotTried(ranks.backend.objection_to_sessions)
    key = ranks.key()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found = ranks.backend.allreduce([tensor(ranks.rank, "float32", [3])], key, Reduction.SUM, ranks.all)[0]
        for _ in range(2):
            if not np.array_equal(session.run(found), _sum(ranks, [3])):
                raise AssertionError("a session must compute the sum")


def unlike_shapes(ranks: ContractRanks) -> None:
    """Check `compares_shapes`: an error on every rank."""
    if not ranks.backend.compares_shapes:
        raise NotTried("compares_shapes is False")
    key = ranks.key()

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)])
    def reduce(mine: Any) -> Any:
        return ranks.backend.allreduce([mine], key, Reduction.SUM, ranks.all)[0]

    try:
        reduce(tf.ones([1 + 2 * ranks.rank]))  # NumPy would broadcast these
    except tf.errors.OpError as error:
        text = str(error)
        message = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("File "))
        shapes = [1 + 2 * rank for rank in ranks.all if re.search(rf"\b{1 + 2 * rank}\b", message)]
        if len(shapes) < 2 or len(re.findall(r"\branks? \d", message)) < 2:
            raise AssertionError(f"the error must name both shapes and ranks. Received: {text}") from None
        return
    raise AssertionError("a mismatch of shapes must raise on every rank")


def outlived(ranks: ContractRanks) -> None:
    """Check `outlives_errors_in_graphs`."""
    if not ranks.backend.outlives_errors_in_graphs:
        raise NotTried("outlives_errors_in_graphs is False")
    key = ranks.key()

    @tf.function(autograph=False)
    def fail(mine: Any) -> Any:
        found = ranks.backend.allreduce([mine], key, Reduction.SUM, ranks.all)[0]
        with tf.control_dependencies([tf.debugging.assert_less(found, 0.0, "on purpose")]):
            return tf.identity(found)

    try:
        fail(tensor(ranks.rank, "float32", [3]))
    except tf.errors.InvalidArgumentError:
        check(ranks.backend.allreduce([tensor(ranks.rank, "float32", [3])], ranks.key(), Reduction.SUM, ranks.all)[0],
              _sum(ranks, [3]), "a sum after an error")
        return
    raise AssertionError("the graph must have failed")


def hosted(ranks: ContractRanks) -> None:
    """Check `HostsStrategies`."""
    backend = ranks.backend
    if not isinstance(backend, HostsStrategies):
        raise NotTried("the backend does not inherit HostsStrategies")
    found = backend.strategy().num_replicas_in_sync
    if found != ranks.size:
        raise AssertionError(f"a strategy must span {ranks.size} ranks. Received: {found}.")


def again(ranks: ContractRanks) -> None:
    """Check that `start()` works after `stop()`, and that `stop()` leaks no threads or files."""
    counts = []
    for _ in range(3):
        hvd.shutdown()
        hvd.init(ranks.name)
        check(ranks.backend.allreduce([tensor(ranks.rank, "float32", [3])], ranks.key(), Reduction.SUM, ranks.all)[0],
              _sum(ranks, [3]), "a sum after a restart")
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    # A leak grows with each start. Without a leak, Horovod's number of open files still varies by one.
    if any(first < second < third for first, second, third in zip(*counts, strict=True)):
        raise AssertionError("stop() must join the threads and close the files of start(). Received: (threads, files)"
                             f" after each start: {counts}.")


CLAUSES: dict[str, Callable[[ContractRanks], None]] = {
    "XLA-compiled collectives return the same results, and entries are counted (CompiledByXla)": compiled,
    "times() returns the most recent runs (RecordsTimes)": recorded,
    "a TensorFlow 1 session runs collectives (objection_to_sessions)": sessions,
    "collectives work after a graph has failed (outlives_errors_in_graphs)": outlived,
    "a strategy spans all ranks (HostsStrategies)": hosted,
    "start() works after stop()": again,
    "a mismatch of shapes at run time raises on all ranks (compares_shapes)": unlike_shapes,
}
