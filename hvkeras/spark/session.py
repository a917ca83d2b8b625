"""The program's Spark session: its context, its task slots and its configuration."""

from __future__ import annotations

import contextlib
import re
from importlib.util import find_spec
from typing import Any

from hvkeras.errors import NotInstalledError, UsageError, explain

INSTALL = "pip install 'hvkeras[spark]', and install a Java that it works with (17 or 21)"
_LOCAL = re.compile(r"local(\[.*\])?")


def require_pyspark() -> None:
    """Check that pyspark is installed, without importing it.

    Raises:
        NotInstalledError: pyspark is not installed.
    """
    if find_spec("pyspark") is None:
        raise NotInstalledError(explain("pyspark must be installed for hvkeras.spark", INSTALL))


def active_context() -> Any:
    """Return the context of the program's Spark session.

    Raises:
        NotInstalledError: pyspark is not installed.
        UsageError: There is no session, or it uses Spark Connect, which does not support barrier stages of RDDs.
    """
    require_pyspark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context = SparkContext._active_spark_context
    if context is not None:
        return context
    session = SparkSession.getActiveSession()
    if session is not None and type(session).__module__.startswith("pyspark.sql.connect"):
        raise UsageError(explain("hvkeras.spark must run in the driver of a classic Spark session",
                                 "start the program with spark-submit, or with a master instead of a remote",
                                 session=type(session).__module__))
    raise UsageError(explain("hvkeras.spark must run in a program that has a Spark session",
                             "spark = pyspark.sql.SparkSession.builder.getOrCreate()"))


def slots_of(context: Any) -> int:
    """Return the number of tasks that the present executors can run at the same time."""
    scala = context._jsc.sc()
    with contextlib.suppress(Exception):  # internal to Spark
        return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
    return int(context.defaultParallelism)


def is_fixed(context: Any) -> bool:
    """Return whether the number of slots is fixed, because Spark runs in local mode inside the driver."""
    return _LOCAL.fullmatch(context.master) is not None


def configured(context: Any, key: str, default: str = "") -> str:
    """Return the value of a setting of Spark, or `default` if it is not set."""
    return str(context.getConf().get(key, default))


def is_on(context: Any, key: str) -> bool:
    """Return whether a boolean setting of Spark is true."""
    return configured(context, key, "false").strip().lower() == "true"
