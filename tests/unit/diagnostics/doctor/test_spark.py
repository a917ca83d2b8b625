"""What `hvkeras doctor` finds about Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvkeras.diagnostics.doctor import software
from hvkeras.diagnostics.doctor.machine import NOTE, OK


def found(monkeypatch, tmp_path: Path, java: str = "17.0.1", python: str = sys.executable):
    command = tmp_path / "java"
    command.write_text(f"#!/bin/sh\necho 'openjdk version \"{java}\" 2025-04-15' >&2\n")
    command.chmod(0o755)
    monkeypatch.setattr(software, "version_of", {"pyarrow": "18"}.get)
    monkeypatch.setattr(software, "java", lambda: str(command) if java else "")
    return software.spark("4.3.0", {"PYSPARK_PYTHON": python})


@pytest.mark.parametrize(("options", "state", "text", "fix"), [
    ({}, OK, "pyspark 4.3.0, Java 17", ""),
    ({"java": ""}, NOTE, "but no Java", "openjdk-17"),
    ({"java": "1.8.0_392"}, NOTE, "needs Java 17 or later", "openjdk-17"),
    ({"python": "/usr/bin/env"}, NOTE, "workers would run /usr/bin/env", f"export PYSPARK_PYTHON={sys.executable}"),
])
def test_what_spark_needs_is_looked_for(options, state, text, fix, monkeypatch, tmp_path):
    finding = found(monkeypatch, tmp_path, **options)
    assert finding.state == state and text in finding.found and fix in finding.fix
