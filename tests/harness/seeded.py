"""Run a script as `python script.py` does, after seeding the generators of Python, NumPy and TensorFlow.

    python seeded.py 17 script.py ...

The script finds modules in its folder, its own arguments in `sys.argv`, and itself as `__main__`.
"""

from __future__ import annotations

import os
import random
import runpy
import sys


def main() -> None:
    """Seed the generators, and run the script."""
    import keras  # noqa: F401 - draws no numbers after the seeds
    import numpy as np
    import tensorflow as tf

    seed = int(sys.argv[1])
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
