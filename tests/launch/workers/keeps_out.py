"""Load UCX, join the job three times with the engine native, and report the side effects on the process."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from contextlib import suppress
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
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if not name.startswith("tf_"))


def left_threads() -> list[str]:
    """Return `threads()` once they stay the same: the system lists a thread for a moment after it was joined."""
    last, same, deadline = threads(), 0, time.monotonic() + 10
    while same < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
        now = threads()
        last, same = now, same + 1 if now == last else 0
    return last


before = signals()
Ucx(library(), ucx_folder())
loaded = {"signals": [before, signals()], "environment": sorted(name for name in os.environ if "UCX" in name)}
print("LOADED " + json.dumps(loaded), flush=True)
for _ in range(3):  # TensorFlow may start unnamed threads in the second one
    hvd.init("native")
    inside = {"threads": threads(), "descriptors": descriptors()}
    total = float(hvd.allreduce(tf.ones([300_000]), op=hvd.Sum)[-1])
    hvd.shutdown()
    print("STATE " + json.dumps({"sum": total, "inside": inside, "threads": left_threads(),
                                 "descriptors": descriptors()}), flush=True)
