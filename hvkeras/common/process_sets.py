"""Alias module for `horovod.common.process_sets`."""

from __future__ import annotations

from hvkeras.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
