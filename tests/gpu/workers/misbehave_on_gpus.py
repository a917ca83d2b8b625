"""`misbehave.py` with tensors on GPUs, and with `--share` over NCCL on one GPU, as `on_gpus.py`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from harness.launchers import announced_rank

if "--share" in sys.argv:
    os.environ["NCCL_HOSTID"] = f"rank{announced_rank(os.environ) or 0}"
runpy.run_path(str(Path(__file__).parents[2] / "launch" / "workers" / "misbehave.py"), run_name="__main__")
