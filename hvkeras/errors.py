"""Exceptions of hvkeras: usage errors, machine problems, and failures of peers."""

from __future__ import annotations

from importlib.util import find_spec

INSTALL_TENSORFLOW = ("pip install 'tensorflow>=2.16,<2.22', or tensorflow-cpu, or tensorflow[and-cuda] for NVIDIA's"
                      " GPUs")


class HorovodInternalError(RuntimeError):
    """Horovod's exception for a collective that failed because of another rank; caught by elastic scripts."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Horovod's exception for the interruption of training because hosts were added or removed.

    Args:
        skip_sync: Whether the state need not be synchronised afterwards.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod's exception for a framework of another version than in its build; hvkeras never raises it.

    Args:
        name: The framework.
        version: Version of the framework.
        installed_version: Version that Horovod was built with.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} is not the {name} {installed_version} that Horovod was built with",
                         name=name)
        self.version: str = version
        self.installed_version: str = installed_version


class HvkerasError(RuntimeError):
    """Base class of the exceptions of hvkeras."""

    # Otherwise AutoGraph would raise another class, with the message within a traceback of generated code.
    ag_pass_through = True
    # Whether a job that failed with this error may succeed after a restart.
    may_pass = True


class UsageError(HvkerasError, ValueError):
    """Invalid use of hvkeras: a wrong argument, name or order of calls."""


class NotInitializedError(UsageError):
    """A function was called before `init()` or after `shutdown()`."""


class CommitError(UsageError):
    """The commit to resume from is damaged, or other users may have written it; a restart would not help."""

    may_pass = False


class DivergenceError(UsageError):
    """The ranks train different models, or the weights of their models have diverged."""


class UnsupportedError(HvkerasError, NotImplementedError):
    """A backend does not support an operation; the message names both, and an alternative."""


class MachineError(HvkerasError):
    """A requirement of the job is missing on this machine: a package, a port, a variable of the launcher."""


class NotInstalledError(MachineError, ModuleNotFoundError):
    """A package that hvkeras needs is missing."""


class PeerError(HvkerasError, HorovodInternalError):
    """Another rank is missing, has failed, or does not match this one."""


def explain(must_hold: str, hint: str = "", **received: object) -> str:
    """Format a message as `<what must hold>. Received: name=value. HINT: <fix>.`, the form of all our errors.

    Args:
        must_hold: The violated condition, without a full stop.
        hint: The fix, without a full stop; omitted if empty.
        **received: The invalid values by name.

    Returns:
        The message, one line.
    """
    parts = [f"{must_hold}."]
    if received:
        parts.append("Received: " + ", ".join(f"{name}={value!r}" for name, value in received.items()) + ".")
    if hint:
        parts.append(f"HINT: {hint}.")
    return " ".join(parts)


def require_tensorflow() -> None:
    """Check that TensorFlow is installed, without importing it.

    Raises:
        NotInstalledError: TensorFlow is not installed.
    """
    if find_spec("tensorflow") is None:
        raise NotInstalledError(explain("TensorFlow must be installed where ranks run, and hvkeras leaves the choice"
                                        " of package to you", INSTALL_TENSORFLOW))
