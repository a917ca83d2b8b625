"""Backend selection: the requested backend, or the first one in order of preference that all ranks support.

A job of one process uses `local`, unless a plug-in was requested (`hvkeras.job.session_start`).
"""

from __future__ import annotations

from typing import Any

from hvkeras.backends import backend_class, backend_names, importable_backends
from hvkeras.control.launch_environments import Launch
from hvkeras.errors import MachineError, UsageError, explain


def facts_of_rank(requested: str, launch: Launch) -> dict[str, Any]:
    """Return the facts about available backends that a rank sends to the other ranks.

    Args:
        requested: The backend that this rank requests, or `auto`.
        launch: How this process was launched.
    """
    names = [requested] if requested != "auto" else backend_names()
    return {
        "requested": requested,
        "objections": {name: _objection(name, launch, several_hosts=False) for name in names},
        "objections_between_hosts": {name: _objection(name, launch, several_hosts=True) for name in names},
        **{key: preference(launch, has_gpu) if requested == "auto" else [requested]
           for key, has_gpu in (("preferred", False), ("preferred_on_gpus", True))},
    }


def agree_on_backend(launch: Launch, facts: list[dict[str, Any]], has_gpu: bool = False) -> str:
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
    problems = {}
    one_host = len({fact["identity"] for fact in facts}) == 1
    for name in facts[0]["preferred_on_gpus" if has_gpu else "preferred"]:
        bad = [(rank, objection) for rank, fact in enumerate(facts)
               if (objection := fact["objections" if one_host else "objections_between_hosts"]
                   .get(name, "is not known there"))]
        if not bad:
            return str(name)
        problems[name] = f"{name} on rank {bad[0][0]}: {bad[0][1]}"
    raise MachineError(explain(f"A backend must be able to serve a job of {launch.launcher}: "
                               + "; ".join(problems.values()), "see hvkeras run --check-build for what works here",
                               backend=requested[0], size=len(facts)))


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
