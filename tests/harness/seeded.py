"""Run a script as `python script.py` does, after seeding the generators of Python, NumPy and TensorFlow.

Each one is seeded before the next library is imported, as libraries may draw numbers while they are imported.

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
    seed = int(sys.argv[1])
    random.seed(seed)
    import numpy as np

    np.random.seed(seed)
    import tensorflow as tf

    tf.random.set_seed(seed)
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
