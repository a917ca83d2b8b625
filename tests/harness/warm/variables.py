"""Which environment variables count when modules are imported, so that a forked rank cannot have its own."""

from __future__ import annotations

import re
from collections.abc import Mapping

ROOM = "WARM_ROOM"  # where a rank's environment is written, for /proc/PID/environ
# TF_CPP_MIN_LOG_LEVEL follows from HVKERAS_LOG_LEVEL, once hvkeras is imported. mpirun sets LD_LIBRARY_PATH, to the
# folder that its libraries name themselves. TF_GRPC_* are read when a server starts, TF_NUM_* when the first operation
# runs.
AT_IMPORT = re.compile(r"(TF_(?!CONFIG$|CPP_MIN_LOG_LEVEL$|GRPC_|NUM_)|TF2_|KERAS_|XLA_|OMP_|KMP_|MKL_|OPENBLAS_|CUDA_|"
                       r"MALLOC_|LD_(?!LIBRARY_PATH$)|PYTHON(?!PATH$))|(HOME|HVKERAS_LOG_LEVEL)$")


def at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that count at import; TF_USE_LEGACY_KERAS=0 is as good as none."""
    return {name: value for name, value in environment.items()
            if AT_IMPORT.match(name) and (name, value) != ("TF_USE_LEGACY_KERAS", "0")}
