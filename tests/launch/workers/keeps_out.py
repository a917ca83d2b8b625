"""Load UCX, join the job three times with the engine native, and report the side effects on the process."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import tensorflow as tf

import hvkeras as hvd
from hvkeras.backends.cpp_library import library
from hvkeras.backends.native.network import ucx_folder
from hvkeras.backends.native.ucx import Ucx


def signals() -> str:
    """Return the mask of the signals that the process handles."""
    return re.findall(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0]


def descriptors() -> dict[str, int]:
    """Return the number of open descriptors by kind."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{name}"))[:20]] += 1
        except OSError:
            continue
    return dict(kinds)


def threads() -> list[str]:
    """Return the names of all threads except TensorFlow's, of which it starts some late."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sorted(name for name in names if not name.startswith("tf_"))


before = signals()
Ucx(library(), ucx_folder())
loaded = {"signals": [before, signals()], "environment": sorted(name for name in os.environ if "UCX" in name)}
print("LOADED " + json.dumps(loaded), flush=True)
for _ in range(3):  # TensorFlow may start unnamed threads in the second one
    hvd.init("native")
    inside = {"threads": threads(), "descriptors": descriptors()}
    total = float(hvd.allreduce(tf.ones([300_000]), op=hvd.Sum)[-1])
    hvd.shutdown()
    print("STATE " + json.dumps({"sum": total, "inside": inside, "threads": threads(), "descriptors": descriptors()}),
          flush=True)
