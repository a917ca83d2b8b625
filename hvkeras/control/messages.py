"""The messages of all channels: between ranks and control server, workers and launcher, hosts and launcher.

A message is a frozen dataclass. On the wire it is a JSON array of the class's name and the fields that differ from
their defaults. Receivers dispatch on the class. Ranks' messages are handled by `ControlHandler` (server.py) and
`Coordinator`, the server's messages by `ControlClient`, and those of elastic workers by the launcher's
`ElasticMembership`.
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
    """A message from one end of a channel to the other."""


# All channels: connection setup, where the first four are sent in this order.


@dataclass(frozen=True)
class Hello(Message):
    """Introduction of a peer.

    Attributes:
        number: Its rank, or the number of a worker or a host.
        size: The number of peers that it expects, or the number of ranks that a host has slots for.
        attempt: A counter that grows with each connection of the process.
    """

    number: int
    size: int
    host: str
    pid: int
    attempt: int


@dataclass(frozen=True)
class Welcome(Message):
    """Acceptance of a peer by the server."""


@dataclass(frozen=True)
class Rejected(Message):
    """Rejection of a peer by the server."""

    reason: str


@dataclass(frozen=True)
class Arrived(Message):
    """Confirmation by the peer that it was admitted."""


@dataclass(frozen=True)
class Closing(Message):
    """Notice that the server is shutting down normally."""


# The control channel, in both directions or from a rank to the server.


@dataclass(frozen=True)
class Standstill:
    """A rank's report that it makes no progress.

    Attributes:
        seconds: Seconds without progress.
        python_seconds: Seconds for which its Python stack has not changed.
        text: What it is doing.
        in_loop: True inside one of Keras's loops.
        may_end: True if the job may end because of it.
    """

    seconds: float
    python_seconds: float
    text: str
    phase: str
    in_loop: bool
    may_end: bool


@dataclass(frozen=True)
class Heartbeat(Message):
    """A periodic liveness message, with what has changed since the last one.

    Attributes:
        counts: Number of entries into each plan, by plan key.
        sites: Lines of user code that entered the plans, by plan key.
        calls: The calls that plans consist of, by plan key; sent only once some rank has joined.
        waiting_in: The exchanges in which the rank waits.
        standstill: Set if the rank makes no progress.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    sites: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, CallDescriptions] = field(default_factory=dict)
    waiting_in: Sequence[str] = ()
    standstill: Standstill | None = None


@dataclass(frozen=True)
class Plans(Message):
    """Descriptions of the plans that the server has requested, by plan key."""

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
        """Return the deadlines from the settings."""
        return cls(settings.liveness_timeout, settings.stall_warning, settings.stall_shutdown, settings.exit_grace,
                   settings.mismatch_after)


@dataclass(frozen=True)
class Registered(Message):
    """Notice that the rank participates in the job (again)."""


@dataclass(frozen=True)
class LeftJob(Message):
    """Notice that the rank leaves the job normally."""


@dataclass(frozen=True)
class ScriptEnded(Message):
    """Notice that the rank's script has ended, and that its process is about to exit."""


@dataclass(frozen=True)
class Failed(Message):
    """A rank's failure; secondary if it looks like a consequence of another rank's failure."""

    cause: Cause
    secondary: bool = False


@dataclass(frozen=True)
class ExitReported(Message):
    """Notice that the rank has printed its exit report, and waits for `MayExit`."""


@dataclass(frozen=True)
class Value(Message):
    """The rank's value in an exchange."""

    key: str
    value: Any


@dataclass(frozen=True)
class ValueDigest(Message):
    """The digest of the rank's value in an exchange; the server requests an unknown value from one rank."""

    key: str
    digest: str


@dataclass(frozen=True)
class ClockQuestion(Message):
    """Request for the server's time, with the rank's own time."""

    asked: float


@dataclass(frozen=True)
class Location(Message):
    """The rank's location outside TensorFlow ("" if it is inside), and what it is doing."""

    outside: str
    doing: str


@dataclass(frozen=True)
class JoinCalled(Message):
    """Notice that the rank has called `join()`."""


@dataclass(frozen=True)
class RefusalConfirmed(Message):
    """Confirmation that a rank has received `PlanRefused`; `raises` is true if it can raise in that plan."""

    key: str
    raises: bool


@dataclass(frozen=True)
class PlansForgotten(Message):
    """Answer to `ForgetPlans`: the requested plans with their counts, and the keys that the rank has forgotten."""

    asked: Mapping[str, int]
    keys: Sequence[str]


@dataclass(frozen=True)
class StopWish(Message):
    """Request of a rank to stop a `fit` in which these runs of ranks participate."""

    fit: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class StopAnswer(Message):
    """Answer to `StopQuestion`: the execution of a `fit` that the rank has reached."""

    fit: str
    executions: int


# The control channel, from the server to ranks.


@dataclass(frozen=True)
class JobEnded(Message):
    """Notice that the job ends early."""

    cause: Cause


@dataclass(frozen=True)
class MayExit(Message):
    """Notice that all ranks have printed their exit reports, or that the grace period is over."""


@dataclass(frozen=True)
class Terminate(Message):
    """Notice that the launcher was asked to end the job; ranks save their training state first."""

    cause: Cause


@dataclass(frozen=True)
class AllScriptsEnded(Message):
    """Notice that the last rank's script has ended."""


@dataclass(frozen=True)
class ValueWanted(Message):
    """Request for the rank's value in an exchange of which it has sent the digest."""

    key: str


@dataclass(frozen=True)
class AllValues(Message):
    """The values of all ranks in an exchange, in rank order, as `hvkeras.control.exchange.packed` returns them."""

    key: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class PlansWanted(Message):
    """Request for the descriptions of plans that the rank has entered and the server does not know yet."""

    keys: Sequence[str]


@dataclass(frozen=True)
class MissingRanks(Message):
    """The ranks that an exchange waits for, as the first and the last of each run of ranks."""

    key: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class ClockAnswer(Message):
    """The server's time, with the rank's time from the request and the identity of the server's host."""

    asked: float
    time: float
    host: str


@dataclass(frozen=True)
class Locate(Message):
    """Request to print and report the rank's location, with the stall that caused it, if any."""

    stall: str | None = None


@dataclass(frozen=True)
class SomeJoined(Message):
    """Notice that ranks must (or need not) report immediately which plans they enter, and their calls."""

    joined: bool


@dataclass(frozen=True)
class AllJoined(Message):
    """Notice that all ranks have called `join()`; `last` is the one that called it last."""

    last: int


@dataclass(frozen=True)
class PlanRefused(Message):
    """Notice to a rank that the plan in which it waits does not match those of other ranks.

    Attributes:
        outstanding: The plans in which the rank will be asked to participate on behalf of others.
    """

    key: str
    text: str
    outstanding: Sequence[str]


@dataclass(frozen=True)
class Participate(Message):
    """Request that the rank participate in a plan on behalf of others.

    Attributes:
        times: How often to participate.
        refused: True if the plan is refused; False if this rank has joined.
    """

    key: str
    plan: PlanDescription
    calls: CallDescriptions
    times: int
    refused: bool


@dataclass(frozen=True)
class ForgetPlans(Message):
    """Request to forget plans, unless the rank has entered them more often than these counts."""

    counts: Mapping[str, int]


@dataclass(frozen=True)
class StopQuestion(Message):
    """Request for the execution of a `fit` that the rank has reached."""

    fit: str


@dataclass(frozen=True)
class StopAfter(Message):
    """Decision that all ranks stop a `fit` after this execution, with the runs of ranks that wanted to stop."""

    fit: str
    executions: int
    wishes: Sequence[int]


# The membership channel of an elastic job, in both directions.


@dataclass(frozen=True)
class FunctionEntered(Message):
    """Notice that a worker has reached an elastic function; `restarts` if it restarts its program at each change."""

    function: int
    restarts: bool


@dataclass(frozen=True)
class GenerationJoined(Message):
    """Notice that a worker has connected to all others of its generation."""


@dataclass(frozen=True)
class Ready(Message):
    """Notice that a worker waits for the next generation, with its last commit and its elastic function."""

    commit: int
    function: int


@dataclass(frozen=True)
class RanksChanged(Message):
    """Result of a membership change for a rank; see `hvkeras.job.session.Change`."""

    change: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerLeaving(Message):
    """Notice that a worker has received SIGTERM, and leaves at its next commit."""


@dataclass(frozen=True)
class ChangeAhead(Message):
    """Notice that workers join or leave at the next commit (earlier if `soon`), and whether this worker leaves."""

    soon: bool
    leaves: bool


@dataclass(frozen=True)
class Assignment(Message):
    """The worker's rank in the next generation, as environment variables, and the commit to resume from."""

    commit: int
    variables: Mapping[str, str]


@dataclass(frozen=True)
class FunctionDone(Message):
    """Notice that the job has finished the elastic function in which the worker waits."""


# Hosts that connect to the launcher themselves, in both directions.


@dataclass(frozen=True)
class Machine(Message):
    """The identity of the machine that the host runs on."""

    identity: str


@dataclass(frozen=True)
class AgentLine(Message):
    """A line of text to or from the host's agent."""

    text: str


@dataclass(frozen=True)
class AgentEnded(Message):
    """Notice that the host's agent and all its processes have ended."""


@dataclass(frozen=True)
class HostLeaving(Message):
    """Notice that the host is being preempted."""


@dataclass(frozen=True)
class StartAgent(Message):
    """Request to the host to start an agent."""


@dataclass(frozen=True)
class EndAgent(Message):
    """Request to the host to terminate its agent."""


@dataclass(frozen=True)
class JobFinished(Message):
    """Notice that the job has ended, with its exit code."""

    code: int


# Output of ranks on Spark, and clock checks of `hvkeras doctor`.


@dataclass(frozen=True)
class RankOutput(Message):
    """Output of a rank to `stdout` or `stderr`, in base64."""

    stream: str
    data: str


@dataclass(frozen=True)
class HostTime(Message):
    """The time on a host, in seconds since the epoch."""

    time: float


@dataclass(frozen=True)
class HostTimeNoted(Message):
    """Acknowledgement of `HostTime`."""


# Between a relay and the server; see `hvkeras.control.relay`.


@dataclass(frozen=True)
class Relayed(Message):
    """Messages from or for the ranks behind a relay, in the order in which each rank sends or receives them.

    The encoded messages follow as separate lines, so that a relay forwards them without decoding.

    Attributes:
        ranks: The ranks of each message, as the first and the last of each run of ranks; empty for all.
    """

    ranks: Sequence[Sequence[int]]
    bodies: Sequence[bytes | memoryview]


@dataclass(frozen=True)
class RankGone(Message):
    """Notice that the connection of a rank to its relay has ended."""


@dataclass(frozen=True)
class ServerLost(Message):
    """Notice that a relay has lost the server; `silent` if heartbeats are missing, `error` as the end of a sentence."""

    silent: bool
    error: str


@dataclass(frozen=True)
class _Schema:
    """The encoding of a class's fields: their defaults, and decoders for fields that are dataclasses."""

    make: Callable[..., Message]
    defaults: Mapping[str, Any]
    decoders: Mapping[str, Callable[[Any], Any]]


_encode = json.JSONEncoder(separators=(",", ":"), default=lambda value: (
    value.to_message() if isinstance(value, Cause) else vars(value))).encode


def encode(message: Message) -> bytes:
    """Encode a message for the wire."""
    if isinstance(message, Relayed):
        return b"\n".join((_encode(["Relayed", {"ranks": message.ranks}]).encode(), *message.bodies))
    name = type(message).__name__
    defaults = _schema(name).defaults
    return _encode([name, {key: value for key, value in vars(message).items()
                           if key not in defaults or value != defaults[key]}]).encode()


def decode(data: bytes | bytearray | memoryview | str) -> Message:
    """Decode a message.

    Args:
        data: Bytes or text from `encode`.

    Raises:
        ValueError: The data are not a message of hvkeras.
    """
    if isinstance(data, bytes | bytearray) and data.startswith(_RELAYED):
        return _decode_relayed(data)
    # from bytes, it would guess the encoding
    name, fields = json.loads(data if isinstance(data, str) else str(data, "utf-8"))
    layout = _schema(name)
    for key, read in layout.decoders.items():
        if key in fields:
            fields[key] = read(fields[key])
    return layout.make(**fields)


def _decode_relayed(data: bytes | bytearray) -> Relayed:
    """Decode with large bodies as views, since they are forwarded to several ranks."""
    bodies: list[bytes | memoryview] = []
    end = data.find(b"\n")
    head = data if end < 0 else data[:end]
    while end >= 0:
        start, end = end + 1, data.find(b"\n", end + 1)
        body = memoryview(data)[start : end if end >= 0 else len(data)]
        bodies.append(body if len(body) > _MAX_COPY else bytes(body))
    return Relayed(json.loads(head.decode())[1]["ranks"], bodies)


def name_of(data: bytes | memoryview) -> str:
    """Return the class name of an encoded message."""
    return bytes(data[2 : 2 + _MAX_NAME_LENGTH]).partition(b'"')[0].decode(errors="replace")


_RELAYED = b'["Relayed"'
_MAX_COPY = 64 * 1024  # bytes up to which a body is copied; larger ones are views
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
