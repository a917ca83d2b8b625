"""The errors of hvkeras: user mistakes, machine problems, and failures of peers."""

from __future__ import annotations

from importlib.util import find_spec

INSTALL_TENSORFLOW = ("pip install 'tensorflow>=2.16,<2.22', or tensorflow-cpu, or tensorflow[and-cuda] for NVIDIA's"
                      " GPUs")


class HorovodInternalError(RuntimeError):
    """Horovod's name for a collective that failed because of another rank; elastic training scripts catch it."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Horovod's name for an interrupt because hosts were added or removed.

    Args:
        skip_sync: Whether the state need not be synchronised afterwards.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod's name for a framework of another version than Horovod was built with; hvkeras never raises it.

    Args:
        name: The framework.
        version: Its version.
        installed_version: The version that Horovod was built with.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} is not the {name} {installed_version} that Horovod was built with",
                         name=name)
        self.version: str = version
        self.installed_version: str = installed_version


class HvkerasError(RuntimeError):
    """Base class of every error that hvkeras raises on purpose."""

    # Without it, AutoGraph would raise another class, with the text buried in a traceback of generated code.
    ag_pass_through = True
    # Whether a job that this error ended may succeed after a restart.
    may_pass = True


class UsageError(HvkerasError, ValueError):
    """The caller asked for something impossible: a wrong argument, name or order of calls."""


class NotInitializedError(UsageError):
    """A function that needs the job was called before `init()` or after `shutdown()`."""


class CommitError(UsageError):
    """The commit to resume from is damaged, or others may have written it; a restart would find the same."""

    may_pass = False


class DivergenceError(UsageError):
    """The ranks train different models, or the weights of their models have diverged."""


class UnsupportedError(HvkerasError, NotImplementedError):
    """A backend does not support an operation; the message names both, and what to do instead."""


class MachineError(HvkerasError):
    """This machine lacks something that the job needs: a package, a port, a launcher's variable."""


class NotInstalledError(MachineError, ModuleNotFoundError):
    """A package that hvkeras needs is missing."""


class PeerError(HvkerasError, HorovodInternalError):
    """Another rank is missing, has failed, or does something different from this one."""


def explain(must_hold: str, hint: str = "", **received: object) -> str:
    """Format a message as `<what must hold>. Received: name=value. HINT: <fix>.`, the form of all our errors.

    Args:
        must_hold: What has to be true, without the closing full stop.
        hint: The literal fix, without the closing full stop; omitted if empty.
        **received: The offending values by name.

    Returns:
        The message as one line.
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
        NotInstalledError: It is not installed.
    """
    if find_spec("tensorflow") is None:
        raise NotInstalledError(explain("TensorFlow must be installed where ranks run, and hvkeras leaves the choice"
                                        " of package to you", INSTALL_TENSORFLOW))
