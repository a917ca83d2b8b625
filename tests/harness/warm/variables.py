"""Environment variables that modules read at import, so that forked ranks cannot change them."""

from __future__ import annotations

import re
from collections.abc import Mapping

ROOM = "WARM_ROOM"  # reserves space in /proc/PID/environ for a rank's environment
# The import of hvkeras sets TF_CPP_MIN_LOG_LEVEL from HVKERAS_LOG_LEVEL. mpirun sets LD_LIBRARY_PATH to the folder that
# is in its libraries' RPATH anyway. TF_GRPC_* are read when a server starts, TF_NUM_* when the first operation runs,
# KERAS_DISTRIBUTION_* in keras.distribution.initialize().
AT_IMPORT = re.compile(r"(TF_(?!CONFIG$|CPP_MIN_LOG_LEVEL$|GRPC_|NUM_)|TF2_|KERAS_(?!DISTRIBUTION_)|XLA_|OMP_|KMP_|"
                       r"MKL_|OPENBLAS_|CUDA_|MALLOC_|LD_(?!LIBRARY_PATH$)|PYTHON(?!PATH$))|(HOME|HVKERAS_LOG_LEVEL)$")


def at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that modules read at import, without TF_USE_LEGACY_KERAS=0, which is the default."""
    return {name: value for name, value in environment.items()
            if AT_IMPORT.match(name) and (name, value) != ("TF_USE_LEGACY_KERAS", "0")}
