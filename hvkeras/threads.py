"""TensorFlow's threads: each rank gets its fair share of the cores it may use."""

from __future__ import annotations

import os
from collections.abc import Sequence


def usable_cores() -> list[int]:
    """Lists the cores that this process may run on (a launcher may have bound it to some)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def fair_share(own: Sequence[int], on_this_host: Sequence[Sequence[int]]) -> int:
    """Computes how many threads this rank should compute with.

    Each of its cores is shared with the local ranks that may use it, too; a rank that is bound to
    cores of its own gets all of those.

    Args:
        own: The cores that this rank may use.
        on_this_host: The cores of each rank of this host, this one included.

    Returns:
        At least 1.
    """
    return max(1, round(sum(1 / sum(core in cores for cores in on_this_host) for core in own)))


def limit_threads(share: int) -> bool:
    """Sets TensorFlow's intra- and inter-op threads to `share`, where the user has set neither.

    Returns:
        False if TensorFlow has already started its threads, so that they cannot be set any more.
    """
    import tensorflow as tf

    threading = tf.config.threading
    if "TF_NUM_INTRAOP_THREADS" in os.environ or threading.get_intra_op_parallelism_threads():
        return True
    try:
        threading.set_intra_op_parallelism_threads(share)
        if not threading.get_inter_op_parallelism_threads() and "TF_NUM_INTEROP_THREADS" not in os.environ:
            # Two at least: one that computes and one that drives the collective beside it.
            threading.set_inter_op_parallelism_threads(max(2, share))
    except RuntimeError:
        return False
    return True
