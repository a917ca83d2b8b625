"""The messages of all channels: between ranks and control server, workers and launcher, hosts and launcher.

A message is a frozen dataclass. On the wire it is a JSON array of the class's name and the fields that differ from
their defaults. Receivers dispatch on the class: of what ranks send, `ControlHandler` (server.py) and `Coordinator`; of
what they receive, `ControlClient`; of an elastic job's workers, `ElasticMembership` of the launcher.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvkeras.control.cause import Cause
from hvkeras.settings import Settings

PlanDescription = Mapping[str, Any]  # see `hvkeras.job.plans.Plan.describe`
CallDescriptions = Sequence[Mapping[str, Any]]  # see `hvkeras.job.plans.Call.describe`


@dataclass(frozen=True)
class Message:
    """What one end of a channel sends to the other."""


# All channels: a peer connects. The first four are sent in this order.


@dataclass(frozen=True)
class Hello(Message):
    """Introduces a peer.

    Attributes:
        number: Its rank, or the number of a worker or a host.
        size: How many peers it expects, or how many ranks a host has room for.
        host: Its host.
        pid: Its process.
        attempt: Grows with each connection of the process.
    """

    number: int
    size: int
    host: str
    pid: int
    attempt: int


@dataclass(frozen=True)
class Welcome(Message):
    """The server has admitted the peer."""


@dataclass(frozen=True)
class Rejected(Message):
    """The server does not admit the peer."""

    reason: str


@dataclass(frozen=True)
class Arrived(Message):
    """The peer knows that it was admitted."""


@dataclass(frozen=True)
class Closing(Message):
    """The server stops in good order."""


# The control channel, in both directions or from a rank to the server.


@dataclass(frozen=True)
class Standstill:
    """What a rank reports about itself that makes no progress.

    Attributes:
        seconds: For how long.
        python_seconds: For how long its Python code has stood at the same place.
        text: What it is doing.
        phase: In which phase of Keras's loops.
        in_loop: Whether it is in one of Keras's loops.
        may_end: Whether the job may end because of it.
    """

    seconds: float
    python_seconds: float
    text: str
    phase: str
    in_loop: bool
    may_end: bool


@dataclass(frozen=True)
class Heartbeat(Message):
    """A sign of life, with what has changed since the last one.

    Attributes:
        counts: How often plans have been entered, by plan key.
        sites: Where the user's code has entered them.
        calls: The calls that plans consist of, once some rank has joined.
        waiting_in: The exchanges in which the rank waits.
        standstill: Set if it makes no progress.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    sites: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, CallDescriptions] = field(default_factory=dict)
    waiting_in: Sequence[str] = ()
    standstill: Standstill | None = None


@dataclass(frozen=True)
class Plans(Message):
    """What the plans consist of that the server has asked for, by plan key."""

    plans: Mapping[str, PlanDescription]


@dataclass(frozen=True)
class Deadlines(Message):
    """The server's time limits, in seconds (see `hvkeras.settings`); rank 0 sends those that its script has set."""

    liveness: float = 15.0
    stall_warning: float = 60.0
    stall_shutdown: float = 600.0
    exit_grace: float = 3.0
    mismatch: float = 3.0

    @classmethod
    def from_settings(cls, settings: Settings) -> Deadlines:
        """The deadlines from the settings."""
        return cls(settings.liveness_timeout, settings.stall_warning, settings.stall_shutdown, settings.exit_grace,
                   settings.mismatch_after)


@dataclass(frozen=True)
class Registered(Message):
    """The rank takes part in the job (again)."""


@dataclass(frozen=True)
class LeftJob(Message):
    """The rank leaves in good order."""


@dataclass(frozen=True)
class ScriptEnded(Message):
    """The rank's script has ended, and its process is expected to exit."""


@dataclass(frozen=True)
class Failed(Message):
    """The rank has failed; secondary if that looks like a consequence of another rank's failure."""

    cause: Cause
    secondary: bool = False


@dataclass(frozen=True)
class ExitReported(Message):
    """The rank has printed its exit report, and waits for `MayExit`."""


@dataclass(frozen=True)
class Value(Message):
    """The rank's value in an exchange."""

    key: str
    value: Any


@dataclass(frozen=True)
class ValueDigest(Message):
    """The digest of the rank's value in an exchange, which the server asks one rank for if it does not know it."""

    key: str
    digest: str


@dataclass(frozen=True)
class ClockQuestion(Message):
    """Asks for the server's time; with the rank's time."""

    asked: float


@dataclass(frozen=True)
class Location(Message):
    """Where the rank is outside TensorFlow ("" if it is inside), and what it is doing."""

    outside: str
    doing: str


@dataclass(frozen=True)
class JoinCalled(Message):
    """The rank has called `join()`."""


@dataclass(frozen=True)
class RefusalConfirmed(Message):
    """The rank knows that a plan is refused; whether it can raise in it."""

    key: str
    raises: bool


@dataclass(frozen=True)
class PlansForgotten(Message):
    """The plans that the rank was asked to forget, with their counts, and the keys of those that it has forgotten."""

    asked: Mapping[str, int]
    keys: Sequence[str]


@dataclass(frozen=True)
class StopWish(Message):
    """The rank wants to stop a `fit` in which these runs of ranks participate."""

    fit: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class StopAnswer(Message):
    """Which execution of a `fit` the rank has reached."""

    fit: str
    executions: int


# The control channel, from the server to ranks.


@dataclass(frozen=True)
class JobEnded(Message):
    """The job ends early."""

    cause: Cause


@dataclass(frozen=True)
class MayExit(Message):
    """All ranks have printed their exit reports, or the grace period is over."""


@dataclass(frozen=True)
class Terminate(Message):
    """The launcher was told to end the job; ranks save what they train first."""

    cause: Cause


@dataclass(frozen=True)
class AllScriptsEnded(Message):
    """The last rank's script has ended."""


@dataclass(frozen=True)
class ValueWanted(Message):
    """Asks for the rank's value in an exchange, of which it has sent the digest."""

    key: str


@dataclass(frozen=True)
class AllValues(Message):
    """The values of all ranks in an exchange, in rank order, as `hvkeras.control.exchange.packed` returns them."""

    key: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class PlansWanted(Message):
    """Asks the rank what plans consist of that it has counted, and that the server does not know."""

    keys: Sequence[str]


@dataclass(frozen=True)
class MissingRanks(Message):
    """The ranks that an exchange waits for, as the first and the last of each run of ranks."""

    key: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class ClockAnswer(Message):
    """The server's time; with the rank's time from the question, and the identity of the server's host."""

    asked: float
    time: float
    host: str


@dataclass(frozen=True)
class Locate(Message):
    """Makes the rank print and report its location; with the stall that makes the server ask, if any."""

    stall: str | None = None


@dataclass(frozen=True)
class SomeJoined(Message):
    """Whether ranks must report immediately which plans they enter, and what those consist of."""

    joined: bool


@dataclass(frozen=True)
class AllJoined(Message):
    """All ranks have called `join()`; with the one that did so last."""

    last: int


@dataclass(frozen=True)
class PlanRefused(Message):
    """The rank waits in a plan that does not match those of other ranks.

    Attributes:
        key: The plan's key.
        text: What differs.
        outstanding: The plans in which the rank will be asked to participate on behalf of others.
    """

    key: str
    text: str
    outstanding: Sequence[str]


@dataclass(frozen=True)
class Participate(Message):
    """Makes the rank participate in a plan on behalf of others.

    Attributes:
        key: The plan's key.
        plan: What it consists of.
        calls: Its calls.
        times: How often.
        refused: Whether the plan is refused, rather than that this rank has joined.
    """

    key: str
    plan: PlanDescription
    calls: CallDescriptions
    times: int
    refused: bool


@dataclass(frozen=True)
class ForgetPlans(Message):
    """Lets the rank forget plans that it has not entered more often than this."""

    counts: Mapping[str, int]


@dataclass(frozen=True)
class StopQuestion(Message):
    """Asks which execution of a `fit` the rank has reached."""

    fit: str


@dataclass(frozen=True)
class StopAfter(Message):
    """All ranks stop a `fit` after this execution; with the runs of ranks that wanted to."""

    fit: str
    executions: int
    wishes: Sequence[int]


# The membership channel of an elastic job, from a worker to the launcher and back.


@dataclass(frozen=True)
class FunctionEntered(Message):
    """The worker has reached an elastic function; whether it restarts its program at each change."""

    function: int
    restarts: bool


@dataclass(frozen=True)
class GenerationJoined(Message):
    """The worker has connected to all others of its generation."""


@dataclass(frozen=True)
class Ready(Message):
    """The worker waits for the next generation, with the number of its last commit, in an elastic function."""

    commit: int
    function: int


@dataclass(frozen=True)
class RanksChanged(Message):
    """How training goes on after a change; see `hvkeras.job.session.Change`."""

    change: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerLeaving(Message):
    """The worker has received SIGTERM, and leaves at its next commit."""


@dataclass(frozen=True)
class ChangeAhead(Message):
    """Workers join or leave at the next commit, or before it if that is too late; and whether this one leaves."""

    soon: bool
    leaves: bool


@dataclass(frozen=True)
class Assignment(Message):
    """The worker's rank in the next generation, as environment variables, and the commit that it begins with."""

    commit: int
    variables: Mapping[str, str]


@dataclass(frozen=True)
class FunctionDone(Message):
    """The job has finished the elastic function that the worker waits in."""


# Hosts that report to the launcher by themselves, and back.


@dataclass(frozen=True)
class Machine(Message):
    """The identity of the machine that the host runs on."""

    identity: str


@dataclass(frozen=True)
class AgentLine(Message):
    """A line to the host's agent, or from it."""

    text: str


@dataclass(frozen=True)
class AgentEnded(Message):
    """The host's agent has ended, and what it has started."""


@dataclass(frozen=True)
class HostLeaving(Message):
    """The host is being taken away."""


@dataclass(frozen=True)
class StartAgent(Message):
    """Makes the host start an agent."""


@dataclass(frozen=True)
class EndAgent(Message):
    """Makes the host end its agent."""


@dataclass(frozen=True)
class JobFinished(Message):
    """The job is over; with its exit code."""

    code: int


# Output of ranks on Spark, and the calls of hosts that `hvkeras doctor` checks.


@dataclass(frozen=True)
class RankOutput(Message):
    """What a rank has printed to `stdout` or `stderr`, in base64."""

    stream: str
    data: str


@dataclass(frozen=True)
class HostTime(Message):
    """The time on a host, in seconds since the epoch."""

    time: float


@dataclass(frozen=True)
class HostTimeNoted(Message):
    """The time has arrived."""


# Between a relay and the server; see `hvkeras.control.relay`.


@dataclass(frozen=True)
class Relayed(Message):
    """Messages of the ranks behind a relay, or for them, in the order in which each rank sends or receives them.

    On the wire, they follow the rest as lines of their own, so that a relay passes them on as they are.

    Attributes:
        ranks: The ranks of each message, as the first and the last of each run of ranks; none for all.
        bodies: The encoded messages.
    """

    ranks: Sequence[Sequence[int]]
    bodies: Sequence[bytes | memoryview]


@dataclass(frozen=True)
class RankGone(Message):
    """The connection of a rank to its relay has ended."""


@dataclass(frozen=True)
class ServerLost(Message):
    """A relay has lost the server: whether it is silent, and what has happened, as the end of a sentence."""

    silent: bool
    error: str


@dataclass(frozen=True)
class _Schema:
    """How the fields of a class travel: their defaults, and how to read those that are dataclasses themselves."""

    make: Callable[..., Message]
    defaults: Mapping[str, Any]
    decoders: Mapping[str, Callable[[Any], Any]]


_encode = json.JSONEncoder(separators=(",", ":"), default=lambda value: (
    value.to_message() if isinstance(value, Cause) else vars(value))).encode


def encode(message: Message) -> bytes:
    """Encode a message for the wire.

    Args:
        message: The message.
    """
    if isinstance(message, Relayed):
        return b"\n".join((_encode(["Relayed", {"ranks": message.ranks}]).encode(), *message.bodies))
    name = type(message).__name__
    defaults = _schema(name).defaults
    return _encode([name, {key: value for key, value in vars(message).items()
                           if key not in defaults or value != defaults[key]}]).encode()


def decode(data: bytes | bytearray | memoryview | str) -> Message:
    """Decode a message.

    Args:
        data: What `encode` returned.

    Raises:
        ValueError: It is no such message.
    """
    if isinstance(data, bytes | bytearray) and data.startswith(_RELAYED):
        return _decode_relayed(data)
    name, fields = json.loads(data if isinstance(data, str) else str(data, "utf-8"))  # of bytes it would guess
    layout = _schema(name)
    for key, read in layout.decoders.items():
        if key in fields:
            fields[key] = read(fields[key])
    return layout.make(**fields)


def _decode_relayed(data: bytes | bytearray) -> Relayed:
    """Large bodies are views, as they are passed on to several ranks."""
    bodies: list[bytes | memoryview] = []
    end = data.find(b"\n")
    head = data if end < 0 else data[:end]
    while end >= 0:
        start, end = end + 1, data.find(b"\n", end + 1)
        body = memoryview(data)[start : end if end >= 0 else len(data)]
        bodies.append(body if len(body) > _MAX_COPY else bytes(body))
    return Relayed(json.loads(head.decode())[1]["ranks"], bodies)


def name_of(data: bytes | memoryview) -> str:
    """Return the name of an encoded message's class."""
    return bytes(data[2 : 2 + _MAX_NAME_LENGTH]).partition(b'"')[0].decode(errors="replace")


_RELAYED = b'["Relayed"'
_MAX_COPY = 64 * 1024  # bytes of a body up to which it is no view
_MAX_NAME_LENGTH = 40


@functools.cache
def _schema(name: str) -> _Schema:
    cls = globals().get(name)
    if not (isinstance(cls, type) and issubclass(cls, Message)):
        raise ValueError(f"not a message of hvkeras: {name}")
    hints = typing.get_type_hints(cls)
    decoders: dict[str, Callable[[Any], Any]] = {}
    for key, hint in hints.items():
        if Cause in (hint, *typing.get_args(hint)):
            decoders[key] = Cause.from_message
        elif Standstill in typing.get_args(hint):
            decoders[key] = lambda fields: Standstill(**fields)
    defaults = {one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
                for one in dataclasses.fields(cls)
                if not (one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING)}
    return _Schema(cls, defaults, decoders)
