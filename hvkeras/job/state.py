from hvkeras.job.session import Session as Job, current_session as current_job, is_initialized  # noqa
def job_number():
    from hvkeras.job.session import _process
    return _process.session.number if _process.session else 0
