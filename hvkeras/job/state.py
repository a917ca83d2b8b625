"""Former names, until all use the new ones."""

from hvkeras.job.session import Session as Job
from hvkeras.job.session import current_session as current_job
from hvkeras.job.session import is_initialized

__all__ = ["Job", "current_job", "is_initialized", "job_number"]


def job_number() -> int:
    """The number of the session."""
    return current_job().number if is_initialized() else 0
