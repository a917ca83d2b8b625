"""A script that also uses mpi4py; the arguments say in which order it imports what, and how it uses it."""

from __future__ import annotations

import importlib
import sys

import numpy as np

order, *how = sys.argv[1:]  # mpi4py may be missing: it is imported after init() then
for name in order.split(","):
    importlib.import_module({"mpi4py": "mpi4py.MPI"}.get(name, name))

import hvkeras as hvd  # noqa: E402 - the order of imports is tested

if {"world", "part", "sets"} & set(how):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    own = [hvd.ProcessSet(part)] if "sets" in how else None
    hvd.init(part if "part" in how else MPI.COMM_WORLD, process_sets=own)
else:
    hvd.init()
from mpi4py import MPI  # noqa: E402 - the same


def total(**options: object) -> int:
    return int(hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum, **options)[0])


if "sets" in how:
    print("set", own[0].process_set_id, own[0].ranks, own[0].rank(), total(process_set=own[0]), flush=True)
print("result", hvd.rank(), hvd.size(), hvd.local_size(), total(), MPI.COMM_WORLD.allreduce(1), flush=True)
if "raise" in how and hvd.rank() == 1:
    raise ValueError("the sky is falling")
if "finalize" in how:
    MPI.Finalize()
