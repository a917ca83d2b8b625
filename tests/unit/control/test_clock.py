"""The clocks of hosts against each other: over a real channel with a shifted clock, and over a slow cable."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import hosts as machines
from harness.launchers import clean_environment
from hvkeras.control import clock
from hvkeras.control.client import ControlClient
from hvkeras.control.clock import Clock
from hvkeras.control.connection import Introduction
from hvkeras.control.server import ControlServer

SECRET = b"s" * 32


@pytest.fixture
def connected() -> Iterator[Callable[[], ControlClient]]:
    """Connects rank 0 of one to a server."""
    server = ControlServer(1, SECRET)
    address = server.start()
    clients = []

    def connect() -> ControlClient:
        connection = socket.create_connection(address, timeout=5.0)
        clients.append(ControlClient(connection, SECRET, Introduction(0, 1, "here"), 5.0, lambda cause: None))
        return clients[-1]

    yield connect
    for client in clients:
        client.leave()
        client.close()
    server.stop()


def test_on_one_host_the_offset_is_exactly_zero(connected: Callable[[], ControlClient]) -> None:
    client = connected()
    assert client.clock.offset is None
    client.measure_clock()
    client.clock.wait(5.0)
    assert client.clock.offset == clock.Offset(0.0, 0.0)


def test_a_shifted_clock_is_found_out(connected: Callable[[], ControlClient]) -> None:
    client = connected()
    client.clock = Clock("elsewhere", lambda: time.time() - 1000.0)
    client.measure_clock()
    client.measure_clock()  # one that is still running goes on
    client.clock.wait(5.0)
    offset = client.clock.offset
    assert offset is not None
    assert 0 < offset.uncertainty < 5.0
    assert abs(offset.seconds - 1000.0) <= offset.uncertainty
    assert len(client.clock._answers) >= clock.QUESTIONS


def test_the_shortest_round_trip_counts_until_clocks_may_have_drifted() -> None:
    now = [100.0]
    mine = Clock("here", lambda: now[0])
    assert mine.begin()
    for round_trip, late in ((0.4, 0.1), (0.002, 0.0), (0.3, 0.0)):  # late: how unlike the two directions are
        asked, now[0] = now[0], now[0] + round_trip
        assert mine.receive_answer(asked, asked + round_trip / 2 + 7.0 + late, "there")
    offset = mine.offset
    assert offset is not None
    assert offset.seconds == pytest.approx(7.0)
    assert offset.uncertainty == pytest.approx(0.001 + 0.3 * clock.DRIFT)
    now[0] += 3600.0
    mine.begin()
    mine.receive_answer(now[0] - 0.02, now[0] - 0.01 + 7.05, "there")
    assert mine.offset is not None
    assert mine.offset.seconds == pytest.approx(7.05)  # the old answer may be wrong by 54 ms by now


SERVE = """
import json, sys
from hvkeras.control.server import ControlServer
server = ControlServer(1, b"s" * 32, sys.argv[1])
print(server.start()[1], flush=True)
sys.stdin.read()
server.stop()
"""
ASK = """
import dataclasses, json, socket, sys
from hvkeras.control.client import ControlClient
from hvkeras.control.connection import Introduction
client = ControlClient(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5), b"s" * 32, Introduction(0, 1, "x"),
                       9.0, print)
client.measure_clock()
client.clock.wait(20.0)
print(json.dumps(dataclasses.asdict(client.clock.offset)))
client.leave()
client.close()
"""


@pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
def test_over_a_slow_cable_the_uncertainty_covers_the_error(tmp_path: Path) -> None:
    with machines.two_hosts() as (here, there):
        # A packet leaves in about 25 ms; in one direction alone, which no protocol can tell from a clock that is ahead.
        slow = ["tc", "qdisc", "add", "dev", machines.CABLE, "root", "tbf", "rate", "64kbit", "burst",
                "540", "limit", "20000"]
        subprocess.run(["ip", "netns", "exec", here.namespace, *slow], check=True, capture_output=True, timeout=10)
        serving = subprocess.Popen(there.command(sys.executable, "-c", SERVE, there.address), cwd=tmp_path, text=True,
                                   env=clean_environment(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert serving.stdout is not None
            port = serving.stdout.readline().strip()
            asked = subprocess.run(here.command(sys.executable, "-c", ASK, there.address, port), cwd=tmp_path,
                                   text=True, env=clean_environment(tmp_path), capture_output=True, timeout=60)
        finally:
            serving.communicate("", timeout=30)
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert 0 < abs(found["seconds"]) <= found["uncertainty"]  # it is one machine: the true offset is zero
