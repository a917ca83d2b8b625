"""Rendezvous: how a rank finds the control channel, with one method per kind of launch.

Rank 0 serves the channel; under `hvkeras run` the launcher does, and on Spark rank 0's task. The other ranks read its
address and the job's secret from something they share: the environment, MPI, horovodrun's store, or a private folder.
Once connected, they wait for all others in the exchange of facts (`hvkeras.job.session_start.exchange_facts`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import NamedTuple, Protocol

from hvkeras.control import stalls
from hvkeras.control.announcements import (
    announcement_path,
    is_one_host,
    own_address,
    own_address_towards,
    write_privately,
)
from hvkeras.control.cause import Cause
from hvkeras.control.client import ControlClient
from hvkeras.control.connection import Introduction
from hvkeras.control.launch_environments import Launch
from hvkeras.control.messages import Deadlines
from hvkeras.control.relay import connect_to_relay, relay_lock, relay_name, start_relay
from hvkeras.control.server import ControlServer
from hvkeras.control.wire import AuthenticationError
from hvkeras.errors import MachineError, PeerError, UsageError, explain
from hvkeras.host.console import say
from hvkeras.host.files import read_private
from hvkeras.host.mpi import mpi_world, wait_for
from hvkeras.host.network import (
    LOOPBACK,
    address_towards,
    is_local,
    keep_alive,
    outward_address,
    own_addresses_of,
    own_networks,
    split_address,
)
from hvkeras.settings import NEW_SECRET, Settings

RECORD_BYTES = 1024  # per rank over MPI: its host name and addresses, as JSON
STORE_KEY = "/hvkeras/control"
_MAX_RESPONSE = 64 * 1024  # bytes; anybody may write to horovodrun's store
ADMITTED_WITHIN = 6.0  # seconds until a connection that the server's kernel has dropped is detected
FIRST_REPORT, REPORT_EVERY = 3.0, 30.0  # seconds until a missing rank is first reported, and between late reports
MIN_PAUSE, MAX_PAUSE = 0.05, 1.0  # seconds between two polls
POLLS_PER_SECOND = 1000  # of all ranks together, on a shared resource


class WaitReports:
    """Decides when a wait is reported: after a few seconds, then at intervals that double up to `REPORT_EVERY`."""

    def __init__(self) -> None:
        self._last, self._interval = 0.0, FIRST_REPORT

    def is_due(self, waited: float) -> bool:
        """Return whether to report a wait of so many seconds now; if so, the next interval begins."""
        if waited - self._last < self._interval:
            return False
        self._last, self._interval = waited, min(2 * self._interval, REPORT_EVERY)
        return True


class Waiting:
    """A deadline that repeatedly reports the ranks that are still missing.

    Args:
        timeout: Seconds until `check` raises.
        size: The number of ranks that poll the same resource.
    """

    def __init__(self, timeout: float, size: int = 1) -> None:
        self._timeout, self._size = timeout, size
        self._start = time.monotonic()
        self._reports = WaitReports()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._timeout - self.elapsed)

    def check(self, whom: str, why: str) -> None:
        """Report the wait if a report is due.

        Raises:
            PeerError: The deadline has passed.
        """
        waited = time.monotonic() - self._start
        if waited >= self._timeout:
            raise PeerError(explain(f"All ranks must connect within {self._timeout:g} s, but there is no answer from"
                                    f" {whom} ({why})",
                                    "start it, check its output, or raise HVKERAS_START_TIMEOUT"))
        if self._reports.is_due(waited):
            say(f"waiting for {whom}: {why}, {waited:.0f} s of {self._timeout:g} s")

    def pause(self) -> None:
        """Sleep until the next poll; longer after a long wait, and if many ranks poll the same resource."""
        wanted = max(MIN_PAUSE, (time.monotonic() - self._start) / 20, self._size / POLLS_PER_SECOND)
        time.sleep(min(wanted, MAX_PAUSE, self.left))


class Served(Protocol):
    """Server of a control channel."""

    address: tuple[str, int]

    def stop(self) -> None:
        """Stop serving."""


class Serve(Protocol):
    """Factory that creates and starts the server of a control channel."""

    def __call__(self, launch: Launch, settings: Settings, secret: bytes, host: str, port: int = 0) -> Served:
        """Listen on an address, at the given port or at a free one."""


def _serve(launch: Launch, settings: Settings, secret: bytes, host: str, port: int = 0) -> ControlServer:
    server = ControlServer(launch.size, secret, host, port, Deadlines.from_settings(settings), on_warning=_warn,
                           on_note=say)
    server.start()
    return server


def _warn(text: str) -> None:
    say(text)
    stalls.notify(text)


def serve_parameter_servers(launch: Launch, settings: Settings, serve: Serve) -> None:
    """Serve the control channel of a parameter server cluster from its chief, for the chief's lifetime.

    Args:
        serve: Creates the server; no other task needs to be connected yet.

    Raises:
        HvkerasError: The server cannot listen on the address, or the hosts share no secret.
    """
    _by_address(launch, settings, Waiting(settings.start_timeout, launch.size), serve)


def join_parameter_servers(launch: Launch, settings: Settings, on_end: Callable[[Cause], None]) -> ControlClient:
    """Connect a task of a parameter server cluster to its chief.

    Args:
        on_end: Called with the cause when the job ends early.

    Returns:
        The connected channel.

    Raises:
        HvkerasError: The chief cannot be found or reached in time, or rejects the task.
    """
    waiting = Waiting(settings.start_timeout, launch.size)
    _, address, secret, refresh = _by_address(launch, settings, waiting)
    client = _connect_client(launch, settings, on_end, waiting, address, secret, refresh)
    client.server_host = address[0]
    return client


class Connected(NamedTuple):
    """The connection of this process to the other ranks.

    Attributes:
        client: This rank's end of the control channel.
        server: The server, if this process runs it.
        claim: The socket that reserves the port of TF_CONFIG, if any.
    """

    client: ControlClient
    server: ControlServer | None
    claim: socket.socket | None


def connect(launch: Launch, settings: Settings, on_end: Callable[[Cause], None]) -> Connected:
    """Connect this rank to its job's control channel; except under `hvkeras run`, rank 0 starts the server.

    Args:
        launch: How this process was launched; it has more than one rank.
        on_end: Called with the cause when the job ends early.

    Returns:
        The client, and the server if this process runs it. The other ranks need not be connected yet.

    Raises:
        HvkerasError: Rank 0 cannot be found or reached in time, or its port is in use.
    """
    waiting = Waiting(settings.start_timeout, launch.size)
    methods = {"run": _by_environment, "spark": _by_environment, "mpi": _by_mpi_or_folder,
               "horovod_store": _by_horovod_store, "tf_config": _by_address, "address": _by_address,
               "folder": _by_folder}
    serves_at_port = launch.rank == 0 and uses_announced_port(launch, settings)
    with contextlib.ExitStack() as on_failure:
        claim = claim_port(launch) if launch.cluster and not serves_at_port else None
        if claim is not None:
            on_failure.callback(claim.close)
        server, address, secret, refresh = methods[launch.rendezvous.kind](launch, settings, waiting)
        if server is not None:
            on_failure.callback(server.stop)
        client = _connect_client(launch, settings, on_end, waiting, address, secret, refresh)
        on_failure.pop_all()
    assert server is None or isinstance(server, ControlServer)
    client.server_is_rank = launch.rendezvous.kind != "run"
    client.server_host = address[0]
    return Connected(client, server, claim)


Address = tuple[str, int]
Refresh = Callable[[], tuple[Address, bytes]]
Found = tuple["Served | None", Address, bytes, "Refresh | None"]


def _connect_client(
    launch: Launch, settings: Settings, on_end: Callable[[Cause], None], waiting: Waiting, address: Address,
    secret: bytes, refresh: Refresh | None,
) -> ControlClient:
    while True:
        whom = f"{launch.task_name(0)}, which serves the control channel at {address[0]}:{address[1]}"
        on_timeout = functools.partial(_check_unanswered, waiting, whom, refresh, (address, secret))
        try:
            connection = _reach(launch, settings, waiting, address, secret)
        except OSError as error:
            waiting.check(whom, _why_unreachable(error))
        else:
            try:
                return _client_on(connection, launch, settings, on_end, address, secret, on_timeout)
            except (OSError, AuthenticationError) as error:
                if refresh is None and isinstance(error, AuthenticationError):
                    raise
                waiting.check(whom, str(error))
        waiting.pause()
        if refresh is not None:
            address, secret = refresh()


def _check_unanswered(waiting: Waiting, whom: str, refresh: Refresh | None, known: tuple[Address, bytes]) -> None:
    """Report the wait for a server that does not answer.

    Raises:
        PeerError: The deadline has passed.
        OSError: The server has moved to another address.
    """
    waiting.check(whom, "it does not admit this rank yet")
    if refresh is not None and refresh() != known:
        raise ConnectionAbortedError("it has announced itself at another address")


def _client_on(connection: socket.socket, launch: Launch, settings: Settings, on_end: Callable[[Cause], None],
               address: Address, secret: bytes, on_timeout: Callable[[], None]) -> ControlClient:
    """Create a client on a connection to the server or a relay, and close the connection if that fails."""
    is_relay = connection.family == socket.AF_UNIX
    me = Introduction(launch.rank, launch.size, socket.gethostname())
    try:
        if not is_relay:
            keep_alive(connection, ADMITTED_WITHIN)  # the server's kernel may drop one of a thousand connections
        client = ControlClient(connection, secret, me, settings.liveness_timeout, on_end, on_timeout)
        if is_relay:
            client.local_address = address_towards(address[0])
        else:
            keep_alive(connection, 2 * settings.liveness_timeout)
    except BaseException:
        connection.close()
        raise
    return client


def _reach(launch: Launch, settings: Settings, waiting: Waiting, address: Address, secret: bytes) -> socket.socket:
    """Connect to the server, or to the relay of this host, which this rank may start.

    Raises:
        OSError: There is no connection yet.
    """
    timeout = min(5.0, waiting.left + 0.1)
    if is_one_host(launch) or not 0 < settings.relay_from <= launch.size:
        return socket.create_connection(address, timeout)
    name = relay_name(address, secret)
    with contextlib.suppress(ConnectionRefusedError):
        return connect_to_relay(name, timeout)
    why = ""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(relay_lock(name))
        except OSError:
            raise ConnectionRefusedError(0, "another rank of this host is starting the relay to it") from None
        with contextlib.suppress(ConnectionRefusedError):  # it may just have started
            return connect_to_relay(name, timeout)
        with socket.create_connection(address, timeout) as server:
            why = start_relay(name, server, secret, launch.size, settings.liveness_timeout)
    try:
        return connect_to_relay(name, timeout)
    except ConnectionRefusedError:
        say(f"no relay on {socket.gethostname()}: {why or 'it has ended'}; rank {launch.rank} connects directly")
        return socket.create_connection(address, timeout)


def _why_unreachable(error: OSError) -> str:
    text = (error.strerror or str(error)).lower()
    return f"its name does not resolve yet: {text}" if isinstance(error, socket.gaierror) else text


def _by_environment(launch: Launch, settings: Settings, _waiting: Waiting) -> Found:
    return None, split_address(launch.rendezvous.address), settings.secret.encode(), None


def _by_mpi_or_folder(launch: Launch, settings: Settings, waiting: Waiting) -> Found:
    """Use a folder on one host if the launcher identifies the job: MPI_Init would wait forever for late ranks."""
    if launch.rendezvous.job and (launch.local_size == launch.size or settings.rendezvous_dir):
        return _by_folder(launch, settings, waiting)
    return _by_mpi(launch, settings, waiting)


def _by_mpi(launch: Launch, settings: Settings, waiting: Waiting) -> Found:
    communicator = launch.rendezvous.communicator
    world = mpi_world(launch.launcher, launch.size, waiting.left) if communicator is None else communicator.Dup()
    try:
        if world.Get_rank() != launch.rank:
            raise MachineError(explain(f"{launch.launcher} and MPI must agree on this process's rank", "do not start"
                                       " one MPI launcher inside another", announced=launch.rank, mpi=world.Get_rank()))
        records = bytearray(RECORD_BYTES * launch.size)
        own_record = json.dumps([socket.gethostname(), own_networks()]).encode()
        own_record = own_record if len(own_record) <= RECORD_BYTES else json.dumps([socket.gethostname(), []]).encode()
        wait_for(world.Iallgather(own_record.ljust(RECORD_BYTES), records), "the exchange of host names", waiting.left)
        hosts = dict(json.loads(records[at : at + RECORD_BYTES]) for at in range(0, len(records), RECORD_BYTES))
        announcement = bytearray(512)
        server = None
        if launch.rank == 0:
            secret = secrets.token_bytes(32)
            server = _serve(launch, settings, secret, own_address(settings, hosts))
            announcement[:] = json.dumps([*server.address, secret.hex()]).encode().ljust(512)
        wait_for(world.Ibcast(announcement, root=0), "the exchange of addresses", waiting.left)
        host, port, secret_hex = json.loads(bytes(announcement))
        return server, (host, port), bytes.fromhex(secret_hex), None
    finally:
        world.Free()


def _by_horovod_store(launch: Launch, settings: Settings, waiting: Waiting) -> Found:
    store = f"http://{launch.rendezvous.address}{STORE_KEY}"
    if launch.rank == 0:
        secret = secrets.token_bytes(32)
        one_host = launch.local_size == launch.size
        host = LOOPBACK if one_host else own_address_towards(settings, split_address(launch.rendezvous.address)[0])
        server = _serve(launch, settings, secret, host)
        ask_store("PUT", store, json.dumps([*server.address, secret.hex()]).encode(), waiting)
        return server, server.address, secret, None

    def read_announcement() -> tuple[Address, bytes]:
        while True:
            announcement = ask_store("GET", store, None, waiting)
            why = "it has not announced itself in horovodrun's store"
            if announcement:
                try:
                    host, port, secret_hex = json.loads(announcement)
                    return (host, int(port)), bytes.fromhex(secret_hex)
                except (ValueError, TypeError):
                    why = "horovodrun's store has no valid announcement of it"
            waiting.check("rank 0", why)
            waiting.pause()

    address, secret = read_announcement()
    return None, address, secret, read_announcement


def ask_store(method: str, url: str, body: bytes | None, waiting: Waiting) -> bytes:
    """Send a request to horovodrun's store, bypassing proxies; a missing key reads as empty."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data=body, method=method)
    while True:
        try:
            with opener.open(request, timeout=5.0) as answer:
                text = bytes(answer.read(_MAX_RESPONSE + 1))
            if len(text) <= _MAX_RESPONSE:
                return text
            waiting.check("horovodrun's store", f"its answer is longer than {_MAX_RESPONSE} bytes")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return b""
            waiting.check("horovodrun's store", str(error))
        except OSError as error:
            waiting.check("horovodrun's store", str(error))
        waiting.pause()


def _by_address(launch: Launch, settings: Settings, waiting: Waiting, serve: Serve = _serve) -> Found:
    """Connect at rank 0's address, which the launch environment gives to all ranks."""
    if not uses_announced_port(launch, settings):
        return _by_folder(launch, settings, waiting, serve)
    if not settings.secret:
        ranks = {"cluster": list(launch.cluster)} if launch.cluster else {"address": launch.rendezvous.address}
        raise UsageError(explain(
            f"Ranks on several hosts, launched by {launch.launcher}, must share a secret, so that nobody else can join",
            f"run {NEW_SECRET} once, and set HVKERAS_SECRET to what it prints on every worker, or"
            " HVKERAS_RENDEZVOUS_DIR to a private folder that all hosts share", **ranks))
    # Rank 0 serves on its announced port until all ranks are connected; then TensorFlow uses the port of TF_CONFIG.
    secret = settings.secret.encode()
    host, port = split_address(launch.rendezvous.address)
    host = LOOPBACK if launch.local_size == launch.size else host
    if launch.rank:
        return None, (host, port), secret, None
    if launch.cluster:
        return serve(launch, settings, secret, host if is_local(host) else "", port), (host, port), secret, None
    # If empty, `host` is the loopback of a job on several hosts, or an address that forwards to this host.
    own = [LOOPBACK] if launch.local_size == launch.size else own_addresses_of(host)
    server = serve(launch, settings, secret, own[0] if own else "", port)
    return server, (own[0] if own else _outward_or_loopback(), port), secret, None


def _outward_or_loopback() -> str:
    try:
        return outward_address()
    except UsageError:  # this machine has no network
        return LOOPBACK


def uses_announced_port(launch: Launch, settings: Settings) -> bool:
    """Return whether ranks connect at rank 0's announced port (TF_CONFIG, MASTER_PORT), not through a folder."""
    return launch.rendezvous.kind in ("tf_config", "address") and (
        bool(settings.secret) or not (is_one_host(launch) or settings.rendezvous_dir))


def _by_folder(launch: Launch, settings: Settings, waiting: Waiting, serve: Serve = _serve) -> Found:
    announcement = announcement_path(launch, settings)
    if launch.rank == 0:
        secret = secrets.token_bytes(32)
        one_host = is_one_host(launch)
        server = serve(launch, settings, secret, LOOPBACK if one_host else own_address(settings, {}))
        write_privately(announcement, json.dumps([*server.address, secret.hex()]))
        return server, server.address, secret, None

    def read_announcement() -> tuple[Address, bytes]:
        while True:
            with contextlib.suppress(OSError, ValueError):
                host, port, secret_hex = json.loads(read_private(announcement))
                return (host, port), bytes.fromhex(secret_hex)
            waiting.check(launch.task_name(0), "it has not announced itself")
            waiting.pause()

    address, secret = read_announcement()
    return None, address, secret, read_announcement


def claim_port(launch: Launch) -> socket.socket:
    """Reserve this task's TF_CONFIG port by listening on it, without accepting connections, until TensorFlow does.

    This detects another process of the same task, or any other program on the port, before anything connects.
    """
    host, port = split_address(launch.cluster[launch.rank])
    claim = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        claim.bind((host if is_local(host) else "", port))
        claim.listen(1)
    except OSError as error:
        claim.close()
        raise MachineError(explain(
            f"The port that TF_CONFIG gives to {launch.task_name(launch.rank)} must be free ({error.strerror})",
            "another task with this index runs already, or another program uses it: stop that, or give this task"
            " another index or port", port=port)) from None
    return claim
