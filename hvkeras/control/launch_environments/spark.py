"""Spark: ranks in the tasks of a barrier stage; rank 0's task serves the control channel."""

from __future__ import annotations

from collections.abc import Mapping

from hvkeras.control.launch_environments.launch import Launch, Names, served_launch

LAUNCHER = "Spark"
PROCESS_ID = "HVKERAS_SPARK_RANK"
PROCESS_COUNT = "HVKERAS_SPARK_SIZE"
LOCAL_PROCESS_ID = "HVKERAS_SPARK_LOCAL_RANK"
LOCAL_PROCESS_COUNT = "HVKERAS_SPARK_LOCAL_SIZE"
CONTROL_ADDRESS = "HVKERAS_SPARK_CONTROL"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Detect a rank in a Spark task."""
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    return served_launch(LAUNCHER, "spark", environ, names, CONTROL_ADDRESS)
