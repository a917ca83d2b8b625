"""hvkeras on Apache Spark: ranks in the tasks of a barrier stage. Also importable as Horovod's `horovod.spark`.

Names are resolved lazily, so that importing this package does not import pyspark.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# The module of each public name.
_HOMES = {
    "hvkeras.spark.functions": ("run", "run_elastic"),
    "hvkeras.spark.comparison": ("compare",),
    "hvkeras.spark.mirrored_strategy_runner": ("MirroredStrategyRunner",),
    "hvkeras.spark.keras.estimator": ("KerasEstimator",),
    "hvkeras.spark.keras.model": ("KerasModel",),
    "hvkeras.spark.common.backend": ("SparkBackend",),
    "hvkeras.spark.common.store": ("Store", "LocalStore", "HDFSStore"),
}
_ORIGIN = {name: module for module, names in _HOMES.items() for name in names}

if TYPE_CHECKING:  # the same names for type checkers and editors; tests/unit/test_public_names.py compares
    from hvkeras.spark.common.backend import SparkBackend as SparkBackend
    from hvkeras.spark.common.store import HDFSStore as HDFSStore
    from hvkeras.spark.common.store import LocalStore as LocalStore
    from hvkeras.spark.common.store import Store as Store
    from hvkeras.spark.comparison import compare as compare
    from hvkeras.spark.functions import run as run
    from hvkeras.spark.functions import run_elastic as run_elastic
    from hvkeras.spark.keras.estimator import KerasEstimator as KerasEstimator
    from hvkeras.spark.keras.model import KerasModel as KerasModel
    from hvkeras.spark.mirrored_strategy_runner import MirroredStrategyRunner as MirroredStrategyRunner
else:
    __all__ = [*_ORIGIN]  # noqa: PLE0604 - the table above holds strings

    def __getattr__(name: str) -> Any:
        if name in _ORIGIN:
            return getattr(importlib.import_module(_ORIGIN[name]), name)
        raise AttributeError(f"module 'hvkeras.spark' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *_ORIGIN})
