"""Training on a Ray cluster, with the names and parameters of `horovod.ray`.

Ray is imported only when an executor starts its workers.
"""

from hvkeras.ray.comparison import compare
from hvkeras.ray.elastic import ElasticRayExecutor
from hvkeras.ray.executor import RayExecutor

__all__ = ["ElasticRayExecutor", "RayExecutor", "compare"]
