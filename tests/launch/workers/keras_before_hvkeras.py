"""Import Keras and hvkeras in the given order, and start data parallelism by a function that was imported before."""

import sys

if sys.argv[1] == "hvkeras first":
    import hvkeras  # noqa: F401
from keras.distribution import DataParallel, set_distribution

if sys.argv[1] == "keras first":
    import hvkeras  # noqa: F401, F811

set_distribution(DataParallel())

from hvkeras.collectives.row_share import global_batch

print(DataParallel().num_processes, global_batch().started)
