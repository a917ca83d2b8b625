"""Backend selection: the requested backend, or the first one in order of preference that all ranks support.

A job of one process uses `local`, unless a plug-in was requested (`hvkeras.job.session_start`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hvkeras.backends import backend_class, backend_names, importable_backends
from hvkeras.backends.capabilities import SharesMemory
from hvkeras.control.launch_environments import Launch
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.machine import SharedMemory


class Choice(NamedTuple):
    """The backend of a job.

    Attributes:
        without: Why `auto` passed over a backend that lacks shared memory, for a message; else "".
    """

    name: str
    without: str = ""


def facts_of_rank(requested: str, launch: Launch, restarted: bool = False) -> dict[str, Any]:
    """Return the facts about available backends that a rank sends to the other ranks.

    Args:
        requested: The backend that this rank requests, or `auto`.
        launch: How this process was launched.
        restarted: Whether ranks on this host may still hold the shared memory of an earlier session of the job, which
            then counts as free.
    """
    names = [requested] if requested != "auto" else backend_names()
    memory = SharedMemory.here()
    return {
        "requested": requested,
        "shared_memory": memory._replace(free=memory.size) if restarted else memory,
        "objections": {name: _objection(name, launch, several_hosts=False) for name in names},
        "objections_between_hosts": {name: _objection(name, launch, several_hosts=True) for name in names},
        **{key: preference(launch, has_gpu) if requested == "auto" else [requested]
           for key, has_gpu in (("preferred", False), ("preferred_on_gpus", True))},
    }


def agree_on_backend(launch: Launch, facts: list[dict[str, Any]], has_gpu: bool = False) -> Choice:
    """Return the first preferred backend that all ranks support.

    Args:
        launch: How this process was launched.
        facts: The result of `facts_of_rank` on each rank, in rank order.
        has_gpu: Whether every rank has a GPU that no other rank uses.

    Raises:
        UsageError: Ranks requested different backends.
        MachineError: No candidate is supported by all ranks.
    """
    requested = [fact["requested"] for fact in facts]
    if len(set(requested)) > 1:
        other = next(rank for rank, name in enumerate(requested) if name != requested[0])
        raise UsageError(explain("All ranks must request the same backend", "set it once, on the launcher's command"
                                 " line or in the script", rank_0=requested[0], **{f"rank_{other}": requested[other]}))
    problems, without = [], []
    one_host = len({fact["identity"] for fact in facts}) == 1
    for name in facts[0]["preferred_on_gpus" if has_gpu else "preferred"]:
        bad = [(rank, objection) for rank, fact in enumerate(facts)
               if (objection := fact["objections" if one_host else "objections_between_hosts"]
                   .get(name, "is not known there"))]
        lack = None if bad else lack_of_memory(name, facts)
        if bad:
            problems.append(f"{name} on rank {bad[0][0]}: {bad[0][1]}")
        elif lack is not None:
            problems.append(f"{name}: {lack.what}")
            without.append(lack)
        else:
            return Choice(str(name), "; ".join(f"backend {lack.backend} is not used: {lack.what}; {lack.fix}"
                                               for lack in without))
    others = "choose one that works here: hvkeras run --check-build lists them"
    raise MachineError(explain(f"A backend must be able to serve a job of {launch.launcher}: {'; '.join(problems)}",
                               ", or ".join([*(lack.fix for lack in without), others]),
                               backend=requested[0], size=len(facts)))


class Lack(NamedTuple):
    """Shared memory that a host lacks for a backend.

    Attributes:
        what: Description of what is missing.
    """

    backend: str
    what: str
    fix: str


def lack_of_memory(name: str, facts: list[dict[str, Any]]) -> Lack | None:
    """Return which host lacks the shared memory that a backend needs; None if all have enough.

    Args:
        name: The backend.
        facts: `identity`, `host` and `shared_memory` of each rank.
    """
    backend = importable_backends().get(name)
    if backend is None or not issubclass(backend, SharesMemory):
        return None
    identities = [fact["identity"] for fact in facts]
    for identity in dict.fromkeys(identities):
        own = [fact for fact in facts if fact["identity"] == identity]
        memory = min((SharedMemory(*fact["shared_memory"]) for fact in own), key=lambda each: each.free)
        needed = backend.shared_memory(len(own), len(set(identities)))
        if objection := memory.objection(needed, len(own), own[0]["host"]):
            return Lack(name, objection, memory.fix(needed))
    return None


def preference(launch: Launch, has_gpu: bool) -> list[str]:
    """Return the order in which `auto` tries the backends (`Backend.preference`)."""
    # A broken plug-in must not affect jobs that did not request it.
    indices = {name: backend.preference(launch, has_gpu) for name, backend in importable_backends().items()}
    return sorted((name for name, index in indices.items() if index is not None), key=lambda name: indices[name] or 0)


def _objection(name: str, launch: Launch, several_hosts: bool) -> str:
    try:
        chosen = backend_class(name)
    except MachineError as error:
        return str(error)
    available = chosen.availability()
    return chosen.objection(launch, several_hosts) if available.ok else available.reason
