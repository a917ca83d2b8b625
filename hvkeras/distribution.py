"""Keras's distribution API on TensorFlow, which Keras itself implements for JAX only.

Scripts that call `keras.distribution.initialize()` and `set_distribution(DataParallel())` train on all ranks, with the
result of one process (`hvkeras.global_batch`). `import hvkeras` installs the functions of this module in Keras.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from hvkeras.compat import patches
from hvkeras.control.launch_environments import detect_launch, initialized_launch
from hvkeras.control.launch_environments.keras_distribution import LAUNCHER, require_agreement
from hvkeras.errors import UnsupportedError, explain
from hvkeras.job.session import current_session, is_initialized
from hvkeras.startup import join


def install(module: ModuleType) -> None:
    """Install the API in Keras 3; called by wrapt after the import of Keras's module for devices of TensorFlow.

    With JAX, Keras imports that module as well, to read datasets.
    """
    if importlib.import_module("keras.src.backend.config").backend() == "tensorflow":
        _install(module)
        wrapt.register_post_import_hook(_install, "keras.src.distribution.distribution_lib")


def _install(module: ModuleType) -> None:
    patches.install(patches.DISTRIBUTION, _BEHAVIOUR, modules={module.__name__: module})


def initialize(job_addresses: str | None = None, num_processes: int | None = None, process_id: int | None = None,
               ) -> None:
    """Join the job of this process; nothing happens in a job of one process.

    Args:
        job_addresses: `host:port` of process 0, or of all processes, separated by commas; None under a launcher.
        num_processes: The number of processes; None under a launcher.
        process_id: The index of this process; None under a launcher.

    Raises:
        UsageError: The arguments contradict the launcher or each other, or some are missing.
        MachineError: As for `init()`.
        PeerError: As for `init()`.
    """
    if is_initialized():
        session = current_session()
        require_agreement(session.launch.launcher, session.topology.rank, session.topology.size, num_processes,
                          process_id)
        return
    launch = initialized_launch(job_addresses, num_processes, process_id)
    if launch.size > 1:
        join(launch=launch if launch.launcher == LAUNCHER else None)
        _agree_on_seeds()


def num_processes() -> int:
    """Return the number of ranks."""
    return _rank_and_size()[1]


def process_id() -> int:
    """Return this process's rank."""
    return _rank_and_size()[0]


def list_devices(original: Callable[..., list[str]], device_type: str | None = None) -> list[str]:
    """Return the devices of all ranks, which have equally many."""
    _, size = _rank_and_size()  # before TensorFlow initializes its devices: joining chooses the GPU of this rank
    own = original(device_type)
    if size == 1 or not own:
        return own
    kind = own[0].partition(":")[0]
    return [f"{kind}:{index}" for index in range(len(own) * size)]


def get_device_count(device_type: str | None = None) -> int:
    """Return the number of devices of all ranks."""
    from keras.src.distribution import list_devices as patched  # noqa: PLC0415 - Keras, which is being imported above

    return len(patched(device_type))


def set_distribution(value: Any) -> None:
    """Train on all ranks from now on, before Keras stores a distribution; nothing happens in a job of one process.

    Raises:
        UnsupportedError: It is not data parallelism over all devices.
    """
    if value is None or _rank_and_size()[1] == 1:
        return
    _require_all_devices(value)
    _require_whole_batches(value)
    from hvkeras.global_batch import mode  # noqa: PLC0415 - imports TensorFlow

    mode.start(lambda: _require_whole_batches(value))


def _require_whole_batches(value: Any) -> None:
    if not getattr(value, "auto_shard_dataset", True):
        raise UnsupportedError(explain(
            "On TensorFlow, DataParallel divides the batches of one process", "leave out auto_shard_dataset=False, and"
            " give each process the whole data; or, where each process has its own part of them, leave out"
            " set_distribution, and write: import hvkeras as hvd; hvd.init(); optimizer ="
            " hvd.DistributedOptimizer(optimizer); and BroadcastGlobalVariablesCallback(0) in fit's callbacks",
            auto_shard_dataset=False))


def _rank_and_size() -> tuple[int, int]:
    """Return rank and size; join the job first if its launcher has announced several ranks."""
    if not is_initialized():
        if detect_launch().size == 1:
            return 0, 1
        initialize()
    topology = current_session().topology
    return topology.rank, topology.size


def _require_all_devices(value: Any) -> None:
    from keras.distribution import DataParallel, list_devices  # noqa: PLC0415 - Keras, which may be being imported

    if not isinstance(value, DataParallel):
        raise UnsupportedError(explain("On TensorFlow, only keras.distribution.DataParallel is supported: every rank"
                                       " holds the whole model", "use DataParallel(), or JAX for a model"
                                       " that does not fit on one device", distribution=type(value).__name__))
    given, everything = [str(one).lower() for one in value.device_mesh.devices.flatten()], list_devices()
    if sorted(given) != sorted(everything):
        raise UnsupportedError(explain("On TensorFlow, DataParallel must be over the devices of all ranks", "write"
                                       " DataParallel() without devices and mesh, after initialize(); for fewer ranks,"
                                       " start fewer", devices=given, all=everything))


def _agree_on_seeds() -> None:
    from hvkeras.global_batch import seeds  # noqa: PLC0415 - imports TensorFlow

    seeds.agree()


_BEHAVIOUR = patches.DistributionBehaviour(
    initialize=initialize, num_processes=num_processes, process_id=process_id, list_devices=list_devices,
    get_device_count=get_device_count, set_distribution=set_distribution)
