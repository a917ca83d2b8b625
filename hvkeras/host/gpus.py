"""GPU placement: visible GPUs of a process, the assignment of GPUs to ranks, and memory growth."""

from __future__ import annotations

import collections
import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvkeras.host.console import some_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NCCL_HOST = "NCCL_HOSTID"  # NCCL treats ranks with different values as ranks on different hosts
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_UUID_BYTES, _NAME_BYTES = 16, 256


def seen_gpus(may_choose: bool = True) -> dict[str, Any]:
    """Return the facts about visible GPUs that a rank sends to the other ranks. No GPU is initialised.

    Args:
        may_choose: Whether hvkeras may assign GPUs; the setting `gpu_placement`.

    Returns:
        - `names`: For each GPU, in TensorFlow's order, its name for users.
        - `ids`: For each GPU, an ID that is unique over all hosts.
        - `model`: Product name of the first GPU.
        - `taken`: Indices of the GPUs that this process computes on. None if hvkeras assigns them, because the script
          has chosen none and TensorFlow has not started.
        - `state`: `started` if TensorFlow has started, `open` if the script may still choose.
        - `nccl_host`: NCCL_HOSTID, if the user has set it.
        - `unused`: Number of GPUs that only the driver sees, as TensorFlow was built without CUDA or lacks a library.
    """
    import tensorflow as tf
    from tensorflow.python.eager import context

    physical, visible = tf.config.list_physical_devices("GPU"), tf.config.get_visible_devices("GPU")
    if not physical:
        return {"names": [], "ids": [], "model": "", "taken": [], "state": "", "nccl_host": "",
                "unused": len(_driver_gpus())}
    state = ("started" if context.context()._context_handle is not None else "" if visible != physical or may_choose
             else "open")
    names, known = _names(len(physical)), _driver_gpus()
    ids, models = zip(*known, strict=True) if len(known) == len(physical) else (names, ("",))
    return {"names": names, "ids": list(ids), "model": models[0],
            "taken": None if visible == physical and not state else [physical.index(gpu) for gpu in visible],
            "state": state, "nccl_host": os.environ.get(_NCCL_HOST, ""), "unused": 0}


def _names(count: int) -> list[str]:
    # As in CUDA_VISIBLE_DEVICES if it is set, else indices.
    entries = [entry.strip() for entry in os.environ.get(VISIBLE, "").split(",") if entry.strip()]
    return [entries[number] if number < len(entries) else str(number) for number in range(count)]


def _driver_gpus() -> list[tuple[str, str]]:
    """Return UUID and product name of each visible GPU; empty without NVIDIA's driver.

    TensorFlow's indices do not identify a GPU: in a container or a job step, each rank's only GPU may have index 0.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device = ctypes.c_int(), ctypes.c_int()
    uuid, name = (ctypes.c_char * _UUID_BYTES)(), ctypes.create_string_buffer(_NAME_BYTES)
    read_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid  # v2: also for MIG instances
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for number in range(count.value):
        if (cuda.cuDeviceGet(ctypes.byref(device), number) or read_uuid(ctypes.byref(uuid), device)
                or cuda.cuDeviceGetName(name, _NAME_BYTES, device)):
            return []
        found.append((uuid.raw.hex(), name.value.decode(errors="replace")))
    return found


def take_gpus(numbers: Sequence[int]) -> None:
    """Restrict this process to some GPUs, with memory growth unless the user has configured it.

    Must be called before TensorFlow starts. A script may then do the same itself, as Horovod's scripts do.

    Args:
        numbers: Indices among the visible GPUs; the first becomes TensorFlow's `/GPU:0`.
    """
    import tensorflow as tf

    config = tf.config
    physical = config.list_physical_devices("GPU")
    undecided = [gpu for gpu in physical if config.experimental.get_memory_growth(gpu) is None
                 and not config.get_logical_device_configuration(gpu)]
    if _GROWTH not in os.environ and all(physical[number] in undecided for number in numbers):
        for gpu in undecided:
            config.experimental.set_memory_growth(gpu, True)
    config.set_visible_devices([physical[number] for number in numbers], "GPU")


def gpus_in_use() -> str:
    """Return the names for users of the GPUs that this process computes on; "" if there are none."""
    import tensorflow as tf

    seen = tf.config.list_physical_devices("GPU")
    names = _names(len(seen))
    return ", ".join(names[seen.index(gpu)] for gpu in tf.config.get_visible_devices("GPU"))


@dataclass(frozen=True)
class GpuPlacement:
    """Assignment of GPUs to ranks, equal on all ranks.

    Attributes:
        facts: Facts that the ranks exchange at the start, including `seen_gpus`, in rank order.
        numbers: For each rank, the indices of its GPUs among its visible ones.
    """

    facts: tuple[Mapping[str, Any], ...]
    numbers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, facts: Sequence[Mapping[str, Any]]) -> GpuPlacement:
        """Assign each rank the GPU with the fewest users: that of its local rank, where all ranks see the same GPUs.

        A rank keeps all visible GPUs, for a strategy, if no other rank sees any of them.

        Args:
            facts: Facts that the ranks exchange at the start, in rank order.
        """
        users = collections.Counter(_key(fact, fact["gpus"]["taken"][0]) for fact in facts if fact["gpus"]["taken"])
        viewers = collections.Counter(_key(fact, number) for fact in facts for number in range(_count(fact)))

        def choose(fact: Mapping[str, Any]) -> tuple[int, ...]:
            if fact["gpus"]["taken"] is not None:
                return tuple(fact["gpus"]["taken"])
            if all(viewers[_key(fact, number)] == 1 for number in range(_count(fact))):
                return tuple(range(_count(fact)))
            best = min(range(_count(fact)), key=lambda number: users[_key(fact, number)])
            users[_key(fact, best)] += 1
            return (best,)

        return cls(tuple(facts), tuple(choose(fact) for fact in facts))

    def take(self, rank: int) -> None:
        """Restrict this process, as the given rank, to its GPUs, unless the script has chosen some."""
        if self.facts[rank]["gpus"]["taken"] is None:
            take_gpus(self.numbers[rank])

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank, in the form that NCCL distinguishes GPUs by; "" for a CPU."""
        return tuple(":".join([fact["gpus"]["nccl_host"] or fact["identity"], fact["gpus"]["ids"][numbers[0]]])
                     if numbers else "" for fact, numbers in zip(self.facts, self.numbers, strict=True))

    @property
    def each_has_own(self) -> bool:
        """Return whether every rank computes on a GPU that no other rank uses."""
        return all(self.devices) and len(set(self.devices)) == len(self.devices)

    def sentence(self) -> str:
        """Return the GPU of every rank, by host, as text; "" if there are none, or if scripts may still choose."""
        if not any(self.numbers) or any(fact["gpus"]["state"] == "open" for fact in self.facts):
            return ""
        hosts: dict[str, list[str]] = {}
        names = {fact["identity"]: fact["host"] for fact in self.facts}
        for fact, numbers in zip(self.facts, self.numbers, strict=True):
            own = "+".join(fact["gpus"]["names"][number] for number in numbers) or "none"
            hosts.setdefault(fact["identity"], []).append(own)
        lists = {host: ", ".join(own) for host, own in hosts.items()}
        if len(set(lists.values())) == 1:
            where = next(iter(lists.values())) + (f" on each of {len(lists)} hosts" if len(lists) > 1 else "")
        else:
            where = some_of([f"{own} on {names[host]}" for host, own in lists.items()], "; ")
        models = sorted({fact["gpus"]["model"] for fact in self.facts} - {""})
        kind = f" ({', '.join(models)})" if models else ""
        used = [_key(fact, numbers[0]) for fact, numbers in zip(self.facts, self.numbers, strict=True) if numbers]
        shared = len(set(used)) < len(used)
        several = any(len(numbers) > 1 for numbers in self.numbers)
        late = any(fact["gpus"]["state"] == "started" and len(numbers) > 1
                   for fact, numbers in zip(self.facts, self.numbers, strict=True))
        why = ", as TensorFlow had started before hvd.init(), which must come first" if late else ""
        return f"GPU of each rank: {where}{kind}" + (
            f", shared{why}" if shared else "; without a strategy, each rank computes on its first" if several else "")


def _count(fact: Mapping[str, Any]) -> int:
    return len(fact["gpus"]["ids"])


def _key(fact: Mapping[str, Any], number: int) -> tuple[str, str]:
    return fact["identity"], fact["gpus"]["ids"][number]
