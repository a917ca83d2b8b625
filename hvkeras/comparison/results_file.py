"""Results of a comparison for other programs: `results.json`, whose stable names are in docs/compare.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvkeras import __version__
from hvkeras.comparison.result import WARM_UP, Result
from hvkeras.comparison.rows import Comparison, Row, mean_split, reference_of
from hvkeras.comparison.table import sentences, warnings
from hvkeras.host.files import write_durably

SCHEMA = 1  # incremented for removals and changes of meaning, but not for additions
NAME = "results.json"


def write(comparison: Comparison, folder: Path) -> None:
    """Write `results.json` into a folder."""
    write_durably(folder / NAME, json.dumps(document(comparison), indent=1, allow_nan=False) + "\n")


def document(comparison: Comparison) -> dict[str, Any]:
    """Return the content of `results.json`."""
    return {
        "schema": SCHEMA,
        "hvkeras": __version__,
        "command": comparison.command,
        "processes": comparison.processes,
        "sizes": list(comparison.sizes),
        "repeat": comparison.repeat,
        "began": datetime.fromtimestamp(comparison.began, timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(comparison.seconds, 1),
        "warm_up_steps": WARM_UP,
        "reference": reference_of(comparison.compared),
        "machine": dict(comparison.machine),
        "one_process": comparison.cores,
        "data_parallel": comparison.data_parallel,
        "sentences": sentences(comparison),
        "warnings": warnings(comparison),
        "rows": rows(comparison),
        "runs": [_without_nonfinite(_run(run)) for row in comparison.rows for run in row.runs],
    }


def rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows as flat dictionaries, with units in the names; None means unknown."""
    return [_without_nonfinite(_row(row, comparison)) for row in comparison.rows]


def _row(row: Row, comparison: Comparison) -> dict[str, Any]:
    return {
        "backend": row.name, "processes": row.processes, "runs": len(row.good), "failure": row.reason,
        **_common_fields(row), "spread": row.spread, "speed_up": comparison.speed_up(row),
        "scaling_efficiency": comparison.share(row),
        **_step_parts(row.split), "steps_timed": sum(len(run.step_times) for run in row.good),
        "metrics": dict(row.good[0].metrics) if row.good else {}, "remarks": list(row.remarks),
    }


def _run(run: Result) -> dict[str, Any]:
    return {
        "backend": run.name, "processes": run.processes, "round": run.round, "failure": run.reason,
        "seconds": None if run.seconds is None else round(run.seconds, 1), **_common_fields(run),
        **_step_parts(mean_split(run.splits.values())), "steps_timed": len(run.step_times),
        "metrics": dict(run.metrics),
        "compile_seconds": run.compiling, "remarks": list(run.remarks),
        "ranks": [{"rank": rank, **_step_parts(split)} for rank, split in sorted(run.splits.items())],
        "losses": [[round(seconds, 3), loss if math.isfinite(loss) else None] for seconds, loss in run.losses],
    }


def _common_fields(source: Row | Result) -> dict[str, Any]:
    lower, median, upper = source.step or (None, None, None)
    difference = source.difference
    return {
        "step_ms": _milliseconds(median), "step_ms_lower": _milliseconds(lower), "step_ms_upper": _milliseconds(upper),
        "samples_per_s": source.samples, "bytes_per_step": source.bytes_in_step,
        "sent_bytes_per_step": source.sent,
        "peak_memory_bytes": source.peak_memory,
        "accuracy": None if source.accuracy is None else source.accuracy.value,
        "accuracy_source": "" if source.accuracy is None else source.accuracy.source,
        "loss": None if source.loss is None else source.loss.value,
        "loss_source": "" if source.loss is None else source.loss.source,
        "weight_difference": None if isinstance(difference, str) else difference,
        "weight_remark": difference if isinstance(difference, str) else "",
    }


def _step_parts(split: Any) -> dict[str, float | None]:
    names = ("input", "compute", "update", "wait", "communication", "hidden")
    values = {} if split is None else asdict(split)
    return {f"{name}_ms": _milliseconds(values.get(name)) for name in names}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _without_nonfinite(numbers: Mapping[str, Any]) -> dict[str, Any]:  # JSON has no NaN and no infinity
    return {name: _finite(value) for name, value in numbers.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _without_nonfinite(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
