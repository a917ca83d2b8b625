# The public names of hvkeras.spark; see hvkeras/__init__.pyi.

from .common.backend import SparkBackend as SparkBackend
from .common.store import HDFSStore as HDFSStore
from .common.store import LocalStore as LocalStore
from .common.store import Store as Store
from .comparison import compare as compare
from .functions import run as run
from .functions import run_elastic as run_elastic
from .keras.estimator import KerasEstimator as KerasEstimator
from .keras.model import KerasModel as KerasModel
from .mirrored_strategy_runner import MirroredStrategyRunner as MirroredStrategyRunner
