"""What hvkeras needs beyond its own dependencies: TensorFlow, whose variant the user chooses."""

from __future__ import annotations

from importlib.util import find_spec

from hvkeras.errors import NotInstalledError, explain

TENSORFLOW = "pip install 'tensorflow>=2.16,<2.22', or tensorflow-cpu, or tensorflow[and-cuda] for NVIDIA's GPUs"


def require_tensorflow() -> None:
    """Checks that TensorFlow is installed, without importing it.

    Raises:
        NotInstalledError: It is not installed.
    """
    if find_spec("tensorflow") is None:
        raise NotInstalledError(explain("TensorFlow must be installed where ranks run, and hvkeras leaves the choice"
                                        " of package to you", TENSORFLOW))
