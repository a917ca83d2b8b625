"""Process of a rank that runs a script for one process: its environment, and the hooks that make it train.

`hvkeras exec --data-parallel` prepares the environment, and then becomes the command of the rank. In the first Python
process of that command, `site/sitecustomize.py` calls `install()`, before the script's first line. Processes that this
one starts are helpers, such as data loaders: they stay unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import random
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import wrapt

from hvkeras.control.launch_environments import Launch, detect_launch, hvkeras_run
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.host import private_folders as private
from hvkeras.host.console import prints_at, say
from hvkeras.host.forks import at_exit
from hvkeras.host.private_folders import PrivateFolders
from hvkeras.settings import PREFIX, Settings

FLAG, WITHOUT_FOLDERS = "--data-parallel", "--no-private-folders"
SITE = Path(__file__).parent / "site"
SWITCH, _PROCESS, _FOLDERS = (PREFIX + name for name in ("DATA_PARALLEL", "DATA_PARALLEL_PROCESS",
                                                          "DATA_PARALLEL_FOLDERS"))
_HASH_SEED = "PYTHONHASHSEED"  # the seed of everything; Python itself reads it at its start


def wrapped(command: Sequence[str], private_folders: bool) -> list[str]:
    """Return a command line that prepares the process of a rank, and then runs `command` in it.

    Args:
        private_folders: Whether ranks other than 0 write to private folders.
    """
    flags = [FLAG] if private_folders else [FLAG, WITHOUT_FOLDERS]
    return [sys.executable, "-m", "hvkeras", "exec", *flags, "--", *command]


def prepare(command: Sequence[str], private_folders: bool) -> None:
    """Make this process that of a rank, in a fork server's process that will run the command.

    Args:
        command: Command line of a Python program.
        private_folders: As for `wrapped`.
    """
    environ = environment_of_rank(command, private_folders)
    os.environ.clear()
    os.environ.update(environ)
    sys.path.insert(1, str(SITE))
    install()


def environment_of_rank(command: Sequence[str], private_folders: bool) -> dict[str, str]:
    """Enter the private folders of a rank, and return the environment of its command.

    With one rank, the environment stays the same, except that the rank records what a report or comparison needs.

    Args:
        command: Command line of the rank.
        private_folders: As for `wrapped`.

    Raises:
        UsageError: A variable of the launcher or a setting cannot be read.
    """
    settings, launch, environ = Settings(), detect_launch(), dict(os.environ)
    if launch.size > 1:
        environ = environment(environ, seed_of(settings, launch))
        environ.update(_enter_folders(settings, launch, command, private_folders))
        if launch.rank and launch.launcher != hvkeras_run.LAUNCHER:  # `hvkeras run` only shows that of rank 0
            _mute(1)
    elif is_recorded(settings):
        environ = recorded(environ)
    return environ


def is_recorded(settings: Settings) -> bool:
    """Return whether ranks record their training, and therefore join a job even if it has only one rank."""
    return bool(settings.record or settings.report or settings.trace_steps)


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which the only rank of a job calls `install()`, which makes it join the job."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    without = {name: value for name, value in environ.items() if name not in (SWITCH, _PROCESS, _FOLDERS)}
    return {**without, "PYTHONPATH": os.pathsep.join([str(SITE), *paths])}


def environment(environ: Mapping[str, str], seed: int) -> dict[str, str]:
    """Return an environment in which the first Python process of a rank calls `install()` at its start.

    Args:
        environ: The environment to extend.
        seed: Seed of all random numbers that the script does not seed itself, unless PYTHONHASHSEED is a number.
    """
    chosen = environ.get(_HASH_SEED, "")
    return {**recorded(environ), SWITCH: "on", _HASH_SEED: chosen if chosen.isdecimal() else str(seed)}


def with_hash_seed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with a seed for all ranks of a job, which a fork server needs when its Python starts."""
    chosen = environ.get(_HASH_SEED, "")
    return {**environ, _HASH_SEED: chosen if chosen.isdecimal() else str(secrets.randbits(32))}


def seed_of(settings: Settings, launch: Launch) -> int:
    """Return a seed that is equal on all ranks and, where the launcher identifies the job, differs between jobs."""
    return int(_shared_digest(settings, launch)[:8], 16)


def _shared_digest(settings: Settings, launch: Launch) -> str:
    meeting = launch.rendezvous
    shared = "\n".join([settings.secret, meeting.address, meeting.job, *launch.cluster])
    return hashlib.sha256(shared.encode()).hexdigest()


_OF_IMPORTS = ("importlib", "_frozen_importlib", "_frozen_importlib_external", "wrapt", "horovod")
# Settings with paths that all ranks must see.
_COMMON_PATHS = ("elastic_dir", "record", "rendezvous_dir", "report", "run_cause", "timeline", "trace_file")


def _enter_folders(settings: Settings, launch: Launch, command: Sequence[str], private_ones: bool) -> dict[str, str]:
    """Make the working folder private, and that of the script, and return the variables for the command."""
    scripts = [Path(word).absolute().parent for word in command[:3] if word.endswith(".py") and Path(word).is_file()]
    key = _shared_digest(settings, launch)[-16:]
    folders = private.enter(key, [Path.cwd(), *scripts] if private_ones else [], launch.rank == 0,
                            settings.start_timeout)
    if launch.rank == 1 and private_ones:
        _explain_folders(settings, folders)
    if folders is None:
        return {}
    here = {"PWD": os.getcwd()} if folders.pairs else {}
    paths = {name: getattr(settings, name) for name in _COMMON_PATHS if getattr(settings, name)}
    return {_FOLDERS: folders.to_text(), **here,
            **{PREFIX + name.upper(): str(folders.common(path)) for name, path in paths.items()}}


def _explain_folders(settings: Settings, folders: PrivateFolders | None) -> None:
    if folders is None or not folders.pairs:
        level, text = "WARNING", "all ranks write to the same working folder: private ones cannot be created here"
    else:
        level, text = "INFO", (f"ranks other than 0 write to private folders ({folders.how}), which are removed at the"
                               f" end: {', '.join(str(pair[folders.how == 'copy']) for pair in folders.pairs)}")
    if prints_at(settings, level):
        say(text)


def install() -> None:
    """Make this process do the same as those of other ranks, and make `import tensorflow` or a Keras join the job.

    Random numbers of Python, NumPy and TensorFlow have the same seeds, in a comparison also in its job of one rank.
    Private folders are listed in the order of the common ones.
    """
    process = os.getpid()
    os.environ[_PROCESS] = str(process)

    def after_import(module: str, function: Callable[[Any], None]) -> None:
        # Not in processes that were forked from this one.
        wrapt.register_post_import_hook(lambda found: function(found) if os.getpid() == process else None, module)

    settings, chosen = Settings(), os.environ.get(_HASH_SEED, "")
    if chosen.isdecimal() and (settings.data_parallel or settings.record):  # not for the report on one rank
        seed = int(chosen)
        random.seed(seed)
        after_import("numpy.random", lambda found: found.seed(seed))
        after_import("tensorflow", lambda found: found.random.set_seed(seed))
    after_import("horovod", _refuse_horovod)
    after_import("keras.src.backend.config", _require_tensorflow)
    for module in _TRAINING:
        after_import(module, _start)
    entered = folders()
    if entered is not None:
        at_exit(entered.leave)
        if entered.pairs:
            os.listdir, os.scandir = _ordered_listdir(os.listdir), _ordered_scandir(os.scandir, os.listdir)
            os.supports_fd.update((os.listdir, os.scandir))
    if os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        for stream in ("stdin",):
            setattr(sys, stream, _NoInput(open(0, "rb", closefd=False)))  # noqa: SIM115 - stays open


def in_common_order(names: list[Any], path: Any, list_common: Callable[[str], list[Any]]) -> list[Any]:
    """Return names in a folder in the order in which rank 0 lists them; private folders list in another order.

    Args:
        names: The names in this rank's folder.
        path: The folder.
        list_common: Lists a folder.
    """
    entered = folders()
    if entered is None or isinstance(path, int):
        return names
    common = str(entered.common(os.fsdecode(path)))
    if common == os.path.abspath(os.fsdecode(path)):
        return names
    try:
        order = {os.fsdecode(name): index for index, name in enumerate(list_common(common))}
    except OSError:
        return names
    return sorted(names, key=lambda name: (order.get(os.fsdecode(name), len(order)), name))


def _ordered_listdir(listdir: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return functools.wraps(listdir)(
        lambda path=".": in_common_order(listdir(path), "." if path is None else path, listdir))


def _ordered_scandir(scandir: Callable[..., Any], listdir: Callable[..., list[Any]]) -> Callable[..., Any]:
    return functools.wraps(scandir)(lambda path=".": _OrderedEntries(scandir(path), path, listdir))


class _OrderedEntries:
    """Entries of a folder in the order in which rank 0 lists them, with the interface of `os.scandir`."""

    def __init__(self, entries: Any, path: Any, listdir: Callable[..., list[Any]]) -> None:
        with entries:
            found = {entry.name: entry for entry in entries}
        self._entries = iter([found[name] for name in in_common_order(
            list(found), "." if path is None else path, listdir)])

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the remaining entries."""
        self._entries = iter(())


class _NoInput(io.TextIOWrapper):
    """Standard input of a rank, which is empty."""

    def readline(self, *_: Any) -> NoReturn:
        """Raise the exception of `input()` at the end of the input, with an explanation."""
        raise EOFError(explain(f"Ranks have no standard input under {FLAG}",
                               "pass what the script asks for as an argument, or in a file"))


def _require_tensorflow(config: Any) -> None:
    backend = config.backend()
    if backend != "tensorflow":
        raise UnsupportedError(explain(f"{FLAG} trains with the backend tensorflow of Keras",
                                       f"set KERAS_BACKEND=tensorflow, or run without {FLAG}", backend=backend))


_TRAINING = ("tensorflow", "keras", "tf_keras")


def _start(imported: Any) -> None:
    """Start the mode, once all that is being imported can be used; for a Keras that comes later, start it as well."""
    others = [sys.modules.get(name) for name in _TRAINING if name != imported.__name__]
    if any(getattr(getattr(other, "__spec__", None), "_initializing", False) for other in others):
        return  # Keras imports TensorFlow
    _train_here()
    resolve_name("hvkeras.startup:data_parallel")()  # by name, since that package is above this one


@functools.cache
def _train_here() -> None:
    """Note that this process trains.

    Raises:
        UsageError: Another one of this rank does.
    """
    entered = folders()
    if entered is not None:
        try:
            (entered.own / "trains").touch(exist_ok=False)
        except FileExistsError:
            raise UsageError(explain(f"Only one Python process of each rank can import TensorFlow under {FLAG}",
                                     f"run the scripts one after the other, each with hvkeras run {FLAG}")) from None


def _refuse_horovod(_: Any) -> None:
    """Refuse a script that imports Horovod; the backend of that name may do so."""
    frame: Any = sys._getframe(1)
    while _module_of(frame).partition(".")[0] in _OF_IMPORTS or _module_of(frame) == __name__:
        frame = frame.f_back
    if not _module_of(frame).startswith("hvkeras."):
        raise UsageError(explain(f"{FLAG} is for scripts that are written for one process", "run a script for Horovod"
                                 " with --as-horovod instead, or remove its lines of Horovod", imports="horovod"))


def _module_of(frame: Any) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


@functools.cache
def folders() -> PrivateFolders | None:
    """Return the private folders of this process; None if all its folders are common."""
    text = Settings().data_parallel_folders
    return PrivateFolders.from_text(text) if text else None


def _mute(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
