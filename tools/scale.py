"""Measure the control channel with a thousand ranks: real clients without TensorFlow, on one machine.

    python tools/scale.py clients --ranks 1024 --per-host 8
    python tools/scale.py clients --ranks 1024 --per-host 8 --direct
    python tools/scale.py costs --ranks 1024 --per-host 8
    python tools/scale.py handshakes --ranks 4096

Set `PYTHONPATH` to a checkout of an older commit to measure that one, with `--direct` if it has no relays.

`clients` starts a process for the server, one for each relay, and one for every four ranks, whose clients run in
threads. Each host is an address of the loopback, and has its own relay. The measurement begins after all processes have
finished their imports, and relays are forked: the imports would take minutes on two cores.
`costs` prints the cost of each exchange, minus that of the heartbeats during it: messages and bytes of the server, and
CPU time of the server, of a relay and of a rank.
`handshakes` connects all ranks at once, directly, from two processes with the protocol on asyncio. It shows that
admission has no race conditions. Seconds are wall-clock time unless they are labeled CPU; bytes are TCP payload, read
from the server's sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from hvkeras.control import message_server, rendezvous, wire
from hvkeras.control.launch_environments import Launch, Rendezvous
from hvkeras.control.messages import Arrived, Deadlines, Heartbeat, Hello, Value, Welcome, decode, encode
from hvkeras.control.server import ControlServer
from hvkeras.settings import Settings

try:
    from hvkeras.control.relay import connect_to_relay, relay
except ImportError:  # a commit without relays
    relay = None  # type: ignore[assignment]
try:
    from hvkeras.control.messages import ValueDigest, ValueWanted
except ImportError:
    ValueDigest = ValueWanted = None  # type: ignore[assignment, misc]

SECRET = b"s" * 32
PLANS, TENSORS = 8, 20
PER_PROCESS = 4
_TCP_INFO_BYTES = struct.Struct("=120xQQ")  # tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info (linux/tcp.h)
Command = tuple[Any, ...]


class Served:
    """Server in a separate process, which answers commands."""

    def __init__(self, size: int, deadlines: dict[str, float], counts: bool = False) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_serve, args=(theirs, size, deadlines, counts), daemon=True)
        self._process.start()
        self._pipe = ours
        self.port: int = ours.recv()

    def query(self, name: str) -> Any:
        """Return `cpu` seconds, the peak resident `memory` in MiB, `bytes` of all connections, or `costs`."""
        self._pipe.send(name)
        return self._pipe.recv()

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Pipe, size: int, deadlines: dict[str, float], counts: bool) -> None:
    _raise_open_files()
    server = ControlServer(size, SECRET, "0.0.0.0", deadlines=Deadlines(**deadlines),
                           on_end=lambda cause: print(f"    the job ends: {cause.sentence()[:200]}", flush=True),
                           on_warning=lambda text: print(f"    {text[:200]}", flush=True))
    pipe.send(server.start()[1])
    messages = _count_messages() if counts else []
    while True:
        match pipe.recv():
            case "cpu":
                usage = resource.getrusage(resource.RUSAGE_SELF)
                pipe.send(usage.ru_utime + usage.ru_stime)
            case "memory":
                pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            case "bytes":
                pipe.send(sum(_traffic()))
            case "costs":
                pipe.send([*map(list, messages), time.process_time()])


def _count_messages() -> list[list[int]]:
    """Start to count this server's traffic; return [messages in, messages out, bytes] of heartbeats and of the rest."""
    counts, receive, write = [[0, 0, 0], [0, 0, 0]], message_server.MessageServer.receive, message_server._Peer.write

    def count(data: bytes, index: int) -> None:
        relayed, *bodies = data.split(b"\n", 1)
        is_beat = (not bodies and relayed.startswith(b'["Relayed"')) or all(
            line.startswith(b'["Heartbeat"') for line in (bodies[0].split(b"\n") if bodies else [relayed]))
        counts[not is_beat][index] += 1
        counts[not is_beat][2] += len(data)

    def counted_receive(server: Any, member: Any, data: bytes) -> None:
        count(data, 0)
        receive(server, member, data)

    def counted_write(peer: Any, data: bytes) -> None:
        count(data, 1)
        write(peer, data)

    message_server.MessageServer.receive, message_server._Peer.write = counted_receive, counted_write
    return counts


def _traffic() -> Iterator[int]:
    """Yield the bytes of each TCP connection of this process, in both directions."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family == socket.AF_INET and one.getpeername():
                        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                        yield sum(_TCP_INFO_BYTES.unpack_from(info))


class Entries:
    """Simulated counts of entered plans, which grow with each heartbeat unless `held` is set."""

    def __init__(self, size: int) -> None:
        self.held = False
        self.beats = 0
        self._plans = [PlanOfTool(number, size) for number in range(PLANS)]

    def snapshot(self) -> dict[str, tuple[int, Any]]:
        """Return the count of entries and the plan, by key."""
        self.beats += not self.held
        return {plan.key: (self.beats, plan) for plan in self._plans}

    def site(self, _key: str) -> str:
        """Return a call site."""
        return "train.py:42"

    def calls(self) -> dict[str, Any]:
        """Return no calls."""
        return {}

    def forget(self, _counts: object) -> list[str]:
        """Return no keys."""
        return []

    def set_outstanding(self, _keys: object) -> None:
        """Do nothing."""

    def can_raise(self, _key: str) -> bool:
        """Return False."""
        return False


class PlanOfTool:
    """Plan with as many tensors as a typical bucket of gradients."""

    operation = "gradients"

    def __init__(self, number: int, size: int) -> None:
        self.label = f"gradients of Adam, bucket {number}"
        self.key = hashlib.sha256(self.label.encode()).hexdigest()[:32]
        self._size = size

    def describe(self) -> dict[str, Any]:
        """Return the description that ranks send."""
        names = [f"layer_{number}/kernel" for number in range(TENSORS)]
        return {"operation": self.operation, "how": "average", "label": self.label, "names": names, "hint": "",
                "kinds": ["float32[1024, 1024]"] * TENSORS, "ranks": list(range(self._size)), "is_of_model": False}


def facts(host: int) -> dict[str, Any]:
    """Return facts as long as those that a rank reports at the start of a job."""
    names = ("native", "horovod", "tfdist", "local")
    return {"host": f"node{host:04}", "identity": hashlib.sha256(str(host).encode()).hexdigest(),
            "cores": list(range(64)),
            "versions": {"Python": platform.python_version(), "hvkeras": "1.0", "TensorFlow": "2.21", "Keras": "3.14"},
            "settings": Settings({}).shared(), "gpus": [], "requested": "auto",
            "objections": dict.fromkeys(names, ""), "objections_between_hosts": dict.fromkeys(names, ""),
            "preferred": names, "preferred_on_gpus": names}


class Ranks:
    """Clients of several ranks of a host, in a separate process that answers commands."""

    def __init__(self, ranks: range, per_host: int, size: int, port: int, direct: bool) -> None:
        self.ranks = ranks
        self._pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=_run_ranks, args=(theirs, ranks, per_host, size, port, direct),
                                               daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *command: Any) -> None:
        """Send a command."""
        self._pipe.send(command)

    def answers(self, timeout: float) -> list[Any]:
        """Return the answers of the ranks."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"ranks {self.ranks} have not answered within {timeout:.0f} s")
        found: list[Any] = self._pipe.recv()
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found


class Rank:
    """Client of one rank."""

    def __init__(self, rank: int, per_host: int, size: int, port: int, direct: bool) -> None:
        self._rank, self._per_host, self._size, self._direct = rank, per_host, size, direct
        self._host = rank // per_host
        self._address = (f"127.{1 + self._host // 250}.{self._host % 250}.1", port)
        self._entries = Entries(size)
        self._ended: list[tuple[float, str]] = []
        self._client: Any = None

    def do(self, *command: Any) -> Any:
        """Run a command, and return its answer or the error."""
        try:
            return getattr(self, command[0])(*command[1:])
        except BaseException as error:  # noqa: BLE001 - raised in the parent
            return RuntimeError(f"{type(error).__name__}: {str(error)[:300]}")

    def wait(self) -> None:
        """Do nothing: the answer shows that the process is ready."""

    def connect(self) -> float:
        """Connect and gather the facts; return the time at which they were complete."""
        relays = {} if relay is None else {"HVKERAS_RELAY_FROM": "0" if self._direct else "2"}
        settings = Settings({"HVKERAS_START_TIMEOUT": "120"} | relays)
        index = Rendezvous("run", "{}:{}".format(*self._address))
        launch = Launch("tool", self._rank, self._size, index, self._rank % self._per_host, self._per_host)
        self._client = rendezvous._connect_client(
            launch, settings, lambda cause: self._ended.append((time.monotonic(), cause.sentence())),
            rendezvous.Waiting(120.0), self._address, SECRET, None)
        self._client.server_is_rank = False
        found = self._client.gather("facts", facts(self._host), 120.0)
        end = time.monotonic()
        assert len(found) == self._size
        assert found[self._rank]["host"] == facts(self._host)["host"]
        return end

    def gather(self, key: str, equal: bool) -> float:
        """Gather 1 KiB of each rank; return the time of completion."""
        value = ("v" if equal else f"{self._rank:08}") * (1024 if equal else 128)
        found = self._client.gather(key, value, 120.0)
        end = time.monotonic()
        assert len(found) == self._size
        assert found[self._rank] == value, f"rank {self._rank} received another rank's value"
        return end

    def gather_facts(self, key: str) -> float:
        """Gather the facts again; return the time of completion."""
        self._client.gather(key, facts(self._host), 120.0)
        return time.monotonic()

    def gather_small(self, key: str) -> float:
        """Gather 32 bytes of each rank, which are sent without a digest; return the time of completion."""
        self._client.gather(key, "v" * 32, 120.0)
        return time.monotonic()

    def stop(self, key: str) -> float:
        """Agree to stop a `fit` that all ranks request to stop; return the time of the agreement."""
        stop = self._client.stop_of(key)
        stop.begin()
        while not stop.now(True, lambda: self._client.ask_to_stop(key, list(range(self._size))),
                           self._client.raise_if_ended, 60.0):
            stop.begin()
        return time.monotonic()

    def train(self) -> None:
        """Let counts change with every heartbeat."""
        self._client.join(self._entries)

    def hold(self) -> None:
        """Let half of the ranks stay one step behind."""
        self._entries.beats, self._entries.held = 1_000_000 - (self._rank >= self._size // 2), True

    def ended(self) -> tuple[float, str]:
        """Return the time and the reason of the job's end on this rank."""
        until = time.monotonic() + 60.0
        while not self._ended and time.monotonic() < until:
            time.sleep(0.05)
        return self._ended[0] if self._ended else (float("inf"), "nothing")


def _run_ranks(pipe: Pipe, ranks: range, per_host: int, size: int, port: int, direct: bool) -> None:
    _raise_open_files()
    sys.setswitchinterval(0.1)  # a thousand threads at the default of 5 ms would only switch
    rendezvous.start_relay = _fork_relay
    found = [Rank(rank, per_host, size, port, direct) for rank in ranks]
    with ThreadPoolExecutor(len(found)) as threads:
        while True:
            command = pipe.recv()
            pipe.send([each.result() for each in [threads.submit(rank.do, *command) for rank in found]])


def _fork_relay(name: str, server: socket.socket, secret: bytes, size: int, liveness: float) -> str:
    """Run a relay in a forked child instead of a new program, and wait until it accepts connections."""
    if os.fork() == 0:
        connection = os.dup2(server.fileno(), 3)
        os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))  # above all, connections of this process's other ranks
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        relay(name, socket.socket(fileno=connection), secret, size, liveness)
        os._exit(0)
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connect_to_relay(name, 5.0).close()
            return ""
        time.sleep(0.01)


def _all(ranks: Sequence[Ranks], *command: Any, timeout: float = 130.0) -> list[Any]:
    for each in ranks:
        each.send(*command)
    return [answer for each in ranks for answer in each.answers(timeout)]


def clients(chosen: argparse.Namespace) -> None:
    """Measure the start, gathers, heartbeats and the failure of a rank."""
    size, hosts = chosen.ranks, -(-chosen.ranks // chosen.per_host)
    direct = chosen.direct or relay is None
    print(f"{size} ranks on {hosts} hosts, {'without relays' if direct else 'through relays'}", flush=True)
    for round_number in range(chosen.rounds):
        served = Served(size, {"stall_warning": 60.0, "mismatch": 3.0})
        firsts = [*range(0, size - 1, PER_PROCESS), size - 1]  # the last rank can be killed alone
        ranks = [Ranks(range(first, end), chosen.per_host, size, served.port, direct)
                 for first, end in zip(firsts, [*firsts[1:], size], strict=True)]
        try:
            _all(ranks, "wait")
            begin = time.monotonic()
            seconds = max(_all(ranks, "connect")) - begin
            print(f"  connected, and the facts gathered: {seconds:.2f} s", flush=True)
            if round_number == chosen.rounds - 1:
                _measure(chosen, served, ranks, hosts)
        finally:
            served.stop()  # first: it would report the exits of the ranks
            for each in ranks:
                each.process.kill()
            time.sleep(1.0)


def _measure(chosen: argparse.Namespace, served: Served, ranks: Sequence[Ranks], hosts: int) -> None:
    for kind, equal in (("different", False), ("equal", True)):
        before, seconds = served.query("bytes"), []
        for number in range(3):
            begin = time.monotonic()
            seconds.append(max(_all(ranks, "gather", f"{kind} {number}", equal)) - begin)
        per_host = (served.query("bytes") - before) / len(seconds) / hosts / 2**20
        print(f"  1 KiB per rank gathered, {kind} values: {', '.join(f'{one:.2f}' for one in seconds)} s,"
              f" {per_host:.2f} MiB per host to and from the server", flush=True)
    for state, command in (("counts change in every heartbeat", "train"), ("half of the ranks late", "hold")):
        _all(ranks, command)
        time.sleep(3.0)
        before, begin = served.query("cpu"), time.monotonic()
        time.sleep(chosen.seconds)
        share = (served.query("cpu") - before) / (time.monotonic() - begin)
        print(f"  server, {state}: {100 * share:.1f} % of a core over {chosen.seconds:.0f} s", flush=True)
    print(f"  server, peak memory: {served.query('memory'):.0f} MiB", flush=True)
    victim, others = chosen.ranks - 1, ranks[:-1]
    begin = time.monotonic()
    ranks[-1].process.kill()
    ended = _all(others, "ended", timeout=70.0)
    correct = [at for at, text in ended if f"rank {victim} on" in text and "ended unexpectedly" in text]
    print(f"  rank {victim} killed: {len(correct)} of {len(ended)} others received its name and cause, the last one"
          f" after {max(correct, default=float('inf')) - begin:.2f} s", flush=True)


def costs(chosen: argparse.Namespace) -> None:
    """Print the cost of each exchange, as a table."""
    size, hosts = chosen.ranks, -(-chosen.ranks // chosen.per_host)
    served = Served(size, {"stall_warning": 60.0, "mismatch": 3.0}, counts=True)
    ranks = [Ranks(range(first, min(first + PER_PROCESS, size)), chosen.per_host, size, served.port, chosen.direct)
             for first in range(0, size, PER_PROCESS)]
    try:
        _all(ranks, "wait")
        _all(ranks, "connect")
        pids = [each.process.pid or 0 for each in ranks]
        relays = [int(child) for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()
                  for child in (thread / "children").read_text().split()]

        def now() -> list[Any]:
            return [*served.query("costs"), sum(map(_cpu, relays)), sum(map(_cpu, pids))]

        def row(name: str, command: Command | None, cpu: Sequence[float] = (0.0,) * 3, beats: float = 1.0) -> list[Any]:
            time.sleep(1.0)
            before, begin = now(), time.monotonic()
            if command is None:
                time.sleep(chosen.seconds)
            else:
                _all(ranks, *command)
                time.sleep(0.5)  # for messages in flight
            after, seconds = now(), time.monotonic() - begin
            of_beats, of_rest = ([last - first for first, last in zip(*pair, strict=True)]
                                 for pair in ((before[0], after[0]), (before[1], after[1])))
            carried = [one / seconds for one in of_beats] if command is None else of_rest
            # Without the cost of the heartbeats during the exchange.
            per, meanwhile = (seconds, 0.0) if command is None else (1.0, of_beats[0] / beats)
            spent = [(last - first) / per - meanwhile * one
                     for first, last, one in zip(before[2:], after[2:], cpu, strict=True)]
            received, sent, data = carried
            print(f"| {name} | {received:,.0f} | {sent:,.0f} | {data / 2**10:,.0f} | {1e3 * spent[0]:.0f} |"
                  f" {1e3 * spent[1] / max(len(relays), 1):.1f} | {1e3 * spent[2] / size:.2f} |", flush=True)
            return [spent, received]

        print(f"{size} ranks on {hosts} hosts, {'without relays' if chosen.direct else 'through relays'}\n\n"
              "| exchange | messages to the server | from it | KiB | CPU of the server, ms | of a relay | of a rank |\n"
              "| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        beats = row("heartbeats of one second, no changes", None)
        for name, *command in (("facts of `init()`", "gather_facts", "facts 2"),
                               ("32 bytes, equal values", "gather_small", "small"),
                               ("1 KiB, equal values", "gather", "equal", True),
                               ("1 KiB, different values, the first time", "gather", "different 1", False),
                               ("1 KiB, different values, again", "gather", "different 2", False),
                               ("an early stop of `fit` that all ranks request", "stop", "fit 1")):
            row(name, tuple(command), *beats)
        _all(ranks, "train")
        time.sleep(3.0)
        row("heartbeats of one second, all counts changed", None)
    finally:
        served.stop()
        for each in ranks:
            each.process.kill()


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process's threads (the first number of schedstat, in ns)."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


# `handshakes`: the protocol on asyncio.


async def _rank(rank: int, size: int, port: int, gathered: list[int], leave: asyncio.Event) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    challenge = await reader.readexactly(len(wire.MAGIC) + wire.NONCE_BYTES)
    theirs, own = challenge[len(wire.MAGIC):], wire.nonce()
    writer.write(own + wire.authentication_code(SECRET, b"client", theirs, own))
    wire.verify_code(await reader.readexactly(wire.CODE_BYTES),
                     wire.authentication_code(SECRET, b"server", theirs, own))
    seal = wire.Seal(wire.authentication_code(SECRET, b"session", theirs, own), b"client", b"server")

    async def read() -> bytes:
        data = None
        while data is None:
            header = await reader.readexactly(wire.HEADER.size)
            code = await reader.readexactly(wire.CODE_BYTES)
            data = seal.open_frame(header, code, await reader.readexactly(wire.payload_length(header)))
        return data

    def send(message: Any) -> None:
        writer.writelines(seal.close_frames(encode(message)))

    send(Hello(rank, size, f"node{rank // 8}", os.getpid(), 0))
    answer = decode(await read())
    assert isinstance(answer, Welcome), answer
    send(Arrived())
    value = facts(rank // 8)
    if ValueDigest is None:
        send(Value("facts", value))
    else:
        send(ValueDigest("facts", hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]))

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.5)
            send(Heartbeat())

    beating = asyncio.ensure_future(beat())
    while not (data := await read()).startswith(b'["AllValues"'):
        if data.startswith(b'["ValueWanted"'):
            send(Value("facts", value))
        assert not data.startswith(b'["JobEnded"'), data
    gathered.append(rank)
    await leave.wait()
    beating.cancel()
    writer.close()


def _run_handshakes(pipe: Pipe, ranks: Sequence[int], size: int, port: int) -> None:
    _raise_open_files()

    async def run() -> None:
        gathered: list[int] = []
        leave = asyncio.Event()
        tasks = [asyncio.ensure_future(_rank(rank, size, port, gathered, leave)) for rank in ranks]
        while len(gathered) < len(ranks):
            done, _ = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        pipe.send(time.monotonic())
        await asyncio.sleep(3600)

    pipe.recv()
    try:
        asyncio.run(run())
    except BaseException as error:  # noqa: BLE001 - reported by the parent
        pipe.send(RuntimeError(f"{type(error).__name__}: {str(error)[:300]}"))


def handshakes(chosen: argparse.Namespace) -> None:
    """Measure the direct connection of all ranks at once."""
    size = chosen.ranks
    served = Served(size, {"liveness": 60.0})
    pipes, processes = [], []
    for part in range(2):
        ours, theirs = multiprocessing.Pipe()
        processes.append(multiprocessing.Process(target=_run_handshakes, daemon=True, args=(
            theirs, range(part, size, 2), size, served.port)))
        processes[-1].start()
        pipes.append(ours)
    begin = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    for pipe in pipes:
        if not pipe.poll(300.0):
            print(f"{size} ranks are not connected after 300 s")
            break
        if isinstance(found := pipe.recv(), BaseException):
            print(f"{size} ranks cannot connect: {found}")
            break
    else:
        print(f"{size} ranks, without relays: connected, and the facts gathered: {time.monotonic() - begin:.2f} s;"
              f" server {served.query('cpu'):.1f} s of CPU, peak memory {served.query('memory'):.0f} MiB")
    for process in processes:
        process.kill()
    served.stop()


def _raise_open_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Parse the command line, and run a measurement."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = options.add_subparsers(required=True)
    of_clients = kinds.add_parser("clients", help="real clients on simulated hosts")
    of_clients.add_argument("--ranks", type=int, default=1024)
    of_clients.add_argument("--per-host", type=int, default=8)
    of_clients.add_argument("--rounds", type=int, default=1, help="number of starts (default: %(default)s)")
    of_clients.add_argument("--seconds", type=float, default=60.0,
                            help="duration of each CPU measurement (default: %(default)s)")
    of_clients.add_argument("--direct", action="store_true", help="without relays")
    of_clients.set_defaults(run=clients)
    of_costs = kinds.add_parser("costs", help="the cost of each exchange")
    of_costs.add_argument("--ranks", type=int, default=1024)
    of_costs.add_argument("--per-host", type=int, default=8)
    of_costs.add_argument("--seconds", type=float, default=20.0,
                          help="duration of the heartbeat measurement (default: %(default)s)")
    of_costs.add_argument("--direct", action="store_true", help="without relays")
    of_costs.set_defaults(run=costs)
    of_handshakes = kinds.add_parser("handshakes", help="many ranks on asyncio, without relays")
    of_handshakes.add_argument("--ranks", type=int, default=4096)
    of_handshakes.set_defaults(run=handshakes)
    chosen = options.parse_args()
    _raise_open_files()
    chosen.run(chosen)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # a thousand forks would share this process's pages, which is slow
    main()
