"""The errors of hvkeras: the user's mistake, the machine's state, or a peer's failure."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """Horovod's name for a collective that failed because of another rank; scripts for elastic training catch it."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Horovod's name for an interrupt because hosts came or went.

    Args:
        skip_sync: Whether the state need not be synchronised afterwards.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts came or went")
        self.skip_sync = skip_sync


class HvkerasError(RuntimeError):
    """Base of every error that hvkeras raises on purpose."""

    # AutoGraph would otherwise raise another class, with the text buried in a trace of generated code.
    ag_pass_through = True
    # Whether a job that ended of it may do better when it is started again.
    may_pass = True


class UsageError(HvkerasError, ValueError):
    """The caller asked for something that cannot be: a wrong argument, name or order of calls."""


class NotInitializedError(UsageError):
    """A function that needs the job was called before `init()` or after `shutdown()`."""


class CommitError(UsageError):
    """What training would go on with is damaged, or others may have written it; another start would find the same."""

    may_pass = False


class DivergenceError(UsageError):
    """The ranks train different models, or the weights of their models have come apart."""


class UnsupportedError(HvkerasError, NotImplementedError):
    """A backend cannot do an operation; the message names both, and what to do instead."""


class MachineError(HvkerasError):
    """This machine lacks something that the job needs: a package, a port, a launcher's variable."""


class NotInstalledError(MachineError, ModuleNotFoundError):
    """A package is missing that hvkeras needs."""


class PeerError(HvkerasError, HorovodInternalError):
    """Another rank is missing, failed, or does something else than this one."""


def explain(must_hold: str, hint: str = "", **received: object) -> str:
    """Words a message as `<what must hold>. Received: name=value. HINT: <fix>.`, the form of all our errors.

    Args:
        must_hold: What has to be true, without the closing full stop.
        hint: The literal fix, without the closing full stop; left out when empty.
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
