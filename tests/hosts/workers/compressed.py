"""Allreduces with the compression `COMPRESSION`; the sums must equal those of float32 with at most two roundings."""

from __future__ import annotations

import os
import sys

import numpy as np
import tensorflow as tf

import hvkeras as hvd

hvd.init("native")
compression = getattr(hvd.Compression, os.environ["COMPRESSION"])
# Three ranks on the first host: above 2048, float16 only has even integers, so float16 sums would lose each 1.
values = np.full(300_000, [2048.0, 1.0, 1.0, 2.0][hvd.rank()], np.float32)
expected = np.full_like(values, 2052.0)
for step in range(10):
    found = hvd.allreduce(tf.constant(values), op=hvd.Sum, compression=compression, name="numbers")
    if found.dtype != tf.float32 or not np.array_equal(found.numpy(), expected):
        sys.exit(f"wrong in step {step}: {found.numpy()[:3]}, not {expected[0]}")
hvd.shutdown()
