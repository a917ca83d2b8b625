"""Checks what jobs on Spark need: pyspark, a Java, and the same Python in Spark's workers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from hvkeras.diagnostics.check_build import INSTALL_JAVA, java, version_of
from hvkeras.diagnostics.doctor.finding import NOTE, OK, Finding

OLDEST_JAVA = 17
_DEADLINE = 20.0  # seconds for `java -version`


def spark(version: str, environ: Mapping[str, str]) -> Finding:
    """Checks whether `hvkeras.spark` works here.

    Args:
        version: The installed version of pyspark.
        environ: The environment variables, which may name Spark's Python.
    """
    command = java()
    if not command:
        return Finding("Spark", NOTE, f"pyspark {version} is installed, but no Java", INSTALL_JAVA)
    major = _major_of(command)
    if major is None:
        return Finding("Spark", NOTE, f"pyspark {version} is installed, but {command} does not start", INSTALL_JAVA)
    if major < OLDEST_JAVA:
        return Finding("Spark", NOTE, f"pyspark {version} needs Java {OLDEST_JAVA} or later, and {command} is {major}",
                       INSTALL_JAVA)
    named = environ.get("PYSPARK_PYTHON") or "python3"
    python = shutil.which(named) or named
    if _prefix_of(python) != _prefix_of(sys.executable):
        return Finding("Spark", NOTE, f"pyspark {version} and Java {major}, but Spark's workers would run {python}",
                       f"export PYSPARK_PYTHON={sys.executable}")
    if not version_of("pyarrow"):
        return Finding("Spark", NOTE, f"pyspark {version} and Java {major}; KerasEstimator needs pyarrow as well",
                       "pip install 'hvkeras[spark]'")
    return Finding("Spark", OK, f"pyspark {version}, Java {major}")


def _prefix_of(python: str) -> str:
    """Returns the folder of a Python's environment; several names in it are the same Python."""
    return os.path.dirname(os.path.abspath(python))


def _major_of(command: str) -> int | None:
    """Returns the major version of a Java; None if it does not start."""
    try:
        done = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=_DEADLINE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found else None
