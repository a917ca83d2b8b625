"""`misbehave.py` with tensors on GPUs, and with `--share` over NCCL on one GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import one_gpu

if "--share" in sys.argv:
    one_gpu.share()
runpy.run_path(str(Path(__file__).parents[2] / "launch" / "workers" / "misbehave.py"), run_name="__main__")
