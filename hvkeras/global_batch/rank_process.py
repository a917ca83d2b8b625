"""Process of a rank that runs a script for one process: its environment, and the hooks that make it train.

`hvkeras exec --data-parallel` prepares the environment, and then becomes the command of the rank. In the first Python
process of that command, `site/sitecustomize.py` calls `install()`, before the script's first line. Processes that this
one starts are helpers, such as data loaders: they stay unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import wrapt

from hvkeras.control.launch_environments import Launch, detect_launch, hvkeras_run
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.settings import PREFIX, Settings

FLAG, WITHOUT_FOLDERS = "--data-parallel", "--no-private-folders"
SITE = Path(__file__).parent / "site"
SWITCH, _PROCESS = f"{PREFIX}DATA_PARALLEL", f"{PREFIX}DATA_PARALLEL_PROCESS"
_HASH_SEED = "PYTHONHASHSEED"  # the seed of everything; Python itself reads it at its start
_KERAS = "tensorflow"  # the only backend of Keras that is supported


def wrapped(command: Sequence[str], private_folders: bool) -> list[str]:
    """Return a command line that prepares the process of a rank, and then runs `command` in it.

    Args:
        private_folders: Whether ranks other than 0 write to private folders.
    """
    flags = [FLAG] if private_folders else [FLAG, WITHOUT_FOLDERS]
    return [sys.executable, "-m", "hvkeras", "exec", *flags, "--", *command]


def become(command: list[str], private_folders: bool) -> NoReturn:
    """Replace this process by a command, with the environment of a rank; with one rank, with the current environment.

    Args:
        private_folders: As for `wrapped`.

    Raises:
        UsageError: The command cannot be started, or a variable of the launcher or a setting cannot be read.
    """
    settings, launch, environ = Settings(), detect_launch(), dict(os.environ)
    if launch.size > 1:
        environ = environment(environ, seed_of(settings, launch))
        if launch.rank and launch.launcher != hvkeras_run.LAUNCHER:  # `hvkeras run` only shows that of rank 0
            _mute(1)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise UsageError(explain(f"The command must start on every host ({error.strerror})",
                                 "check its spelling, the PATH and the current folder there",
                                 command=command[0])) from None


def environment(environ: Mapping[str, str], seed: int) -> dict[str, str]:
    """Return an environment in which the first Python process of a rank calls `install()` at its start.

    Args:
        environ: The environment to extend.
        seed: Seed of all random numbers that the script does not seed itself, unless PYTHONHASHSEED is a number.
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    chosen = environ.get(_HASH_SEED, "")
    without = {name: value for name, value in environ.items() if name != _PROCESS}
    return {**without, "PYTHONPATH": os.pathsep.join([str(SITE), *paths]), SWITCH: "on",
            _HASH_SEED: chosen if chosen.isdecimal() else str(seed)}


def seed_of(settings: Settings, launch: Launch) -> int:
    """Return a seed that is equal on all ranks and, where the launcher identifies the job, differs between jobs."""
    meeting = launch.rendezvous
    shared = "\n".join([settings.secret, meeting.address, meeting.job, *launch.cluster])
    return int.from_bytes(hashlib.sha256(shared.encode()).digest()[:4], "big")


def install() -> None:
    """Seed Python's, NumPy's and TensorFlow's random numbers, and make `import keras` join the job."""
    process, seed = os.getpid(), int(os.environ[_HASH_SEED])
    os.environ[_PROCESS] = str(process)
    random.seed(seed)

    def after_import(module: str, function: Callable[[Any], None]) -> None:
        # Not in processes that were forked from this one.
        wrapt.register_post_import_hook(lambda found: function(found) if os.getpid() == process else None, module)

    after_import("numpy.random", lambda found: found.seed(seed))
    after_import("tensorflow", lambda found: found.random.set_seed(seed))
    after_import("tf_keras", _refuse_tf_keras)
    after_import("keras", _start)


@functools.cache  # once, even if Keras is imported again
def _start(keras: Any) -> None:
    backend = keras.config.backend()
    if backend != _KERAS:
        raise UnsupportedError(explain(f"{FLAG} trains with Keras's backend {_KERAS}",
                                       f"unset KERAS_BACKEND, or run without {FLAG}", backend=backend))
    resolve_name("hvkeras.startup:data_parallel")()  # by name, since that package is above this one


def _refuse_tf_keras(_: Any) -> None:
    raise UnsupportedError(explain(f"{FLAG} trains models of Keras 3, not of tf_keras", "unset TF_USE_LEGACY_KERAS and"
                                   f" import keras; or call hvd.init() in the script, and run without {FLAG}"))


def _mute(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
