"""The Spark session of the program: its context, and how many tasks it can run at the same time."""

from __future__ import annotations

import contextlib
import re
from importlib.util import find_spec
from typing import Any

from hvkeras.errors import NotInstalledError, UsageError, explain

INSTALL = "pip install 'hvkeras[spark]', and install a Java that it works with (17 or 21)"
_LOCAL = re.compile(r"local(\[.*\])?")


def require_pyspark() -> None:
    """Checks that pyspark is installed, without importing it.

    Raises:
        NotInstalledError: It is not.
    """
    if find_spec("pyspark") is None:
        raise NotInstalledError(explain("pyspark must be installed for hvkeras.spark", INSTALL))


def active_context() -> Any:
    """Returns the context of the program's Spark session.

    Raises:
        NotInstalledError: pyspark is not installed.
        UsageError: There is no session, or it is one of Spark Connect, which has no barrier stages of RDDs.
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
    """Returns how many tasks Spark can run at the same time with the executors that it has now.

    Args:
        context: The Spark context.
    """
    scala = context._jsc.sc()
    with contextlib.suppress(Exception):  # internal to Spark
        return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
    return int(context.defaultParallelism)


def is_fixed(context: Any) -> bool:
    """Whether the number of slots cannot grow: Spark runs inside the driver."""
    return _LOCAL.fullmatch(context.master) is not None


def configured(context: Any, key: str, default: str = "") -> str:
    """Returns the value of one of Spark's own settings.

    Args:
        context: The Spark context.
        key: The setting's name.
        default: The value if it is not set.
    """
    return str(context.getConf().get(key, default))


def is_on(context: Any, key: str) -> bool:
    """Whether one of Spark's own switches is on."""
    return configured(context, key, "false").strip().lower() == "true"
