"""Disables Keras's automatic XLA (`jit_compile="auto"`) if a backend's collectives cannot be compiled."""

from __future__ import annotations

import functools

from hvkeras.backends.capabilities import objection_to_xla
from hvkeras.host.console import say
from hvkeras.job.state import current_job, is_initialized


def refuses_xla() -> bool:
    """Whether Keras's automatic XLA must be off because the backend's collectives cannot be compiled."""
    if not is_initialized():
        return False
    job = current_job()
    if job.topology.size == 1 or not objection_to_xla(job.backend):
        return False
    if job.topology.rank == 0:
        _say_no_xla(job.backend.name)
    return True


@functools.cache
def _say_no_xla(backend: str) -> None:
    say(f'jit_compile="auto" means False here: XLA cannot compile the collectives of the backend {backend!r}')
