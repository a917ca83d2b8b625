"""Train Keras models on many workers, with Horovod's engine, TensorFlow's collectives or a native engine.

Example:
    import hvkeras as hvd
    hvd.init()
    x, y = hvd.shard((x, y))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    model.fit(x, y, verbose=hvd.verbose(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Names are looked up on first use (`__init__.pyi` lists them), so importing the package does not import TensorFlow. The
command line starts quickly, and the log level takes effect before TensorFlow reads it.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lazy_loader
import wrapt

if find_spec("hvkeras.backends") is None:  # in the source tree, it is a folder next to this one
    __path__.append(str(Path(__file__).parents[1]))

from hvkeras.errors import UsageError, print_errors_briefly, require_linux, require_tensorflow
from hvkeras.host.console import quiet_engines
from hvkeras.settings import log_level

__version__ = "0.1.0"


def _quiet_before_tensorflow() -> None:
    """Applies the log level to TensorFlow's C++ part, which reads its own only when it is loaded."""
    if "tensorflow" not in sys.modules:
        with contextlib.suppress(UsageError):  # init() reports it
            quiet_engines(log_level())


print_errors_briefly()
require_linux()
_quiet_before_tensorflow()
# Its repairs under strategies, of the group STRATEGIES in `hvkeras.compat.patches`, run once Keras 3 is imported.
wrapt.register_post_import_hook("hvkeras.compat.patches:repair", "keras.src.backend.tensorflow.trainer")
wrapt.register_post_import_hook("hvkeras.compat.patches:repair", "keras.src.backend.tensorflow.optimizer")
wrapt.register_post_import_hook("hvkeras.compat.patches:repair", "keras.src.optimizers.loss_scale_optimizer")
wrapt.register_post_import_hook("hvkeras.compat.patches:repair", "keras.src.random.seed_generator")
# Keras's distribution API on TensorFlow, of the group DISTRIBUTION.
wrapt.register_post_import_hook("hvkeras.distribution:install", "keras.src.backend.tensorflow.distribution_lib")
# Open MPI beside TensorFlow, and outside mpirun.
wrapt.register_post_import_hook("hvkeras.host.open_mpi:set_prefix", "mpi4py")
wrapt.register_post_import_hook("hvkeras.host.open_mpi:bind_hwloc", "mpi4py.MPI")

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in __all__:  # given the module, Python suggests the name that was meant
        raise AttributeError(f"module 'hvkeras' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name == "tensorflow":
            require_tensorflow()
        raise
