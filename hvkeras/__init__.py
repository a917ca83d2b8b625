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
from typing import TYPE_CHECKING, Any

import wrapt

if find_spec("hvkeras.backends") is None:  # in the source tree, it is a folder beside this one
    raise ImportError(
        "hvkeras must be installed to be imported, and Python has found its source folder first. Received:"
        f" path={str(Path(__file__).parent)!r}. HINT: run from another folder than the repository's, or pytest with"
        " --import-mode=importlib; or install the folder itself: pip install -e .")

from hvkeras.errors import UsageError, require_tensorflow
from hvkeras.host.console import quiet_engines
from hvkeras.settings import Settings

__version__ = "0.1.0"

# The module of each public name.
_HOMES = {
    "hvkeras.startup": ("init", "shutdown", "strategy"),
    "hvkeras.job.session": ("is_initialized",),
    "hvkeras.job.queries": (
        "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous", "mpi_built",
        "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled", "nccl_built", "ccl_built",
        "cuda_built", "ddl_built", "rocm_built", "sycl_built", "gpu_available",
    ),
    "hvkeras.gradients.optimizer": ("DistributedOptimizer", "PartialDistributedOptimizer", "gather_optimizer"),
    "hvkeras.gradients.tape": ("DistributedGradientTape", "PartialDistributedGradientTape"),
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
    "hvkeras.data": ("shard",),
    "hvkeras.training.adaptation": ("adapt",),
    "hvkeras.training.prediction": ("predict",),
    "hvkeras.training.model_loading": ("load_model",),
    "hvkeras.training.verbosity": ("verbose", "rank0_callbacks"),
    "hvkeras.training.fit_hooks": ("alone",),
    "hvkeras.training.moving_statistics": ("register_statistic",),
    "hvkeras.launcher.functions": ("run",),
    "hvkeras.comparison.functions": ("compare",),
    "hvkeras.collectives.join": ("join",),
    "hvkeras.training.tuning": ("DistributedTuner",),
    "hvkeras.diagnostics.timeline": ("start_timeline", "stop_timeline"),
    "hvkeras.compat.tensorflow_errors": ("ArgumentError", "DuplicateNameError", "MismatchError"),
    "hvkeras.errors": (
        "HvkerasError", "UsageError", "NotInitializedError", "DivergenceError", "UnsupportedError", "MachineError",
        "PeerError",
    ),
}
_ORIGIN = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("callbacks", "elastic", "keras", "parameter_server", "spark", "tensorflow")

if TYPE_CHECKING:  # the same names for type checkers and editors; tests/unit/test_public_names.py compares
    from hvkeras import callbacks as callbacks
    from hvkeras import elastic as elastic
    from hvkeras import keras as keras
    from hvkeras import parameter_server as parameter_server
    from hvkeras import spark as spark
    from hvkeras import tensorflow as tensorflow
    from hvkeras.collectives.broadcasts import allgather_object as allgather_object
    from hvkeras.collectives.broadcasts import broadcast_ as broadcast_
    from hvkeras.collectives.broadcasts import broadcast_global_variables as broadcast_global_variables
    from hvkeras.collectives.broadcasts import broadcast_object as broadcast_object
    from hvkeras.collectives.broadcasts import broadcast_object_fn as broadcast_object_fn
    from hvkeras.collectives.broadcasts import broadcast_variables as broadcast_variables
    from hvkeras.collectives.compression import Compression as Compression
    from hvkeras.collectives.join import join as join
    from hvkeras.collectives.operations import Adasum as Adasum
    from hvkeras.collectives.operations import Average as Average
    from hvkeras.collectives.operations import Max as Max
    from hvkeras.collectives.operations import Min as Min
    from hvkeras.collectives.operations import Product as Product
    from hvkeras.collectives.operations import Sum as Sum
    from hvkeras.collectives.rank_ops import local_rank_op as local_rank_op
    from hvkeras.collectives.rank_ops import local_size_op as local_size_op
    from hvkeras.collectives.rank_ops import process_set_included_op as process_set_included_op
    from hvkeras.collectives.rank_ops import rank_op as rank_op
    from hvkeras.collectives.rank_ops import size_op as size_op
    from hvkeras.collectives.reductions import allgather as allgather
    from hvkeras.collectives.reductions import allreduce as allreduce
    from hvkeras.collectives.reductions import barrier as barrier
    from hvkeras.collectives.reductions import broadcast as broadcast
    from hvkeras.collectives.reductions import grouped_allgather as grouped_allgather
    from hvkeras.collectives.reductions import grouped_allreduce as grouped_allreduce
    from hvkeras.collectives.scattering import alltoall as alltoall
    from hvkeras.collectives.scattering import grouped_reducescatter as grouped_reducescatter
    from hvkeras.collectives.scattering import reducescatter as reducescatter
    from hvkeras.comparison.functions import compare as compare
    from hvkeras.compat.tensorflow_errors import ArgumentError as ArgumentError
    from hvkeras.compat.tensorflow_errors import DuplicateNameError as DuplicateNameError
    from hvkeras.compat.tensorflow_errors import MismatchError as MismatchError
    from hvkeras.data import shard as shard
    from hvkeras.diagnostics.timeline import start_timeline as start_timeline
    from hvkeras.diagnostics.timeline import stop_timeline as stop_timeline
    from hvkeras.errors import DivergenceError as DivergenceError
    from hvkeras.errors import HvkerasError as HvkerasError
    from hvkeras.errors import MachineError as MachineError
    from hvkeras.errors import NotInitializedError as NotInitializedError
    from hvkeras.errors import PeerError as PeerError
    from hvkeras.errors import UnsupportedError as UnsupportedError
    from hvkeras.errors import UsageError as UsageError
    from hvkeras.gradients.optimizer import DistributedOptimizer as DistributedOptimizer
    from hvkeras.gradients.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
    from hvkeras.gradients.optimizer import gather_optimizer as gather_optimizer
    from hvkeras.gradients.sessions import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook
    from hvkeras.gradients.tape import DistributedGradientTape as DistributedGradientTape
    from hvkeras.gradients.tape import PartialDistributedGradientTape as PartialDistributedGradientTape
    from hvkeras.job.process_sets import ProcessSet as ProcessSet
    from hvkeras.job.process_sets import add_process_set as add_process_set
    from hvkeras.job.process_sets import global_process_set as global_process_set
    from hvkeras.job.process_sets import remove_process_set as remove_process_set
    from hvkeras.job.queries import ccl_built as ccl_built
    from hvkeras.job.queries import cross_rank as cross_rank
    from hvkeras.job.queries import cross_size as cross_size
    from hvkeras.job.queries import cuda_built as cuda_built
    from hvkeras.job.queries import ddl_built as ddl_built
    from hvkeras.job.queries import gloo_built as gloo_built
    from hvkeras.job.queries import gloo_enabled as gloo_enabled
    from hvkeras.job.queries import gpu_available as gpu_available
    from hvkeras.job.queries import is_homogeneous as is_homogeneous
    from hvkeras.job.queries import local_rank as local_rank
    from hvkeras.job.queries import local_size as local_size
    from hvkeras.job.queries import mpi_built as mpi_built
    from hvkeras.job.queries import mpi_enabled as mpi_enabled
    from hvkeras.job.queries import mpi_threads_supported as mpi_threads_supported
    from hvkeras.job.queries import nccl_built as nccl_built
    from hvkeras.job.queries import rank as rank
    from hvkeras.job.queries import rocm_built as rocm_built
    from hvkeras.job.queries import size as size
    from hvkeras.job.queries import sycl_built as sycl_built
    from hvkeras.job.session import is_initialized as is_initialized
    from hvkeras.launcher.functions import run as run
    from hvkeras.startup import init as init
    from hvkeras.startup import shutdown as shutdown
    from hvkeras.startup import strategy as strategy
    from hvkeras.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
    from hvkeras.training.adaptation import adapt as adapt
    from hvkeras.training.fit_hooks import alone as alone
    from hvkeras.training.model_loading import load_model as load_model
    from hvkeras.training.moving_statistics import register_statistic as register_statistic
    from hvkeras.training.prediction import predict as predict
    from hvkeras.training.tuning import DistributedTuner as DistributedTuner
    from hvkeras.training.verbosity import rank0_callbacks as rank0_callbacks
    from hvkeras.training.verbosity import verbose as verbose
else:
    __all__ = ["__version__", *_ORIGIN, *_MODULES]  # noqa: PLE0604 - the table above holds strings


def _quiet_before_tensorflow() -> None:
    """Applies the log level to TensorFlow's C++ part, which reads its own only when it is loaded."""
    if "tensorflow" not in sys.modules:
        with contextlib.suppress(UsageError):  # init() reports it
            quiet_engines(Settings().log_level)


_quiet_before_tensorflow()
# Its repairs under strategies, of the group STRATEGIES in `hvkeras.compat.patches`, run once Keras 3 is imported.
wrapt.register_post_import_hook("hvkeras.compat.patches:repair", "keras.src.backend.tensorflow.trainer")
wrapt.register_post_import_hook("hvkeras.compat.patches:repair", "keras.src.backend.tensorflow.optimizer")
wrapt.register_post_import_hook("hvkeras.compat.patches:repair", "keras.src.optimizers.loss_scale_optimizer")
wrapt.register_post_import_hook("hvkeras.compat.patches:repair", "keras.src.random.seed_generator")


if not TYPE_CHECKING:

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
    return sorted({*globals(), *_ORIGIN, *_MODULES})
