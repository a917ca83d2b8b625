"""hvkeras on Apache Spark: ranks in the tasks of a barrier stage. Also importable as Horovod's `horovod.spark`.

Names are looked up on first use (`__init__.pyi` lists them), so importing this package imports nothing of pyspark.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
