"""hvkeras: trains Keras models on many workers, with Horovod's engine, TensorFlow's collectives or a native engine.

Example:
    import hvkeras as hvd
    hvd.init()
    x, y = hvd.shard((x, y))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    model.fit(x, y, verbose=hvd.verbose(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Names are looked up on first use, so importing the package does not import TensorFlow (the command line starts
quickly), and the log level takes effect before TensorFlow reads it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import wrapt

if find_spec("hvkeras.backends") is None:  # in the source tree, it is a folder beside this one
    raise ImportError(
        "hvkeras must be installed to be imported, and Python has found its source folder first. Received:"
        f" path={str(Path(__file__).parent)!r}. HINT: run from another folder than the repository's, or pytest with"
        " --import-mode=importlib; or install the folder itself: pip install -e .")

from hvkeras.errors import UsageError
from hvkeras.host.console import quiet_engines
from hvkeras.requirements import require_tensorflow
from hvkeras.settings import Settings

__version__ = "0.1.0"

# The module of each public name.
_HOMES = {
    "hvkeras.startup": ("init", "shutdown"),
    "hvkeras.job.state": ("is_initialized",),
    "hvkeras.job.queries": (
        "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous", "mpi_built",
        "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled", "nccl_built", "ccl_built",
        "cuda_built", "ddl_built", "rocm_built", "sycl_built", "gpu_available",
    ),
    "hvkeras.gradients.optimizer": ("DistributedOptimizer",),
    "hvkeras.gradients.tape": ("DistributedGradientTape",),
    "hvkeras.gradients.partial": ("PartialDistributedOptimizer", "PartialDistributedGradientTape"),
    "hvkeras.collectives.reductions": (
        "allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "barrier",
    ),
    "hvkeras.collectives.rank_ops": (
        "rank_op", "size_op", "local_rank_op", "local_size_op", "process_set_included_op",
    ),
    "hvkeras.gradients.sessions": ("BroadcastGlobalVariablesHook",),
    "hvkeras.tensorflow.sync_batch_norm": ("SyncBatchNormalization",),
    "hvkeras.collectives.scattering": ("alltoall", "reducescatter", "grouped_reducescatter"),
    "hvkeras.collectives.broadcasts": (
        "broadcast_variables", "broadcast_", "broadcast_global_variables", "broadcast_object", "broadcast_object_fn",
        "allgather_object",
    ),
    "hvkeras.collectives.operations": ("Average", "Sum", "Adasum", "Min", "Max", "Product"),
    "hvkeras.collectives.compression": ("Compression",),
    "hvkeras.job.process_sets": ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    "hvkeras.sharding": ("shard",),
    "hvkeras.training.adaptation": ("adapt",),
    "hvkeras.training.prediction": ("predict",),
    "hvkeras.training.model_loading": ("load_model",),
    "hvkeras.training.verbosity": ("verbose", "rank0_callbacks"),
    "hvkeras.training.fit_hooks": ("alone",),
    "hvkeras.launcher.functions": ("run",),
    "hvkeras.comparison.functions": ("compare",),
    "hvkeras.collectives.join": ("join",),
    "hvkeras.strategies": ("strategy",),
    "hvkeras.profiling.timeline": ("start_timeline", "stop_timeline"),
    "hvkeras.compat.tensorflow_errors": ("ArgumentError", "DuplicateNameError", "MismatchError"),
    "hvkeras.errors": (
        "HvkerasError", "UsageError", "NotInitializedError", "DivergenceError", "UnsupportedError", "MachineError",
        "PeerError",
    ),
}
_ORIGIN = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("callbacks", "elastic", "keras", "parameter_server", "tensorflow")

__all__ = ["__version__", *_ORIGIN, *_MODULES]  # noqa: PLE0604 - the table above holds strings


def _quiet_before_tensorflow() -> None:
    """Applies the log level to TensorFlow's C++ part, which reads its own only when it is loaded."""
    if "tensorflow" not in sys.modules:
        with contextlib.suppress(UsageError):  # init() reports it
            quiet_engines(Settings().log_level)


_quiet_before_tensorflow()
# These repairs run once Keras 3 is imported, and not before.
wrapt.register_post_import_hook("hvkeras.compat.strategies:patch", "keras.src.backend.tensorflow.trainer")
wrapt.register_post_import_hook("hvkeras.compat.summing:patch", "keras.src.backend.tensorflow.optimizer")
wrapt.register_post_import_hook("hvkeras.compat.summing:patch_loss_scale", "keras.src.optimizers.loss_scale_optimizer")
wrapt.register_post_import_hook("hvkeras.compat.seeds:patch", "keras.src.random.seed_generator")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hvkeras.{name}")
    if name in _ORIGIN:
        try:
            return getattr(importlib.import_module(_ORIGIN[name]), name)
        except ModuleNotFoundError as error:
            if error.name == "tensorflow":
                require_tensorflow()
            raise
    # Given the module, Python suggests the name that was meant.
    raise AttributeError(f"module 'hvkeras' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
