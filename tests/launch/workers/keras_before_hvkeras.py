"""Import Keras and hvkeras in the given order, and start data parallelism by a function that was imported before."""

import sys
from importlib import import_module

if sys.argv[1] == "hvkeras first":
    import_module("hvkeras")
from keras.distribution import DataParallel, set_distribution

import_module("hvkeras")
set_distribution(DataParallel())
print(DataParallel().num_processes, import_module("hvkeras.collectives.global_batch").global_batch().started)
