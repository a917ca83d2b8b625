"""Preloading of modules (`hvkeras run --preload`): which programs a fork server can run, and its part of the job."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvkeras.launcher import fork_server
from hvkeras.settings import Settings

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?t?")
_SHEBANG = re.compile(rb"#!\s*(\S+/)?(env\s+)?(?P<python>\S*python[\d.]*)\s*(?P<option>\S*)\s*$")


Preload = dict[str, Any]  # as agents receive it; see `hvkeras.launcher.agent.ForkServer`


def preload_of(command: Sequence[str], settings: Settings, folder: str, path: str | None = None,
               prepare: Mapping[str, Any] | None = None) -> tuple[Preload, str]:
    """Return the part of a job for fork servers, and why they do not fork its ranks; both empty without --preload.

    Example:
        >>> preload_of(["numactl", "-N0", "python", "train.py"], Settings({"HVKERAS_PRELOAD": "keras"}), "/")
        ({}, 'numactl is not Python')

    Args:
        command: Command line of the ranks; empty if a host has its own.
        settings: Settings of the ranks.
        folder: Working folder of the ranks.
        path: Their PATH; that of this process by default.
        prepare: What prepares a forked process for the command: see `hvkeras.launcher.fork_server`.
    """
    if not settings.preload or not command:
        return {}, ""
    named, found = "", list(command)
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        script = command[0] if os.sep in command[0] else shutil.which(command[0], path=path)
        named, found = os.path.basename(command[0]), _interpreted(script, command, folder)
    split = fork_server.split_command(found) if found else None
    if split is None:
        why = "a fork server runs scripts, -m and -c" if found else f"{command[0]} is not Python"
        return {}, why
    python, program = split
    if prepare and Path(shutil.which(python[0], path=path) or "").parent != Path(sys.executable).parent:
        return {}, f"{python[0]} is not the Python of hvkeras, which prepares the process"
    return {
        "python": python,
        "boot": fork_server.BOOT,
        "order": {"modules": list(settings.preload), "program": program, "sources": sources()},
        "request": {"command": found, "name": named, "prepare": prepare},
        "timeout": settings.start_timeout,
    }, ""


def sources() -> list[tuple[str, str]]:
    """Return the names and sources of the modules of a fork server, which hosts without hvkeras run."""
    here = Path(__file__).parent
    return [(f"{__package__}.{name}", (here / f"{name}.py").read_text()) for name in ("preloading", "fork_server")]


def _interpreted(script: str | None, command: Sequence[str], folder: str) -> list[str]:
    """Return the command line to which the kernel expands that of a Python script; [] for other programs."""
    first = None
    with contextlib.suppress(OSError), open(os.path.join(folder, script or ""), "rb") as file:
        first = _SHEBANG.match(file.readline(4096).rstrip())
    if first is None or script is None:
        return []
    python = first["python"].decode() if first[2] else ((first[1] or b"") + first["python"]).decode()
    return [python, *filter(None, [first["option"].decode()]), script, *command[1:]]

