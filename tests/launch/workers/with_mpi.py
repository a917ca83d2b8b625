"""A script that also uses mpi4py; the arguments say when it imports it, and how it uses it."""

# ruff: noqa: E402 - the order of imports is tested

from __future__ import annotations

import sys

import numpy as np
import tensorflow  # noqa: F401 - else Open MPI would end with TensorFlow's hwloc

how = set(sys.argv[1:])
if "before" in how:
    from mpi4py import MPI
import hvkeras as hvd

if how & {"world", "part", "sets"}:
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    own = [hvd.ProcessSet(part)] if "sets" in how else None
    hvd.init(part if "part" in how else MPI.COMM_WORLD, process_sets=own)
else:
    hvd.init()
from mpi4py import MPI


def total(**options: object) -> int:
    return int(hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum, **options)[0])


if "sets" in how:
    print("set", own[0].process_set_id, own[0].ranks, own[0].rank(), total(process_set=own[0]), flush=True)
print("result", hvd.rank(), hvd.size(), hvd.local_size(), total(), MPI.COMM_WORLD.allreduce(1), flush=True)
if "raise" in how and hvd.rank() == 1:
    raise ValueError("the sky is falling")
if "finalize" in how:
    MPI.Finalize()
